"""Rules that work coordinate by coordinate. Yin, Chen, Ramchandran, Bartlett: Byzantine-Robust Distributed Learning:
Towards Optimal Statistical Rates, ICML 2018.

    median          the middle value, or the mean of the two middle ones; weights p_k do not count
    trimmed_mean    without the b smallest and the b largest values, b = floor(beta c): the weighted mean of the others

The median discards no device as a whole. The trimmed mean names the devices that it cuts in so many coordinates that
they are nearer to being cut in all than to the 2 b / c that everybody can expect.
"""

from math import ceil, floor
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedcluster.algorithms.aggregation.mean import GRID
from fedcluster.algorithms.aggregation.robust import Notes, Robust, Updates
from fedcluster.models.kernels.vectors import add_rounded

CHUNK = 2**14  # coordinates at a time: the copies of a hundred updates' stay in the cache


class Median(Robust):
    def combine(self, updates: Updates) -> tuple[Tensor, Notes]:
        low, high = (len(updates) - 1) // 2, len(updates) // 2
        parts = []
        for rows in torch.split(updates.rows, CHUNK, dim=1):
            ordered = np.sort(rows.cpu().numpy(), axis=0).astype(np.float64)
            parts.append(torch.from_numpy((ordered[low] + ordered[high]) / 2).float())
        return torch.cat(parts).to(updates.rows.device), {}


class TrimmedMean(Robust):
    class Options(Robust.Options):
        beta: Annotated[float, Field(ge=0, lt=0.5)] = 0.2

    @classmethod
    def rows_needed(cls, options: Any) -> int:
        """With fewer than 1 / beta nothing would be trimmed."""
        if not options.beta:
            return 1
        about: int = ceil(1 / options.beta)
        return about - 1 if trimmed(options.beta, about - 1) else about

    def combine(self, updates: Updates) -> tuple[Tensor, Notes]:
        count, b = len(updates), trimmed(self.options.beta, len(updates))
        if b == 0:
            return updates.mean(), {}
        parts, cut = [], np.zeros(count)
        weights = torch.zeros(count, 1, dtype=torch.float64)
        for row, weight in enumerate(updates.weights):
            weights[row] = weight + GRID - GRID
        for rows in torch.split(updates.rows.cpu(), CHUNK, dim=1):
            order = np.argsort(rows.numpy(), axis=0, kind="stable")
            kept = np.ones(rows.shape, bool)
            np.put_along_axis(kept, np.concatenate([order[:b], order[count - b :]]), False, axis=0)
            cut += rows.shape[1] - np.count_nonzero(kept, axis=1)
            terms = torch.zeros(rows.shape, dtype=torch.float64)
            for row, values in enumerate(rows):
                add_rounded(terms[row], values, updates.weights[row], GRID)
            keep = torch.from_numpy(kept)
            parts.append(((terms * keep).sum(0) / (weights * keep).sum(0)).float())
        share, usual = cut / updates.rows.shape[1], 2 * b / count
        notes = {
            row: f"cut in {share[row]:.0%} of the coordinates" for row in range(count) if share[row] > (1 + usual) / 2
        }
        return torch.cat(parts).to(updates.rows.device), notes


def trimmed(beta: float, count: int) -> int:
    """b, the number of values that are cut at either end."""
    return floor(round(beta * count, 9))
