"""Bounds on the largest absolute eigenvalue of a symmetric matrix, from a few products with a random vector.

m Lanczos steps from a unit vector x give m Ritz values theta_i, all inside the spectrum, and the norms beta_i of the
residuals. So the outermost Ritz value is a lower bound. For the upper bound let p(t) = prod_i (t - theta_i). Then

    ||p(A) x|| = prod_i beta_i    and, for an eigenvalue mu with unit eigenvector u,    ||p(A) x|| >= |p(mu)| |x . u|

and |x . u| < tau has a probability of at most sqrt(2 d / pi) tau if x is uniform on the sphere in d dimensions. Outside
the Ritz values |p| grows, so, except with that probability, mu is no further out than where |p(mu)| = prod_i beta_i /
tau (van Dorsselaer, Hochstenbach and van der Vorst 2000, "Computing probabilistic bounds for extreme
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
    """The iteration from one random vector, which can be continued. Every new vector is orthogonalised twice against
    all earlier ones, so that rounding does not produce copies of eigenvalues."""

    def __init__(self, product: Product, start: Tensor) -> None:
        self.product = product
        self.basis = (start / start.norm())[None]
        self.diagonal: list[float] = []
        self.off_diagonal: list[float] = []

    @property
    def steps(self) -> int:
        return len(self.diagonal)

    @property
    def exhausted(self) -> bool:
        """Whether the Ritz values are eigenvalues: the last residual is rounding error."""
        scale = max(map(abs, self.diagonal + self.off_diagonal), default=0.0)
        return bool(self.diagonal) and (self.off_diagonal[-1] <= 1e-5 * scale or self.steps >= self.basis.shape[1])

    def advance(self, steps: int) -> None:
        """Take up to so many more steps, each with one product."""
        for _ in range(steps):
            if self.exhausted:
                return
            residual = self.product(self.basis[-1])
            self.diagonal.append(float(self.basis[-1] @ residual))
            for _ in range(2):
                residual = residual - (self.basis @ residual) @ self.basis
            norm = float(residual.norm())
            self.off_diagonal.append(norm)
            if not self.exhausted:
                self.basis = torch.cat([self.basis, residual[None] / norm])

    def ritz(self) -> Floats:
        """The eigenvalues of the tridiagonal matrix."""
        beside = np.array(self.off_diagonal[:-1])
        values: Floats = np.linalg.eigvalsh(np.diag(self.diagonal) + np.diag(beside, 1) + np.diag(beside, -1))
        return values

    def lower(self) -> float:
        """A lower bound on the largest absolute eigenvalue."""
        return float(np.abs(self.ritz()).max())

    def bounds(self, risk: float) -> Range:
        """The range of the largest absolute eigenvalue; it is above `high` with a probability of at most `risk`."""
        values = self.ritz()
        lower = float(np.abs(values).max())
        if self.exhausted or lower == 0.0:
            return Range(lower, lower)
        tau = risk / 2 / math.sqrt(2 * self.basis.shape[1] / math.pi)  # half of the risk at each end
        height = float(np.log(self.off_diagonal).sum()) - math.log(tau)
        return Range(lower, max(outermost(values, height), outermost(-values, height)))


def outermost(values: Floats, height: float) -> float:
    """The mu above all values at which sum log(mu - value) = height, by bisection."""
    low = float(values.max())
    high = low + math.exp(height / len(values))  # every factor mu - value is at least mu - max(values)
    for _ in range(60):
        middle = (low + high) / 2
        reached = np.log(np.maximum(middle - values, 1e-300)).sum() >= height
        low, high = (low, middle) if reached else (middle, high)
    return high
