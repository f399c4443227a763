"""Krum and Multi-Krum. Blanchard, El Mhamdi, Guerraoui, Stainer: Machine Learning with Adversaries: Byzantine Tolerant
Gradient Descent, NeurIPS 2017.

    score(k) = sum of ||w_k - w_i||^2 over the c - f - 2 updates i that are nearest to w_k
    krum          the update with the lowest score
    multi_krum    the weighted mean of the m updates with the lowest scores; left out, m = c - f

f is the number of malicious updates in a cohort that the rule is to bear, for which it needs c >= 2 f + 3 updates.
Distances are those of whole messages. Of equal scores the first in the cohort is taken.
"""

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from fedcluster.algorithms.aggregation.robust import Notes, Robust, Updates
from fedcluster.experiment import Count
from fedcluster.models.kernels.vectors import sum_of_squares


class Krum(Robust):
    class Options(Robust.Options):
        f: Annotated[int, Field(ge=0, le=10**6)] = 1

    @classmethod
    def rows_needed(cls, options: Any) -> int:
        needed: int = 2 * options.f + 3
        return needed

    def combine(self, updates: Updates) -> tuple[Tensor, Notes]:
        return select(updates, self.options.f, 1)


class MultiKrum(Robust):
    class Options(Krum.Options):
        m: Count | None = None

    @classmethod
    def rows_needed(cls, options: Any) -> int:
        needed: int = max(2 * options.f + 3, (options.m or 0) + options.f)
        return needed

    def combine(self, updates: Updates) -> tuple[Tensor, Notes]:
        return select(updates, self.options.f, self.options.m or len(updates) - self.options.f)


def select(updates: Updates, f: int, m: int) -> tuple[Tensor, Notes]:
    """The mean of the m updates with the lowest scores; one alone is taken as it is."""
    found = scores(squared_distances(updates.rows), f)
    order = sorted(range(len(updates)), key=found.__getitem__)
    notes = {row: f"not selected: number {place + 1} by distance" for place, row in enumerate(order) if place >= m}
    chosen = sorted(order[:m])
    return updates.rows[chosen[0]] if m == 1 else updates.select(chosen).mean(), notes


def scores(squares: list[list[float]], f: int) -> list[float]:
    """The score of every row, given the squared distances between rows."""
    nearest = len(squares) - f - 2
    return [sum(sorted(row[:k] + row[k + 1 :])[:nearest]) for k, row in enumerate(squares)]


def squared_distances(rows: Tensor) -> list[list[float]]:
    """||w_k - w_i||^2 for all pairs of rows."""
    count = len(rows)
    found = torch.zeros(count, count, dtype=torch.float64)
    for k in range(count):
        for i in range(k):
            found[k, i] = found[i, k] = sum_of_squares(rows[k], rows[i])
    squares: list[list[float]] = found.tolist()
    return squares
