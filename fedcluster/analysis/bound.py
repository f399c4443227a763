"""The paper's theorem, as arithmetic.

For plain SGD on the devices, all of a cluster taking part, clusters reshuffled in every round and the learning rate
(TME)^(-1/2), the mean over rounds of E ||grad f(W)||^2 is at most 2 C / sqrt(TME), where

    C = 2 (f(W_0) - inf f) + 4 L (H_cluster + V),      V = sum_K q_K^-1 sum_{k in S_K} p_k^2 s_k^2

if  ME <= C / (8 L G^2)  and  T >= L^2 max(1, 16 / (EM)).

The proof arrives at C / sqrt(TME) + 8 L G^2 sqrt(ME / T); the first condition makes the second term no larger than the
first, which is where the factor 2 comes from.

L: every f_k is L-smooth (the paper assumes it of every sample's loss; its proof uses no more than f_k).
s_k^2: variance of device k's batch gradient. G^2: no device's batch gradient has a larger mean square. H_cluster, L,
s_k^2 and G^2 are suprema over w, which nobody can compute; what is put in here is the largest value seen. With M = 1,
H_cluster = 0 and V = sum_k p_k^2 s_k^2: the bound of traditional federated learning.
"""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Range:
    """Where a constant lies that is only estimated."""

    low: float
    high: float


@dataclass(frozen=True)
class Constants:
    """What the theorem needs to know of a problem and its clusters."""

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
    """`value` must not exceed `limit`; `factor` says by how much it does."""

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
    """What the theorem says of T rounds of M cycles of E steps. Where constants are only known within ranges, those are
    the upper ends, and `least` are the lower ones."""

    M: int
    E: float
    T: int
    constants: Constants
    least: Constants | None = None

    @property
    def value(self) -> float:
        """The mean over rounds of E ||grad f||^2 is at most this."""
        return 2 * self.constants.C / math.sqrt(self.T * self.M * self.E)

    @property
    def rate(self) -> float:
        """The learning rate for which that holds."""
        return 1 / math.sqrt(self.T * self.M * self.E)

    def rounds_to(self, epsilon: float) -> int:
        """The least T >= 4 C^2 / (M E epsilon^2), where the bound is at most epsilon, that the second condition
        allows."""
        enough = 4 * self.constants.C**2 / (self.M * self.E * epsilon**2)
        return math.ceil(max(enough, self.least_rounds, 1))

    @property
    def least_rounds(self) -> float:
        return self.constants.L**2 * max(1.0, 16 / (self.E * self.M))

    @property
    def conditions(self) -> list[Condition]:
        """As they are at the worst end of every range. C / (8 L G^2) falls with L and G^2 and grows with H and V, so
        its worst is at the upper ends of the first two and at the lower ends of the others."""
        c, least = self.constants, self.least or self.constants
        steepness = 8 * c.L * c.G2
        most = replace(c, H=least.H, V=least.V).C / steepness if steepness else math.inf
        return [
            Condition("ME, steps a round, at most C / (8 L G^2)", self.M * self.E, most),
            Condition("L^2 max(1, 16 / (EM)) at most T, the rounds", self.least_rounds, self.T),
        ]
