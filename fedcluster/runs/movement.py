"""How far a cycle moved the model, and whether it moved on or back: a number each in cycles.jsonl.

With d_t = W_{t+1} - W_t over the trained weights,

    moved = |d_t|,    cosine = <d_t, d_s> / (|d_t| |d_s|),    s the last cycle before t that moved the model.

A negative cosine says that the cluster takes back part of what the cluster before it did. The cosine is that of at most
65,536 weights at equal distances, so that a checkpoint need not hold a second vector as large as the model.
"""

import math

import torch
from torch import Tensor

WEIGHTS = 65_536


def sample(w: Tensor) -> Tensor:
    """At most `WEIGHTS` numbers of a vector, at equal distances."""
    return w[:: max(1, -(-w.numel() // WEIGHTS))]


def measure(before: Tensor, after: Tensor, last: Tensor | None) -> tuple[float, float | None, Tensor | None]:
    """|d_t|, its cosine with the sampled movement before it (None where either is 0), and the sample of d_t, or still
    that of the movement before it if the model has not moved."""
    d = after - before
    moved = float(torch.linalg.vector_norm(d, dtype=torch.float64))
    if moved == 0 or not math.isfinite(moved):
        return 0.0, None, last
    part = sample(d).clone().cpu()
    if last is None:
        return moved, None, part
    a, b = part.double(), last.double()
    lengths = float(a.square().sum().sqrt() * b.square().sum().sqrt())
    return moved, float((a * b).sum()) / lengths if lengths else None, part
