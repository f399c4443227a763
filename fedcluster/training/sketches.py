"""A device's gradient in a few kilobytes: a random projection that keeps squared distances on average.

A count sketch (Charikar et al. 2002) throws every coordinate, with a random sign, into one of `WIDTH` buckets:

    (S g)_b = sum over i with bucket(i) = b of sign(i) g_i,      E ||S g||^2 = ||g||^2

so nothing of the size d x WIDTH is ever made. Several independent copies stand side by side; each gives its own
estimate of a sum of squared distances such as H, their mean is the estimate and their spread gives its standard error,
at most sqrt(2 / (COPIES * WIDTH)) of it, 3 %. A model with fewer numbers than that is its own sketch, without error.
"""

import numpy as np
import torch
from torch import Tensor

from fedcluster.rng import stream

COPIES, WIDTH = 8, 256


class Sketch:
    """The projection for gradients of `size` numbers, the same for every device."""

    def __init__(self, size: int, seed: int, copies: int = COPIES, width: int = WIDTH) -> None:
        self.exact = size <= copies * width
        self.copies, self.width = (1, size) if self.exact else (copies, width)
        # one draw gives bucket and sign: those that fall into the second half count as negative
        self.places = [
            torch.from_numpy(stream(seed, "sketch", cycle=copy).integers(2 * width, size=size, dtype=np.int32))
            for copy in range(0 if self.exact else copies)
        ]

    @property
    def length(self) -> int:
        return self.copies * self.width

    def __call__(self, gradient: Tensor) -> Tensor:
        """The copies one after the other, scaled so that ||sketch||^2 is the mean of their estimates of ||g||^2."""
        if self.exact:
            return gradient.cpu()
        totals = gradient.new_zeros(self.copies, 2 * self.width, device="cpu")
        for total, places in zip(totals, self.places, strict=True):
            total.index_add_(0, places, gradient.cpu())
        signed = totals[:, : self.width] - totals[:, self.width :]
        return signed.reshape(-1).div_(self.copies**0.5)
