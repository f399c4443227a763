"""Algorithm 1 read from the paper once more, in NumPy and float64, on softmax regression with full batches.

Shares no code with the package.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def gradient(w: Array, b: Array, x: Array, y: NDArray[np.int64]) -> tuple[Array, Array]:
    scores = x @ w.T + b
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    p /= len(y)
    return p.T @ x, p.sum(axis=0)


def local(start: list[Array], x: Array, y: NDArray[np.int64], options: dict[str, Any]) -> list[Array]:
    params = [value.copy() for value in start]
    velocity = [np.zeros_like(value) for value in start]
    first, second = [np.zeros_like(v) for v in start], [np.zeros_like(v) for v in start]
    for t in range(1, options["steps"] + 1):
        grads = list(gradient(params[0], params[1], x, y))
        for i in range(2):
            g = grads[i]
            if options.get("algorithm") == "fedprox":
                g = g + options["mu"] * (params[i] - start[i])
            if options["optimizer"] == "momentum":
                velocity[i] = options["momentum"] * velocity[i] + g
                params[i] = params[i] - options["lr"] * velocity[i]
            elif options["optimizer"] == "adam":
                b1, b2 = options["betas"]
                first[i] = b1 * first[i] + (1 - b1) * g
                second[i] = b2 * second[i] + (1 - b2) * g**2
                root = np.sqrt(second[i] / (1 - b2**t)) + options["eps"]
                params[i] = params[i] - options["lr"] * (first[i] / (1 - b1**t)) / root
            else:
                params[i] = params[i] - options["lr"] * g
    return params


def algorithm_1(
    data: dict[str, Any], clusters: list[list[int]], start: list[Array], rounds: int, options: dict[str, Any]
) -> list[Array]:
    """Clusters in order, everybody takes part; the average is weighted by the number of samples."""
    x, y, owner = data["x_train"].astype(np.float64), data["y_train"], data["device_train"]
    params = start
    for _ in range(rounds):
        for cluster in clusters:
            updates = [local(params, x[owner == k], y[owner == k], options) for k in cluster]
            sizes = [(owner == k).sum() for k in cluster]
            params = [sum(n * u[i] for n, u in zip(sizes, updates, strict=True)) / sum(sizes) for i in range(2)]
    return params
