"""The schedule: which cluster trains in each cycle, with which devices, from which model. A pure function of (seed,
round)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from fedcluster.experiment import Local, sections
from fedcluster.fleet.clustering import registry
from fedcluster.fleet.clustering.clusters import Clusters, build
from fedcluster.fleet.fleet import Fleet, Floats, Ints, name_of
from fedcluster.rng import stream


@dataclass(frozen=True, eq=False)
class Cycle:
    """One cycle of a cluster: its cohort S_K^(j), with the weights p_k and the sample counts of the cohort's devices.

    `wanted` updates end it; more devices are asked only where some are expected not to report. `scale` multiplies the
    learning rate: with `clusters.weighting = "sample"` it is M q_K. The cohort of cycle t downloads W_{t - staleness},
    see `algorithms.overlap`. `expected` is the mean size of the cohort over the draws, which is that of every draw
    unless `sampling` is Poisson."""

    round: int
    cycle: int
    cluster: int
    cohort: Ints
    weights: Floats
    samples: Ints
    wanted: int = 0
    scale: float = 1.0
    staleness: int = 0
    expected: float = 0.0

    @property
    def shares(self) -> Floats:
        """The weights of the cohort's devices in its mean, which add up to 1."""
        shares: Floats = self.weights / self.weights.sum()
        return shares

    def samples_of(self, device: int) -> int:
        """The number of samples of a device of the cohort."""
        return int(self.samples[np.flatnonzero(self.cohort == device)[0]])


def steps_of(options: Local, seed: int, round: int, device: int, samples: int) -> int:
    """The number of local steps E of a device with so many samples in a round. Server and device compute the same.

    With `epochs`, a step for every batch of every pass; with `steps`, that number, or a draw from its range.
    """
    if options.epochs is not None:
        return options.epochs * (1 if options.batch == "full" else -(-samples // options.batch))
    low, high = options.step_range
    if low == high:
        return low
    return int(stream(seed, "steps", round=round, device=device).integers(low, high + 1))


def samples_used(options: Local, seed: int, round: int, device: int, samples: int) -> int:
    """The number of samples in those steps."""
    if options.epochs is not None:
        return options.epochs * samples
    return steps_of(options, seed, round, device, samples) * (samples if options.batch == "full" else options.batch)


def mean_steps(options: Local, sizes: Ints) -> float:
    """The mean of E over devices with so many samples, and over the draws from a range."""
    if options.epochs is None:
        return sum(options.step_range) / 2
    return float(np.mean([steps_of(options, 0, 0, 0, samples) for samples in sizes.tolist()]))


def taking_part(participation: float, devices: int) -> int:
    """How many of a cluster's devices: the nearest number to its share, at least one where there is one."""
    return min(devices, max(1, int(np.floor(participation * devices + 0.5))))


def cohort_sizes(participation: float, sizes: Ints) -> Ints:
    """How many devices of each cluster take part in a round, for clusters of these sizes, in the order of their cycles.

    They add up to the share of all devices, so that a round costs the same number of updates however the devices are
    clustered: where every cluster's nearest number would add up to more or less, the clusters with the largest
    fractions (of equals, the first) are rounded up and the others down. At least one device of each cluster takes part,
    so that many small clusters may ask for more; `fedcluster compare` then gives FedAvg as many.
    """
    nearest = np.array([taking_part(participation, int(size)) for size in sizes], np.int64)
    total = taking_part(participation, int(np.sum(sizes)))
    if nearest.sum() == total:
        return nearest
    exact = participation * np.asarray(sizes, np.float64)
    cohorts = np.minimum(sizes, np.maximum(1, np.floor(exact))).astype(np.int64)
    left = max(0, total - int(cohorts.sum()))
    cohorts[np.argsort(cohorts - exact, kind="stable")[:left]] += 1
    return cohorts


def staleness(cycle: Cycle, before: list[Cycle]) -> int:
    """How many cycles behind the model is that the cohort downloads, given the cycles that overlap with this one, the
    latest one last. A device trains for one cycle at a time: a cycle waits for an earlier one with a device of its
    cohort, and downloads the model that came of it."""
    for number, earlier in enumerate(reversed(before)):
        if np.isin(cycle.cohort, earlier.cohort).any():
            return number
    return len(before)


@dataclass(frozen=True)
class Sampling:
    """How cohorts are drawn under differential privacy: by a seed of their own, which devices of a federation do not
    know, and with `poisson` each device with the same probability, independently of the others. Devices have equal
    weights. `repeats` says how often a cycle, (round, cluster), was already released by a run that was then stopped: it
    is drawn anew."""

    seed: int
    poisson: bool
    repeats: Mapping[tuple[int, int], int] = field(default_factory=dict)


class Schedule:
    """M cycles make one round; every device is in at most one cohort a round."""

    def __init__(
        self,
        options: sections.Clusters,
        fleet: Fleet,
        clusters: Clusters,
        seed: int,
        over_select: float = 1.0,
        sampling: Sampling | None = None,
    ) -> None:
        self.options = options
        self.fleet = fleet
        self.clusters = clusters
        self.seed = seed
        self.over_select = over_select
        self.sampling = sampling
        self.attempt = 0  # to take the round

    def order(self, j: int) -> Ints:
        """The clusters of round j, one a cycle, where that does not depend on training or on cohorts: those of a
        "balanced" order only in round 0."""
        M = self.clusters.count
        if self.options.order == "cyclic":
            return np.arange(M)
        return stream(self.seed, "order", j if self.options.order == "reshuffle" else 0).permutation(M)

    def following(self, j: int, K: int) -> list[Cycle]:
        """Cycle K of round j and the next ones, as many as overlap."""
        count = 1 + self.options.overlap
        cycles = self.round(j)[K:]
        return [*cycles, *(self.round(j + 1, attempt=0) if len(cycles) < count else [])][:count]

    def round(self, j: int, order: Ints | None = None, attempt: int | None = None) -> list[Cycle]:
        """The cycles of round j. `order`, where it depends on training, takes the place of the schedule's own."""
        cycles = self.cycles(j, order, self.attempt if attempt is None else attempt)
        overlap = self.options.overlap
        if not overlap:
            return cycles
        before = self.cycles(j - 1)[-overlap:] if j else []
        return [
            replace(cycle, staleness=staleness(cycle, [*before, *cycles[: cycle.cycle]][-overlap:])) for cycle in cycles
        ]

    def cycles(self, j: int, order: Ints | None = None, attempt: int = 0) -> list[Cycle]:
        """The cycles of round j without their staleness. `attempt` counts how often the round has failed."""
        clusters = self.clusters
        if registry.find(self.options).every_round:
            clusters = build(self.options, self.fleet, self.seed, round=j)
        members = clusters.members_in(j, self.seed)
        scales = self.scales(members)
        if self.options.order == "random":
            return self.random_order(j, members, scales, attempt)
        order = self.order(j) if order is None else order
        wanted = cohort_sizes(self.options.participation, np.array([len(members[K]) for K in order]))
        return [
            self.cycle(j, position, int(K), members[K], int(wanted[position]), float(scales[K]), attempt)
            for position, K in enumerate(order)
        ]

    def scales(self, members: list[Ints]) -> Floats:
        """M q_K of every cluster, 1 where the learning rate does not depend on q_K."""
        if self.options.weighting == "cluster":
            return np.ones(len(members))
        q: Floats = np.array([self.fleet.weights[devices].sum() for devices in members])
        scales: Floats = len(q) * q / q.sum()
        return scales

    def random_order(self, j: int, members: list[Ints], scales: Floats, attempt: int) -> list[Cycle]:
        """M cycles whose clusters are drawn with replacement, from those that have enough devices left: a device takes
        part at most once a round."""
        sizes = np.array([len(devices) for devices in members])
        wanted = cohort_sizes(self.options.participation, sizes)
        rng, left, cycles = stream(self.seed, "order", j), [*members], list[Cycle]()
        for position in range(len(members)):
            K = int(rng.choice(np.flatnonzero([len(left[K]) >= wanted[K] for K in range(len(left))])))
            cycles.append(self.cycle(j, position, K, left[K], int(wanted[K]), float(scales[K]), attempt, position))
            left[K] = np.setdiff1d(left[K], cycles[-1].cohort, assume_unique=True)
        return cycles

    def cycle(
        self,
        j: int,
        position: int,
        cluster: int,
        members: Ints,
        wanted: int,
        scale: float,
        attempt: int,
        draw: int | None = None,
    ) -> Cycle:
        """Sample as many of the cluster uniformly. `draw` tells a round's draws from one cluster apart."""
        if self.sampling is not None:
            return self.private_cycle(self.sampling, j, position, cluster, members, wanted)
        asked = min(len(members), int(np.ceil(round(self.over_select * wanted, 6))))
        role = "cohort" if draw is None else f"cohort {draw}"
        chosen = stream(self.seed, role, j, cluster, attempt).choice(len(members), asked, replace=False, shuffle=False)
        cohort = members[np.sort(chosen)]
        weights, samples = self.fleet.weights[cohort], self.fleet.sizes[cohort]
        return Cycle(j, position, cluster, cohort, weights, samples, wanted, scale, expected=wanted)

    def private_cycle(
        self, sampling: Sampling, j: int, position: int, cluster: int, members: Ints, wanted: int
    ) -> Cycle:
        """The same under differential privacy."""
        expected = self.options.participation * len(members) if sampling.poisson else float(wanted)
        rng = stream(sampling.seed, "cohort", j, cluster, sampling.repeats.get((j, cluster), 0))
        if sampling.poisson:
            chosen = np.flatnonzero(rng.random(len(members)) < self.options.participation)
        else:
            chosen = np.sort(rng.choice(len(members), wanted, replace=False, shuffle=False))
        cohort = members[chosen]
        weights, samples = np.full(len(cohort), 1 / len(self.fleet)), self.fleet.sizes[cohort]
        return Cycle(j, position, cluster, cohort, weights, samples, len(cohort), expected=expected)

    def cluster_sizes(self, j: int) -> Ints:
        """The number of devices in each cluster in round j."""
        return np.array([len(devices) for devices in self.clusters.members_in(j, self.seed)])

    def name(self, k: int) -> str:
        """The name of device k, for messages."""
        return name_of(self.fleet.names, k)

    def cohort_size(self) -> int:
        """Updates that make a round, over all clusters; with Poisson sampling their mean, to the nearest number."""
        return round(sum(cycle.expected for cycle in self.round(0)))
