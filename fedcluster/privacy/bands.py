"""Noise that is correlated over the cycles of a round: banded matrix factorisation. Choquette-Choo, Ganesh, McKenna,
McMahan, Rush, Thakurta, Xu: (Amplified) Banded Matrix Factorization, NeurIPS 2023; the coefficients are those of
Fichtenberger, Henzinger, Upadhyay: Constant Matters, ICML 2023, cut to b bands.

    c_0 = 1,  c_i = c_{i-1} (2i - 1) / (2i),  i < b,  scaled to |c| = 1
    u_t = (z_t - sum_{i=1}^{b-1} c_i u_{t-i}) / c_0          z_t ~ N(0, 1)

With C the lower triangular Toeplitz matrix of c, x + u is a function of C x + z. A movement in cycle t is in rows t to
t + b - 1 of C x only. Where a device has its cycles at least b apart, no row has two of its movements, so that each of
them is one Gaussian mechanism of sensitivity |c| = 1.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
GRID = 2.0**-40  # noise of earlier cycles is kept as whole multiples of it


def coefficients(bands: int) -> Floats:
    """c, of length 1."""
    i = np.arange(1, bands)
    c = np.concatenate([[1.0], np.cumprod((2 * i - 1) / (2 * i))])
    unit: Floats = c / np.sqrt(c @ c)
    return unit


def first_history(bands: int, size: int) -> Tensor:
    """The noise before the first cycle: b - 1 vectors, the latest first, as whole multiples of GRID."""
    return torch.zeros(bands - 1, size, dtype=torch.int64)


def correlate(z: Floats, history: Tensor) -> tuple[Floats, Tensor]:
    """u_t from z_t and the history, and the next history. u_t is a multiple of GRID, so that what is kept is what was
    used."""
    c, before = coefficients(len(history) + 1), history.cpu().numpy()
    u = z.copy()
    for weight, row in zip(c[1:], before, strict=True):
        u -= weight * GRID * row
    whole = np.rint(u / c[0] / GRID).astype(np.int64)
    after = np.concatenate([whole[None], before])[: len(before)]
    return whole * GRID, torch.from_numpy(after).to(history.device)


def deviation_of_sum(bands: int, cycles: int, before: int = 0) -> float:
    """The standard deviation of the sum of u_t over so many cycles, after `before` others; with one band it is
    sqrt(cycles)."""
    c, length = coefficients(bands), before + cycles
    inverse = np.zeros(length)  # the first column of C^-1
    for t in range(length):
        last = inverse[max(0, t - bands + 1) : t][::-1]
        inverse[t] = ((t == 0) - c[1 : 1 + len(last)] @ last) / c[0]
    total = np.concatenate([[0.0], np.cumsum(inverse)])
    weights = total[length - np.arange(length)] - total[np.maximum(before - np.arange(length), 0)]
    return float(np.sqrt(weights @ weights))
