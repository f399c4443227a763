"""Momentum over a round and balanced orders, read once more in NumPy and float64 on flat parameter vectors.

Shares no code with the package. A run is given by its cohorts, round by round and cycle by cycle.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Gradient = Callable[[int, Array, Any], Array]  # (device, w, batch)
Cohorts = list[list[list[int]]]


def train(
    method: str,
    cohorts: Cohorts,
    start: Array,
    gradient: Gradient,
    batches: Callable[[int, int, int], list[Any]],
    weight: dict[int, float],
    lr: float,
    beta: float = 0.5,
    tau: int | None = None,
) -> list[Array]:
    """W before every cycle, and at the end."""
    M = len(cohorts[0])
    tau = tau or M
    models = [start]
    received: dict[int, tuple[int, Array]] = {}
    sent: dict[int, tuple[int, Array]] = {}

    def before(t: int) -> Array:
        return models[max(0, t)]

    for j, cycles in enumerate(cohorts):
        for K, cohort in enumerate(cycles):
            t, W = len(models) - 1, models[-1]
            assert t == j * M + K
            if not cohort:  # the cycle has failed
                models.append(W)
                continue
            w_k = {}
            for k in cohort:
                w, E = W.copy(), len(batches(j, K, k))
                for batch in batches(j, K, k):
                    m = np.zeros_like(W)
                    if method.startswith("ghbm"):
                        m = (before(t - tau) - W) / tau
                    if method == "local_ghbm" and k in received:
                        m = (received[k][1] - W) / (t - received[k][0])
                    if method == "fedhbm" and k in sent:
                        m = (sent[k][1] - w) / (t - sent[k][0])
                    w = w - lr * (gradient(k, w, batch) + beta / (lr * E) * m)
                w_k[k] = w
                received[k], sent[k] = (t, W), (t, w)
            total = sum(weight[k] for k in cohort)
            new = sum((weight[k] / total * w_k[k] for k in cohort), np.zeros_like(W))
            if method.endswith("sliding"):
                new = new + beta / M * (W - before(t - M))
            if method == "held":
                new = new + beta / M * (models[j * M] - before((j - 1) * M))
            if method == "amplified" and K == M - 1:
                new = models[j * M] + beta * (new - models[j * M])
            models.append(new)
    return models


def pair_balance(order: list[int], movements: list[Array]) -> list[int]:
    """The next round's order. Tries both signs."""
    r = np.zeros_like(movements[0])
    front: list[int] = []
    back: list[int] = []
    for i in range(0, len(order) - 1, 2):
        a, b, v = order[i], order[i + 1], movements[i] - movements[i + 1]
        plus, minus = r + v, r - v
        if np.linalg.norm(plus) <= np.linalg.norm(minus):
            r, (first, last) = plus, (a, b)
        else:
            r, (first, last) = minus, (b, a)
        front.append(first)
        back.insert(0, last)
    middle = [order[-1]] if len(order) % 2 else []
    return front + middle + back
