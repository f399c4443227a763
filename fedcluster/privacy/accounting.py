"""What rounds spend, by Google's dp-accounting (Renyi differential privacy): never by hand.

A device is in one cluster, which has one cycle a round. So a round touches a device at most once, and its cycles, on
disjoint devices, compose in parallel: T rounds are T sampled Gaussian mechanisms at the rate at which a cluster's
devices take part, however many clusters there are.

    mechanism          one round                                          neighbours
    gaussian, banded   Gaussian at a Poisson sample, sensitivity C        one device never takes part
      sampling fixed   Gaussian at a sample without replacement, 2 C      one device has other data
    local              Gaussian, 2 C, in every round                      one device has other data
"""

import logging
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fedcluster.errors import BadExperiment
from fedcluster.experiment import Privacy
from fedcluster.fleet.fleet import Ints

ORDERS = (*(10 ** (k / 100) for k in range(15, 150)), *range(32, 65), 80, 96, 128, 192, 256, 512, 1024)
WHOLE_ORDERS = (*range(2, 65), 80, 96, 128, 192, 256)  # where fractional ones are interpolated, and slow
NOISE_TOLERANCE = 1e-4  # of the noise multiplier for an epsilon
LEAST_NOISE, MOST_NOISE = 0.2, 1e6


@dataclass(frozen=True)
class Draw:
    """How a round draws devices of a cluster: each with probability `rate`, or `size` of the `members`."""

    rate: float
    size: int = 0
    members: int = 0


@dataclass(frozen=True)
class Accountant:
    """`replace`: neighbours differ in the data of one device, not in its presence. `local`: each device adds noise."""

    delta: float
    replace: bool
    local: bool

    @classmethod
    def of(cls, section: Privacy) -> "Accountant":
        assert section.delta is not None, "differential privacy has a delta"
        return cls(section.delta, not section.poisson, section.mechanism == "local")

    @property
    def adjacency(self) -> str:
        """What differs between the two fleets that (epsilon, delta) compares."""
        return "one device has other data" if self.replace else "one device never takes part"

    def epsilon(self, noise_multiplier: float, rounds: "Counter[Draw]") -> float:
        """What so many rounds of every kind spend."""
        return spent(self, noise_multiplier, tuple(sorted(rounds.items(), key=repr)))

    def noise_multiplier(self, epsilon: float, rounds: "Counter[Draw]") -> float:
        """The least noise with which these rounds spend at most this epsilon."""
        return least_noise(self, epsilon, tuple(sorted(rounds.items(), key=repr)))

    def draw(self, participation: float, sizes: Ints) -> Draw:
        """The draw of the cluster, of these sizes, whose devices take part most often."""
        if self.local or not self.replace:
            return Draw(1.0 if self.local else participation)
        draws = []
        for members in sorted(set(sizes.tolist())):
            size = min(members, max(1, math.ceil(round(participation * members, 6))))
            draws.append(Draw(size / members, size, members))
        return max(draws, key=lambda draw: draw.rate)

    def accountant(self) -> Any:
        rdp, relation = library().rdp, library().NeighboringRelation
        neighbours = relation.REPLACE_ONE if self.replace else relation.REPLACE_SPECIAL
        return rdp.RdpAccountant(WHOLE_ORDERS if self.replace and not self.local else ORDERS, neighbours)

    def event(self, noise_multiplier: float, draw: Draw) -> Any:
        dp = library()
        gaussian = dp.GaussianDpEvent(noise_multiplier / 2 if self.replace else noise_multiplier)
        if self.local:
            return gaussian
        if self.replace:
            return dp.SampledWithoutReplacementDpEvent(draw.members, draw.size, gaussian)
        return dp.PoissonSampledDpEvent(draw.rate, gaussian)

    def events(self, noise_multiplier: float, rounds: tuple[tuple[Draw, int], ...]) -> Any:
        dp = library()
        kinds = [dp.SelfComposedDpEvent(self.event(noise_multiplier, draw), count) for draw, count in rounds]
        return dp.ComposedDpEvent(kinds)


@lru_cache(maxsize=4096)
def spent(accountant: Accountant, noise_multiplier: float, rounds: tuple[tuple[Draw, int], ...]) -> float:
    if not rounds:
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    with quiet():
        composed = accountant.accountant().compose(accountant.events(noise_multiplier, rounds))
        return float(composed.get_epsilon(accountant.delta))


@lru_cache(maxsize=256)
def least_noise(accountant: Accountant, epsilon: float, rounds: tuple[tuple[Draw, int], ...]) -> float:
    if spent(accountant, LEAST_NOISE, rounds) <= epsilon:
        raise BadExperiment(f"privacy.epsilon = {epsilon:g} needs almost no noise and protects nothing: lower it")
    if spent(accountant, MOST_NOISE, rounds) > epsilon:
        raise BadExperiment(f"privacy.epsilon = {epsilon:g} needs more noise than can be accounted for: raise it")
    dp = library()
    with quiet():
        noise = dp.calibrate_dp_mechanism(
            accountant.accountant,
            lambda z: accountant.events(z, rounds),
            epsilon,
            accountant.delta,
            dp.LowerEndpointAndGuess(LEAST_NOISE, 1.0),
            tol=NOISE_TOLERANCE,
        )
    return float(noise)


def library() -> Any:
    """dp-accounting, imported when it is needed: this takes two seconds."""
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError:
        raise BadExperiment(
            "[privacy] needs Google's dp-accounting, which counts epsilon: pip install 'fedcluster[privacy]'"
        ) from None
    return dp_accounting


@contextmanager
def quiet() -> Iterator[None]:
    """Without a warning for every order that does not converge and is left out, which only makes the bound larger."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
