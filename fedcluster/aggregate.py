"""The aggregate: the cohort's weighted average.

    W = sum_k p_k w_k / sum_k p_k

The weights are renormalised by the total of those that came back. The sum runs in float64 in the order in
which updates arrive, which is the cohort's, and holds one vector, whatever the size of the cohort.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


def average(weighted: Iterable[tuple[float, Tensor]]) -> Tensor | None:
    """The average of (weight, vector) pairs, or None when there are none."""
    total, weights = None, 0.0
    for weight, vector in weighted:
        if total is None:
            total = torch.zeros_like(vector, dtype=torch.float64)
        total.add_(vector.double(), alpha=weight)
        weights += weight
    return None if total is None else total.div_(weights).to(torch.float32)
