"""Overlapping cycles, read once more in NumPy and float64 on flat parameter vectors.

Shares no code with the package. A run is given by its cohorts, in the order of its cycles. Everything that was ever a
model, a control variate or a momentum is kept in a list, one entry for each number of cycles that had been applied.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Gradient = Callable[[int, Array, Any], Array]  # (device, w, batch)


def version(cohorts: list[list[int]], t: int, depth: int) -> int:
    """How many cycles have been applied to the model that cycle t downloads."""
    waits_for = [p for p in range(max(0, t - depth), t) if set(cohorts[p]) & set(cohorts[t])]
    return max([0, t - depth, *(p + 1 for p in waits_for)])


def train(
    method: str,
    cohorts: list[list[int]],
    depth: int,
    start: Array,
    gradient: Gradient,
    batches: Callable[[int, int], list[Any]],  # (t, device)
    all_rows: Callable[[int], Any],
    weight: dict[int, float],
    lr: float,
    beta: float = 0.5,
    M: int = 3,
) -> list[Array]:
    """W before every cycle, and at the end."""
    models, c, m = [start], [np.zeros_like(start)], [np.zeros_like(start)]
    c_k: dict[int, Array] = {}
    total = sum(weight.values())
    for t, cohort in enumerate(cohorts):
        v = version(cohorts, t, depth)
        W, sent_c, sent_m = models[v], c[v], m[v]
        share = {k: weight[k] / sum(weight[j] for j in cohort) for k in cohort}
        moved, taken, change, at_start = {}, {}, np.zeros_like(W), np.zeros_like(W)
        for k in cohort:
            w, steps, mine = W.copy(), batches(t, k), c_k.get(k, np.zeros_like(W))
            heavy = (models[max(0, v - M)] - W) / M
            for batch in steps:
                g = gradient(k, w, batch)
                if method == "scaffold":
                    g = g - mine + sent_c
                if method == "ghbm":
                    g = g + beta / (lr * len(steps)) * heavy
                if method == "mimelite":
                    g = (1 - beta) * g + beta * sent_m
                w = w - lr * g
            moved[k], taken[k] = w - W, len(steps)
            if method == "scaffold":
                c_k[k] = mine - sent_c + (W - w) / (len(steps) * lr)
                change += weight[k] / total * (c_k[k] - mine)
            at_start += share[k] * gradient(k, W, all_rows(k))
        D = sum((share[k] * moved[k] for k in cohort), np.zeros_like(W))
        if method == "fednova":
            tau = sum(share[k] * taken[k] for k in cohort)
            D = tau * sum((share[k] * moved[k] / taken[k] for k in cohort), np.zeros_like(W))
        if method == "avgm":
            D = beta * m[-1] + D
        c.append(c[-1] + change)
        m.append(beta * m[-1] + (1 - beta) * at_start if method == "mimelite" else D)
        models.append(models[-1] + D)
    return models
