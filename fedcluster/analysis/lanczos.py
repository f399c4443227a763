"""The largest absolute eigenvalue of a symmetric matrix between two bounds, from a few products with a random vector.

m Lanczos steps from a unit vector x give m Ritz values theta_i, all inside the spectrum, and the norms beta_i of the
residuals. So the outermost Ritz value is a lower bound. For the upper one, let p(t) = prod_i (t - theta_i): then

    ||p(A) x|| = prod_i beta_i    and, for an eigenvalue mu with unit eigenvector u,    ||p(A) x|| >= |p(mu)| |x . u|

and |x . u| < tau has at most the probability sqrt(2 d / pi) tau if x is uniform on the sphere in d dimensions. Beyond
the Ritz values |p| only grows, so mu is no further out than where |p(mu)| = prod_i beta_i / tau, but for that
probability (van Dorsselaer, Hochstenbach and van der Vorst 2000, "Computing probabilistic bounds for extreme
eigenvalues of symmetric matrices with the Lanczos method").
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedcluster.analysis.bound import Range
from fedcluster.fleet.fleet import Floats

Product = Callable[[Tensor], Tensor]


class Lanczos:
    """The iteration from one random vector, which can be continued. Every new vector is orthogonalised against all
    earlier ones, twice, so that rounding leaves no copies of eigenvalues."""

    def __init__(self, product: Product, start: Tensor) -> None:
        self.product = product
        self.basis = (start / start.norm())[None]
        self.diagonal: list[float] = []
        self.beside: list[float] = []

    @property
    def steps(self) -> int:
        return len(self.diagonal)

    @property
    def exhausted(self) -> bool:
        """Whether the Ritz values are eigenvalues: nothing is left of the last vector but rounding."""
        scale = max(map(abs, self.diagonal + self.beside), default=0.0)
        return bool(self.diagonal) and (self.beside[-1] <= 1e-5 * scale or self.steps >= self.basis.shape[1])

    def advance(self, steps: int) -> None:
        """Up to so many more products."""
        for _ in range(steps):
            if self.exhausted:
                return
            turned = self.product(self.basis[-1])
            self.diagonal.append(float(self.basis[-1] @ turned))
            for _ in range(2):
                turned = turned - (self.basis @ turned) @ self.basis
            norm = float(turned.norm())
            self.beside.append(norm)
            if not self.exhausted:
                self.basis = torch.cat([self.basis, turned[None] / norm])

    def ritz(self) -> Floats:
        beside = np.array(self.beside[:-1])
        values: Floats = np.linalg.eigvalsh(np.diag(self.diagonal) + np.diag(beside, 1) + np.diag(beside, -1))
        return values

    def lower(self) -> float:
        """No more than the largest absolute eigenvalue."""
        return float(np.abs(self.ritz()).max())

    def bounds(self, risk: float) -> Range:
        """Where the largest absolute eigenvalue lies; it is above `high` with no more than the probability `risk`."""
        values = self.ritz()
        lower = float(np.abs(values).max())
        if self.exhausted or lower == 0.0:
            return Range(lower, lower)
        tau = risk / 2 / math.sqrt(2 * self.basis.shape[1] / math.pi)  # half of the risk at either end
        height = float(np.log(self.beside).sum()) - math.log(tau)
        return Range(lower, max(outermost(values, height), outermost(-values, height)))


def outermost(values: Floats, height: float) -> float:
    """The mu above all values where sum log(mu - value) = height, by bisection."""
    low = float(values.max())
    high = low + math.exp(height / len(values))  # every factor mu - value is at least mu - max(values)
    for _ in range(60):
        middle = (low + high) / 2
        reached = np.log(np.maximum(middle - values, 1e-300)).sum() >= height
        low, high = (low, middle) if reached else (middle, high)
    return high
