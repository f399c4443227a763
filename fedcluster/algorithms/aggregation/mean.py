"""The aggregate: the cohort's weighted average.

    W = sum_k p_k w_k / sum_k p_k

The weights are renormalised by the total of those that came back. Each p_k w_k is rounded to a multiple of 2^-40,
far below what float32 can hold of a weight; sums of such numbers are exact in float64 (below 2^13, beyond which no
trained weight lies), so that their order, and with it who computed what, cannot change the result. One vector is
held, whatever the size of the cohort; under torchrun one reduction of it adds what the other ranks have.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch import distributed as ranks

from fedcluster.errors import LostRank
from fedcluster.models.kernels import library as compiled
from fedcluster.state import Message

GRID = 1.5 * 2.0**12  # added to a float64 below 2^12, it leaves no room for bits below 2^-40


def average(weighted: Iterable[tuple[float, Message]], like: Message) -> Message | None:
    """The average of (weight, message) pairs, messages of the form of `like`; None when there are none anywhere."""
    found = average_and_total(weighted, like)
    return None if found is None else found[0]


def average_and_total(weighted: Iterable[tuple[float, Message]], like: Message) -> tuple[Message, float] | None:
    """The same, and the total weight of what was averaged, on all ranks."""
    sizes = [tensor.numel() for tensor in like.values()]
    device = next(iter(like.values())).device
    total = torch.zeros(sum(sizes) + 1, dtype=torch.float64, device=device)
    sums = dict(zip(like, torch.split(total[:-1], sizes), strict=True))
    weights = 0.0
    for weight, message in weighted:
        for name, sum_ in sums.items():
            accumulate(sum_, message[name], weight)
        weights += weight + GRID - GRID
    total[-1] = weights
    if ranks.is_initialized():
        all_reduce(total)
    share = float(total[-1])
    return ({name: sum_.div_(share).to(torch.float32) for name, sum_ in sums.items()}, share) if share > 0 else None


def all_reduce(total: Tensor) -> None:
    """The sum over all ranks, in place."""
    with collective():
        ranks.all_reduce(total)


@contextmanager
def collective() -> Iterator[None]:
    """All ranks at once: one that does not come is lost."""
    try:
        yield
    except RuntimeError as error:
        raise LostRank(f"another rank is gone ({str(error).splitlines()[0][:120]}); see its own output") from None


def accumulate(total: Tensor, vector: Tensor, weight: float) -> None:
    """total += weight * vector on the grid; in one pass where there is a compiler, the same to the bit."""
    if compiled.applies(vector):
        compiled.accumulate(total, vector, weight, GRID)
    else:
        grid = torch.tensor(GRID, dtype=torch.float64, device=total.device)
        total.add_(torch.add(grid, vector.double(), alpha=weight).sub_(GRID))
