"""Which M, and which clusters? What the theorem's C / sqrt(M) says for this fleet, and short runs that check it.

C grows with M, because smaller clusters differ more and average less; sqrt(M) grows with M, because there are more
cycles in a round. In between is a best M. The theorem lets all devices of a cluster take part; where only cohorts do,
what a cohort is further from the fleet than its cluster counts like H_cluster, and the advice goes by that sum.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedcluster.analysis import heterogeneity
from fedcluster.analysis.analyze import sample_remark
from fedcluster.analysis.bound import Constants, Range
from fedcluster.analysis.jobs import Job
from fedcluster.analysis.measures import device_sample, largest_square, mean_loss, measures
from fedcluster.analysis.smoothness import smoothness
from fedcluster.analysis.tuning import best_rates
from fedcluster.errors import BadExperiment
from fedcluster.experiment import Clusters as Options
from fedcluster.experiment import Experiment
from fedcluster.fleet.clustering import clusters as clusterings
from fedcluster.fleet.schedule import cohort_sizes, taking_part
from fedcluster.models.flat_model import FlatModel
from fedcluster.runs.progress import Display, Progress
from fedcluster.training.setup import Setup, prepare
from fedcluster.training.survey import Survey, survey
from fedcluster.training.threads import repeatable

MOST = 12  # values of M that are looked at
BEST = 3  # of them that are tried by pilots
PILOT_ROUNDS = 10
LARGE = 20_000  # devices, of which balanced and similar clusters are not looked for unasked
OTHERS: dict[str, dict[str, str]] = {
    "random": {"method": "random"},
    "balanced, by labels": {"method": "balanced", "features": "labels"},
    "balanced, by gradients": {"method": "balanced", "features": "gradients"},
    "similar, by labels": {"method": "similar", "features": "labels"},
}


@dataclass(frozen=True)
class Choice:
    """One way to cluster, and what it does to the bound."""

    name: str
    M: int
    cohort: float  # devices in a cycle, on average
    H_cluster: float
    error: float  # standard error of H_cluster, from sketches and from a sample of devices
    sampling: float  # what cohorts add to it
    V: float
    G2: float
    C: float
    C_cohort: float  # with `sampling` counted like H_cluster
    C_low: float  # the same at the lower end of L, where the others are at its upper end

    @property
    def height(self) -> float:
        """The theorem's C / sqrt(M)."""
        return self.C / math.sqrt(self.M)

    @property
    def cohort_height(self) -> float:
        return self.C_cohort / math.sqrt(self.M)


@dataclass(frozen=True)
class Pilot:
    """The best of a few short runs with M clusters."""

    M: int
    lr: float
    rounds: int
    loss: float


@dataclass(frozen=True)
class Advice:
    choices: list[Choice]  # by M, under the experiment's clustering
    others: list[Choice]  # other clusterings at the M to take
    take: int
    pilots: list[Pilot]
    remarks: list[str]
    L: Range


def advise(
    experiment: Experiment,
    display: Display | None = None,
    pilot: Callable[[list[int]], list[Pilot]] | None = None,
    workers: int = 1,
) -> Advice:
    """Survey the fleet once, at W_0, and weigh every M against it; `pilot` tries the best by running them. The number
    of `workers`, which are threads, changes nothing but the time."""
    display = display or Display()
    if experiment.clusters.method == "file":
        raise BadExperiment('clusters.method = "file" has chosen M already: to be advised, use random or balanced')
    with repeatable():
        weigh = weighing(experiment, display, workers)
    everyone = len(weigh.setup.fleet)
    choices, remarks = [], []
    if (surveyed := len(weigh.found.devices)) < everyone:
        remarks.append(sample_remark(surveyed, everyone))
    for M in display.track(candidates(everyone, experiment.clusters.participation), "clusterings", "values of M"):
        try:
            choices.append(weigh(f"M = {M}", experiment.clusters.model_copy(update={"count": M})))
        except BadExperiment as error:
            remarks.append(f"M = {M} is left out: {error}")
    if not choices:
        raise BadExperiment(f"no number of clusters is possible here; the last: {remarks[-1]}")
    ranked = sorted(choices, key=lambda choice: choice.cohort_height)
    pilots = pilot([choice.M for choice in ranked[:BEST]]) if pilot else []
    take = min(pilots, key=lambda p: p.loss).M if pilots else ranked[0].M
    others = []
    if everyone > LARGE:
        remarks.append(f"Other clusterings are not compared: of more than {LARGE:,} devices they take minutes.")
    elif take > 1:
        for name, keys in OTHERS.items():
            try:
                others.append(weigh(name, experiment.clusters.model_copy(update={"count": take, **keys})))
            except BadExperiment as error:
                remarks.append(f"Clusters that are {name}, are left out: {error}")
    return Advice(choices, others, take, pilots, remarks, weigh.L)


def weighing(experiment: Experiment, display: Display, workers: int) -> "Scale":
    """Survey the fleet as one cluster, with the model at W_0."""
    everybody = {"method": "fedcluster", "clusters.method": "random", "clusters.count": 1}
    setup = prepare(experiment.override(**everybody), display)
    flat_models, w = [FlatModel(setup.flat_model.module) for _ in range(workers)], setup.start.model
    assert setup.dataset is not None, "only a federation may be without"
    assert setup.partition is not None, "only a federation may be without"
    devices = device_sample(setup.fleet, experiment.seed)
    parts = setup.dataset, setup.partition, devices, experiment.local, experiment.seed, display
    return Scale(setup, survey(flat_models, w, setup.fleet, *parts), smoothness(flat_models, w, *parts))


class Scale:
    """Weighs a clustering: what C becomes with it. Every clustering has the same budget, the number of devices that
    take part in a round of one cluster; one that would need another is refused."""

    def __init__(self, setup: Setup, found: Survey, L: Range) -> None:
        self.setup, self.found, self.L = setup, found, L
        self.gap = mean_loss(found, setup.fleet)  # inf f = 0: cross-entropy is never below

    def __call__(self, name: str, options: Options) -> Choice:
        fleet, found, seed = self.setup.fleet, self.found, self.setup.experiment.seed
        by_gradients = options.method in ("balanced", "similar") and options.features == "gradients"
        if by_gradients and len(found.devices) < len(fleet):
            raise BadExperiment(
                f'clusters.features = "gradients" needs those of all {len(fleet):,} devices, and of so many only '
                f"{len(found.devices):,} are surveyed: use labels"
            )
        clusters = clusterings.build(options, fleet, seed, found.sketches if by_gradients else None)
        heterogeneity.check_whole(clusters)
        sizes = np.bincount(clusters.assignment, minlength=clusters.count)
        cohorts = cohort_sizes(options.participation, sizes)
        asked, budget = int(cohorts.sum()), taking_part(options.participation, len(fleet))
        if asked != budget:
            raise BadExperiment(
                f"its cohorts ask {asked:,} devices a round, and one cluster {budget:,}: at unequal budgets they "
                "cannot be compared"
            )
        seen = measures(found, fleet, clusters, cohorts, seed)
        constants = Constants(self.gap, self.L.high, seen.H_cluster, seen.V, largest_square(found).high)
        with_cohorts = replace(constants, H=seen.H_cluster + seen.sampling)
        return Choice(
            name=name,
            M=clusters.count,
            cohort=float(cohorts.mean()),
            H_cluster=seen.H_cluster,
            error=seen.error,
            sampling=seen.sampling,
            V=seen.V,
            G2=constants.G2,
            C=constants.C,
            C_cohort=with_cohorts.C,
            C_low=replace(with_cohorts, L=self.L.low).C,
        )


def candidates(devices: int, participation: float) -> list[int]:
    """Values of M from 1 to what participation allows: a cohort has at least one device, so that with more clusters
    than participation * n more devices than that would take part in a round. Divisors of n, where there are enough."""
    most = max(1, math.floor(participation * devices + 1e-9))
    even = [M for M in range(1, most + 1) if devices % M == 0]
    series = [m * 10**e for e in range(len(str(most))) for m in (1, 2, 5) if m * 10**e <= most]
    values = even if len(even) >= len(series) else series
    while len(values) > MOST:  # thin out the crowded end, keep both ends
        gaps = [math.log(b / a) for a, b in zip(values[:-2], values[2:], strict=True)]
        values.pop(1 + gaps.index(min(gaps)))
    return values


def run_pilots(experiment: Experiment, counts: list[int], out: Path, workers: int, progress: Progress) -> list[Pilot]:
    """Short real runs at each M, at its best rate, looked for around one that falls as 1 / sqrt(M): the theorem's,
    scaled to fit local.lr."""
    rounds = min(PILOT_ROUNDS, experiment.rounds)
    usual = experiment.clusters.count or 1

    def job(M: int, lr: float, seed: int) -> Job:
        keys = {"seed": seed, "rounds": rounds, "clusters.count": M, "local.lr": lr, "method": "fedcluster"}
        return Job(f"pilot-M{M}-lr{lr:g}-seed{seed}", experiment.override(**keys))

    around = {M: float(f"{experiment.local.lr * math.sqrt(usual / M):.3g}") for M in counts}
    best = best_rates(around, job, out, workers, progress, "pilots")
    return [Pilot(M, found.lr, rounds, found.loss) for M, found in best.items()]
