"""Updates as integers whose sum is exact.

The mean (`algorithms/aggregation/mean.py`) adds up multiples of 2^-40. As integers they need 53 bits where no number of
an update is above 2^12. Here they are numbers modulo 2^56, seven bytes each.
"""

from collections.abc import Iterable

import numpy as np
import torch

from fedcluster.algorithms.aggregation.mean import GRID, Mean
from fedcluster.secure_aggregation.ciphers import Words
from fedcluster.state import Aggregate, Tensors

FRACTION = 40  # bits
WIDTH = 7  # bytes of a number
LARGEST = 2.0**12  # of a number in an update, below which the mean is exact


def numbers_of(spec: Tensors) -> int:
    return sum(tensor.numel() for tensor in spec.values())


def encode(message: Tensors, weight: float) -> Words:
    """p_k w_k as integers, rounded as the mean rounds it, the tensors in the order of their names."""
    mean = Mean(dict(sorted(message.items())))
    mean.accumulate(message, weight)
    return torch.ldexp(mean.total[:-1], torch.tensor(FRACTION)).to(torch.int64).cpu().numpy().view(np.uint64)


def too_large(message: Tensors) -> str | None:
    """Why this message cannot be summed exactly."""
    for name, tensor in message.items():
        if tensor.numel() and float(tensor.abs().max()) > LARGEST:
            return f"{name}: a number above {LARGEST:g}, which a secure sum cannot hold"
    return None


def mean(spec: Tensors, total: Words, weights: Iterable[float]) -> Aggregate | None:
    """The mean of the updates with these weights, given the sum of their integers."""
    result, width = Mean(dict(sorted(spec.items()))), np.uint64(64 - 8 * WIDTH)
    signed = (total << width).view(np.int64) >> np.int64(width)
    result.total[:-1].copy_(torch.ldexp(torch.from_numpy(signed).double(), torch.tensor(-FRACTION)))
    for weight in weights:
        result.weight += weight + GRID - GRID
    return result.finish()


def pack(numbers: Words) -> bytes:
    """The numbers modulo 2^56, seven bytes each, the lowest first."""
    return numbers.astype("<u8", copy=False).view(np.uint8).reshape(-1, 8)[:, :WIDTH].tobytes()


def unpack(content: bytes) -> Words:
    numbers = np.zeros((len(content) // WIDTH, 8), np.uint8)
    numbers[:, :WIDTH] = np.frombuffer(content, np.uint8).reshape(-1, WIDTH)
    return numbers.view("<u8").reshape(-1).astype(np.uint64, copy=False)
