"""The schedule: which cluster's turn it is, and who of it takes part. A pure function of (seed, round)."""

from dataclasses import dataclass

import numpy as np

from fedcluster.clusters import Clusters, build
from fedcluster.experiment import Clusters as Options
from fedcluster.fleet import Fleet, Floats, Ints
from fedcluster.rng import stream


@dataclass(frozen=True, eq=False)
class Cycle:
    """One cluster's turn: its cohort S_K^(j), and the weights p_k of the cohort's devices."""

    round: int
    cycle: int
    cluster: int
    cohort: Ints
    weights: Floats


class Schedule:
    """M cycles make one round; every device is in at most one cohort a round."""

    def __init__(self, options: Options, fleet: Fleet, clusters: Clusters, seed: int) -> None:
        self.options = options
        self.fleet = fleet
        self.clusters = clusters
        self.seed = seed

    def round(self, j: int) -> list[Cycle]:
        """The cycles of round j, in the order in which the clusters take their turns."""
        order = np.arange(self.clusters.count)
        if self.options.order == "reshuffle":
            order = stream(self.seed, "order", j).permutation(order)
        clusters = self.clusters
        if self.options.method == "redrawn":
            clusters = build(self.options, self.fleet, self.seed, round=j)
        return [self.cycle(j, position, int(K), clusters.members[K]) for position, K in enumerate(order)]

    def cycle(self, j: int, position: int, cluster: int, members: Ints) -> Cycle:
        """Sample the participating share of the cluster uniformly, at least one device."""
        take = max(1, int(np.floor(self.options.participation * len(members) + 0.5)))
        chosen = stream(self.seed, "cohort", j, cluster).choice(len(members), take, replace=False, shuffle=False)
        cohort = members[np.sort(chosen)]
        return Cycle(j, position, cluster, cohort, self.fleet.weights[cohort])

    def cohort_size(self) -> int:
        """Devices that take part in a round, over all clusters."""
        return sum(len(cycle.cohort) for cycle in self.round(0))
