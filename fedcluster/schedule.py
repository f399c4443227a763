"""The schedule: which cluster's turn it is, and who of it takes part. A pure function of (seed, round)."""

from dataclasses import dataclass

import numpy as np

from fedcluster.clusters import Clusters, build
from fedcluster.experiment import Clusters as Options
from fedcluster.fleet import Fleet, Floats, Ints
from fedcluster.rng import stream


@dataclass(frozen=True, eq=False)
class Cycle:
    """One cluster's turn: its cohort S_K^(j), and the weights p_k of the cohort's devices. `wanted` updates make it
    done; more devices than that are asked only where some are expected not to come back."""

    round: int
    cycle: int
    cluster: int
    cohort: Ints
    weights: Floats
    wanted: int = 0


def taking_part(participation: float, devices: int) -> int:
    """How many of a cluster's devices: the nearest number to its share, at least one where there is one."""
    return min(devices, max(1, int(np.floor(participation * devices + 0.5))))


class Schedule:
    """M cycles make one round; every device is in at most one cohort a round."""

    def __init__(self, options: Options, fleet: Fleet, clusters: Clusters, seed: int, over_select: float = 1.0) -> None:
        self.options = options
        self.fleet = fleet
        self.clusters = clusters
        self.seed = seed
        self.over_select = over_select

    def round(self, j: int) -> list[Cycle]:
        """The cycles of round j, in the order in which the clusters take their turns."""
        order = np.arange(self.clusters.count)
        if self.options.order == "reshuffle":
            order = stream(self.seed, "order", j).permutation(order)
        clusters = self.clusters
        if self.options.method == "redrawn":
            clusters = build(self.options, self.fleet, self.seed, round=j)
        members = clusters.members_in(j, self.seed)
        return [self.cycle(j, position, int(K), members[K]) for position, K in enumerate(order)]

    def cycle(self, j: int, position: int, cluster: int, members: Ints) -> Cycle:
        """Sample the participating share of the cluster uniformly."""
        wanted = taking_part(self.options.participation, len(members))
        asked = min(len(members), int(np.ceil(round(self.over_select * wanted, 6))))
        chosen = stream(self.seed, "cohort", j, cluster).choice(len(members), asked, replace=False, shuffle=False)
        cohort = members[np.sort(chosen)]
        return Cycle(j, position, cluster, cohort, self.fleet.weights[cohort], wanted)

    def cohort_size(self) -> int:
        """Updates that make a round, over all clusters."""
        return sum(cycle.wanted for cycle in self.round(0))
