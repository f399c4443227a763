"""Passes over whole updates: compiled where the library can take the tensor, by torch elsewhere."""

import math

import torch
from torch import Tensor

from fedcluster.models.kernels import library


def all_finite(vector: Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    if fits(vector):
        return bool(library.load().all_finite(vector.data_ptr(), vector.numel()))
    return bool(torch.isfinite(vector.sum())) or bool(torch.isfinite(vector).all())  # a sum may overflow by itself


def sum_of_squares(vector: Tensor, origin: Tensor | None = None) -> float:
    """sum (v - origin)^2. It is finite if and only if all of v is."""
    if fits(vector) and (origin is None or fits(origin)):
        start = None if origin is None else origin.data_ptr()
        total = float(library.load().sum_of_squares(vector.data_ptr(), start, vector.numel()))
        if math.isfinite(total):  # otherwise float32 may have been too small for the squares
            return total
    moved = vector.double() if origin is None else vector.double() - origin
    return float(moved.square().sum())


def add_rounded(total: Tensor, vector: Tensor, weight: float, grid: float) -> None:
    """total += (grid + weight * vector) - grid, in float64; the same to the bit on both paths."""
    if fits(vector):
        library.load().add_rounded(total.data_ptr(), vector.data_ptr(), vector.numel(), weight, grid)
    else:
        start = torch.tensor(grid, dtype=torch.float64, device=total.device)
        total.add_(torch.add(start, vector.double(), alpha=weight).sub_(grid))


def fits(vector: Tensor) -> bool:
    """Whether the compiled passes can take a tensor."""
    plain = vector.device.type == "cpu" and vector.dtype == torch.float32 and vector.is_contiguous()
    return plain and library.load() is not None
