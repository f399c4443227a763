"""The weighted mean of a cohort.

    W = sum_k p_k w_k / sum_k p_k

The weights are renormalised by the total of the accepted updates. Each p_k w_k is rounded to a multiple of 2^-40, far
below the precision of a float32 weight. Sums of such numbers are exact in float64 below 2^13, which no trained weight
exceeds, so the order of the updates and the assignment of devices to processes cannot change the result. Memory is one
float64 vector, whatever the size of the cohort; under torchrun the ranks reduce it once.
"""

from collections.abc import Callable

import torch
from numpy.random import Generator
from torch import Tensor

from fedcluster.experiment import Section
from fedcluster.models.kernels.vectors import add_rounded
from fedcluster.state import Aggregate, Tensors

GRID = 1.5 * 2.0**12  # a float64 below 2^12 plus GRID has no bits below 2^-40


class Mean:
    class Options(Section):
        pass

    def __init__(self, spec: Tensors, options: Options | None = None, rng: Generator | None = None) -> None:
        sizes = [tensor.numel() for tensor in spec.values()]
        device = next(iter(spec.values())).device
        self.total = torch.zeros(sum(sizes) + 1, dtype=torch.float64, device=device)  # the last number is the weight
        self.sums = dict(zip(spec, torch.split(self.total[:-1], sizes), strict=True))
        self.weight = 0.0

    def accumulate(self, message: Tensors, weight: float, device: int = 0) -> None:
        for name, sum_ in self.sums.items():
            add_rounded(sum_, message[name], weight, GRID)
        self.weight += weight + GRID - GRID

    def reduce(self, all_reduce: Callable[[Tensor], None]) -> None:
        self.total[-1] = self.weight
        all_reduce(self.total)
        self.weight = float(self.total[-1])

    def finish(self) -> Aggregate | None:
        if self.weight <= 0:
            return None
        mean = {name: sum_.div_(self.weight).to(torch.float32) for name, sum_ in self.sums.items()}
        return Aggregate(mean, self.weight)
