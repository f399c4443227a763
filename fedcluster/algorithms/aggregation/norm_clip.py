"""Norm clipping. Sun, Kairouz, Suresh, McMahan: Can You Really Backdoor Federated Learning?, 2019.

    w_k <- W + min(1, limit / ||w_k - W||) (w_k - W)

before the weighted mean. The limit is `norm`, or `times` the median movement of the 100 cohorts before; in the first
cycle of a run, and where nobody has moved, that of the cohort itself. Other parts of a message (SCAFFOLD's variates,
gradients) are clipped by themselves in the same way, to `times` the median of their own norms.
"""

from math import inf, sqrt
from statistics import median_low
from typing import Any

import torch
from numpy.random import Generator
from pydantic import model_validator
from torch import Tensor

from fedcluster.algorithms.aggregation.robust import Notes, Robust, Updates
from fedcluster.errors import BadExperiment
from fedcluster.experiment import Positive
from fedcluster.models.kernels.vectors import sum_of_squares
from fedcluster.state import Tensors


class NormClip(Robust):
    least_rows = 1

    class Options(Robust.Options):
        norm: Positive | None = None
        times: Positive | None = None

        @model_validator(mode="after")
        def one_limit(self) -> "NormClip.Options":
            if self.norm is not None and self.times is not None:
                raise ValueError("has both norm and times: give one of them")
            return self

    def __init__(self, spec: Tensors, options: Any = None, rng: Generator | None = None) -> None:
        super().__init__(spec, options, rng)
        if self.options.norm is not None and set(spec) != {"model"}:
            raise BadExperiment(
                f"aggregation.norm is the length of a model's movement, but this algorithm also sends "
                f"{', '.join(name for name in spec if name != 'model')}: use times"
            )

    def combine(self, updates: Updates) -> tuple[Tensor, Notes]:
        notes: Notes = {}
        for name, part in zip(self.spec, torch.split(updates.rows, self.sizes, dim=1), strict=True):
            origin = self.cohort.model[: part.shape[1]] if name == "model" else torch.zeros_like(part[0])
            norms = [sqrt(sum_of_squares(row, origin)) for row in part]
            limit = self.limit(name, norms)
            for row, norm in enumerate(norms):
                if norm > limit:
                    moved = part[row].double() - origin
                    part[row] = moved.mul_(limit / norm).add_(origin).float()
                    notes[row] = "; ".join([*([notes[row]] if row in notes else []), clipped(name, norm, limit)])
        return updates.mean(), notes

    def limit(self, name: str, norms: list[float]) -> float:
        if self.options.norm is not None:
            fixed: float = self.options.norm
            return fixed
        usual = median_low(self.cohort.norms.get(name) or norms) or median_low(norms)
        return usual * (1.0 if self.options.times is None else self.options.times) or inf


def clipped(name: str, norm: float, limit: float) -> str:
    return f"{name}: clipped from {norm:.3g} to {limit:.3g}"
