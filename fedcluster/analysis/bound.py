"""The paper's theorem as arithmetic.

For plain SGD on the devices, with all devices of a cluster taking part, clusters reshuffled every round and the
learning rate (TME)^(-1/2), the mean over rounds of E ||grad f(W)||^2 is at most 2 C / sqrt(TME), where

    C = 2 (f(W_0) - inf f) + 4 L (H_cluster + V),      V = sum_K q_K^-1 sum_{k in S_K} p_k^2 s_k^2

if  ME <= C / (8 L G^2)  and  T >= L^2 max(1, 16 / (EM)).

The proof arrives at C / sqrt(TME) + 8 L G^2 sqrt(ME / T); the first condition makes the second term no larger than the
first, which is where the factor 2 comes from.

L: every f_k is L-smooth (the paper assumes this of every sample's loss; its proof uses it for the f_k only).
s_k^2: the variance of device k's batch gradient. G^2: the largest mean square of a device's batch gradient. H_cluster,
L, s_k^2 and G^2 are suprema over w, which cannot be computed; the largest values seen stand in for them. With M = 1,
H_cluster = 0 and V = sum_k p_k^2 s_k^2: the bound of traditional federated learning.
"""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Range:
    """The range of a constant that is only estimated."""

    low: float
    high: float


@dataclass(frozen=True)
class Constants:
    """The theorem's constants for a problem and its clusters."""

    gap: float  # f(W_0) - inf f
    L: float
    H: float  # H_cluster
    V: float
    G2: float

    @property
    def C(self) -> float:
        return 2 * self.gap + 4 * self.L * (self.H + self.V)


@dataclass(frozen=True)
class Condition:
    """`value` must be at most `limit`; `factor` is their ratio."""

    words: str
    value: float
    limit: float

    @property
    def holds(self) -> bool:
        return self.value <= self.limit

    @property
    def factor(self) -> float:
        return self.value / self.limit if self.limit else math.inf


@dataclass(frozen=True)
class Bound:
    """The theorem for T rounds of M cycles of E steps. `constants` are the upper ends of ranges, `lower` the lower ends
    (None: they are exact)."""

    M: int
    E: float
    T: int
    constants: Constants
    lower: Constants | None = None

    @property
    def value(self) -> float:
        """The bound on the mean over rounds of E ||grad f||^2."""
        return 2 * self.constants.C / math.sqrt(self.T * self.M * self.E)

    @property
    def rate(self) -> float:
        """The learning rate for which it holds."""
        return 1 / math.sqrt(self.T * self.M * self.E)

    def rounds_to(self, epsilon: float) -> int:
        """The smallest T for which the bound is at most epsilon, T >= 4 C^2 / (M E epsilon^2), and the second
        condition holds."""
        enough = 4 * self.constants.C**2 / (self.M * self.E * epsilon**2)
        return math.ceil(max(enough, self.min_rounds, 1))

    @property
    def min_rounds(self) -> float:
        return self.constants.L**2 * max(1.0, 16 / (self.E * self.M))

    @property
    def conditions(self) -> list[Condition]:
        """Both conditions at the worst end of every range. C / (8 L G^2) falls with L and G^2 and grows with H and V:
        its worst case is at the upper ends of L and G^2 and at the lower ends of H and V."""
        c, lower = self.constants, self.lower or self.constants
        divisor = 8 * c.L * c.G2
        limit = replace(c, H=lower.H, V=lower.V).C / divisor if divisor else math.inf
        return [
            Condition("ME, steps a round, at most C / (8 L G^2)", self.M * self.E, limit),
            Condition("L^2 max(1, 16 / (EM)) at most T, the rounds", self.min_rounds, self.T),
        ]
