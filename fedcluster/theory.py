"""The paper's theorem, as arithmetic.

For plain SGD on the devices, all of a cluster taking part, clusters reshuffled in every round and the learning rate
(TME)^(-1/2), the mean over rounds of E ||grad f(W)||^2 is at most C / sqrt(TME), where

    C = 2 (f(W_0) - inf f) + 4 L (H_cluster + V),      V = sum_K q_K^-1 sum_{k in S_K} p_k^2 s_k^2

if  ME <= C / (8 L G^2)  and  T >= L^2 max(1, 16 / (EM)).

L: every f_k is L-smooth. s_k^2: variance of device k's batch gradient. G^2: no device's batch gradient has a larger
mean square. H_cluster, s_k^2 and G^2 are suprema over w, which nobody can compute; what is put in here is the largest
value seen. With M = 1, H_cluster = 0 and V = sum_k p_k^2 s_k^2: the bound of traditional federated learning.
"""

import math
from dataclasses import dataclass


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
    """What the theorem says of T rounds of M cycles of E steps."""

    M: int
    E: float
    T: int
    constants: Constants

    @property
    def value(self) -> float:
        """The mean over rounds of E ||grad f||^2 is at most this."""
        return self.constants.C / math.sqrt(self.T * self.M * self.E)

    @property
    def rate(self) -> float:
        """The learning rate for which that holds."""
        return 1 / math.sqrt(self.T * self.M * self.E)

    def rounds_to(self, epsilon: float) -> int:
        """The least T for which the bound is at most epsilon and which the second condition allows."""
        enough = self.constants.C**2 / (self.M * self.E * epsilon**2)
        return math.ceil(max(enough, self.least_rounds, 1))

    @property
    def least_rounds(self) -> float:
        return self.constants.L**2 * max(1.0, 16 / (self.E * self.M))

    @property
    def conditions(self) -> list[Condition]:
        c = self.constants
        steepness = 8 * c.L * c.G2
        most = c.C / steepness if steepness else math.inf
        return [
            Condition("ME, steps a round, at most C / (8 L G^2)", self.M * self.E, most),
            Condition("L^2 max(1, 16 / (EM)) at most T, the rounds", self.least_rounds, self.T),
        ]
