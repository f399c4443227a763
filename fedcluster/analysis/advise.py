"""How many clusters, and which? The theorem's C / sqrt(M) for this fleet, and short training runs to check it.

C grows with M, because smaller clusters differ more and average over fewer devices. sqrt(M) grows with M, because a
round has more cycles. The best M is in between. In the theorem all devices of a cluster take part. Where only a cohort
does, the distance of the cohort's gradient from its cluster's counts like H_cluster, and the recommended M minimises
that sum.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedcluster.analysis import heterogeneity
from fedcluster.analysis.analyze import sample_remark
from fedcluster.analysis.bound import Constants, Range
from fedcluster.analysis.jobs import Job
from fedcluster.analysis.measures import device_sample, largest_square, mean_loss, measures
from fedcluster.analysis.smoothness import smoothness
from fedcluster.analysis.tuning import best_rates
from fedcluster.errors import BadExperiment
from fedcluster.experiment import Experiment, sections
from fedcluster.fleet.clustering import clusters as clusterings
from fedcluster.fleet.clustering import registry as clustering_registry
from fedcluster.fleet.schedule import Schedule, cohort_sizes, taking_part
from fedcluster.models.flat_model import FlatModel
from fedcluster.runs.progress import Display, Progress
from fedcluster.training.setup import Setup, prepare
from fedcluster.training.survey import Survey, survey
from fedcluster.training.threads import repeatable

MAX_COUNTS = 12  # values of M that are compared
PILOT_COUNTS = 3  # the best of them, which pilots train
PILOT_ROUNDS = 10
MAX_DEVICES = 20_000  # in larger fleets other clusterings are not compared: searching for them takes minutes
ALTERNATIVES: dict[str, dict[str, str]] = {
    "random": {"method": "random"},
    "balanced, by labels": {"method": "balanced", "features": "labels"},
    "balanced, by gradients": {"method": "balanced", "features": "gradients"},
    "similar, by labels": {"method": "similar", "features": "labels"},
}


@dataclass(frozen=True)
class Candidate:
    """One clustering, and the theorem's constants for it."""

    name: str
    M: int
    cohort: float  # mean number of devices in a cycle
    H_cluster: float
    error: float  # standard error of H_cluster, from sketches and from a sample of devices
    sampling: float  # what sampled cohorts add to H_cluster
    V: float
    G2: float
    C: float
    C_cohort: float  # C with `sampling` added to H_cluster
    C_low: float  # C_cohort at the lower end of L's range; the others are at the upper end

    @property
    def score(self) -> float:
        """The theorem's C / sqrt(M): lower is better."""
        return self.C / math.sqrt(self.M)

    @property
    def cohort_score(self) -> float:
        """The same with sampled cohorts."""
        return self.C_cohort / math.sqrt(self.M)


@dataclass(frozen=True)
class Pilot:
    """Short runs with M clusters at their best learning rate."""

    M: int
    lr: float
    rounds: int
    loss: float


@dataclass(frozen=True)
class Advice:
    candidates: list[Candidate]  # the experiment's clustering, by M
    alternatives: list[Candidate]  # other clusterings, at the recommended M
    recommended: int  # M
    pilots: list[Pilot]
    remarks: list[str]
    L: Range
    round_momentum: bool  # recommended where clusters take turns and the server has no optimizer of another kind


def advise(
    experiment: Experiment,
    display: Display | None = None,
    run_pilots: Callable[[list[int]], list[Pilot]] | None = None,
    workers: int = 1,
) -> Advice:
    """Survey the fleet once, at W_0, and compare values of M; `run_pilots` trains with the best of them.

    The number of `workers` (threads) does not change the result.
    """
    display = display or Display()
    if clustering_registry.find(experiment.clusters).default_count is None:
        raise BadExperiment(
            f'clusters.method = "{experiment.clusters.method}" fixes M: choose another method, such as random or '
            "balanced"
        )
    with repeatable():
        evaluate = survey_fleet(experiment, display, workers)
    devices, surveyed = len(evaluate.setup.fleet), len(evaluate.survey.devices)
    candidates, remarks = [], []
    if surveyed < devices:
        remarks.append(sample_remark(surveyed, devices))
    counts = cluster_counts(devices, experiment.clusters.participation)
    for M in display.track(counts, "clusterings", "values of M"):
        try:
            candidates.append(evaluate(f"M = {M}", experiment.override(**{"clusters.count": M}).clusters))
        except BadExperiment as error:
            remarks.append(f"M = {M} is left out: {error}")
    if not candidates:
        raise BadExperiment(f"this fleet cannot be clustered with any of the values of M; the last: {remarks[-1]}")
    ranked = sorted(candidates, key=lambda candidate: candidate.cohort_score)
    pilots = run_pilots([candidate.M for candidate in ranked[:PILOT_COUNTS]]) if run_pilots else []
    recommended = min(pilots, key=lambda pilot: pilot.loss).M if pilots else ranked[0].M
    alternatives = []
    if devices > MAX_DEVICES:
        remarks.append(
            f"Other clusterings are not compared: with more than {MAX_DEVICES:,} devices this takes minutes."
        )
    elif recommended > 1:
        for name, keys in ALTERNATIVES.items():
            try:
                options = experiment.override(clusters={"count": recommended, **keys}).clusters
                alternatives.append(evaluate(name, options))
            except BadExperiment as error:
                remarks.append(f"The clustering {name} is left out: {error}")
    momentum = recommended > 1 and experiment.server.optimizer == "none"
    return Advice(candidates, alternatives, recommended, pilots, remarks, evaluate.L, momentum)


def survey_fleet(experiment: Experiment, display: Display, workers: int) -> "ClusteringEvaluator":
    """Survey the fleet with the model at W_0. One cluster is enough: a survey does not depend on the clustering."""
    one_cluster = {"method": "fedcluster", "clusters.method": "random", "clusters.count": 1, "clusters.overlap": 0}
    setup = prepare(experiment.override(**one_cluster), display.say, track=display.track)
    flat_models = [FlatModel(setup.flat_model.module, objective=setup.task.objective) for _ in range(workers)]
    w = setup.start.model
    assert setup.dataset is not None, "only a federation may be without"
    assert setup.partition is not None, "only a federation may be without"
    devices = device_sample(setup.fleet, experiment.seed)
    parts = setup.dataset, setup.partition, devices, experiment.local, experiment.seed, display.track
    surveyed = survey(flat_models, w, setup.fleet, *parts)
    return ClusteringEvaluator(setup, surveyed, smoothness(flat_models, w, *parts))


class ClusteringEvaluator:
    """Computes C for a clustering. All clusterings have the same budget, the number of devices that take part in a
    round with one cluster; a clustering that needs another number is refused."""

    def __init__(self, setup: Setup, survey: Survey, L: Range) -> None:
        self.setup, self.survey, self.L = setup, survey, L
        self.gap = mean_loss(survey, setup.fleet)  # f(W_0) - inf f, with inf f = 0: no loss is below

    def __call__(self, name: str, options: sections.Clusters) -> Candidate:
        fleet, survey, seed = self.setup.fleet, self.survey, self.setup.experiment.seed
        by_gradients = clustering_registry.needs(options) == "gradients"
        if by_gradients and len(survey.devices) < len(fleet):
            raise BadExperiment(
                f'clusters.features = "gradients" needs the gradients of all {len(fleet):,} devices, and in a fleet '
                f"of this size only {len(survey.devices):,} are surveyed: use labels"
            )
        clusters = clusterings.build(options, fleet, seed, survey.sketches if by_gradients else None)
        heterogeneity.check_whole(clusters)
        sizes = np.bincount(clusters.assignment, minlength=clusters.count)
        updates = int(cohort_sizes(options.participation, sizes).sum())
        budget = taking_part(options.participation, len(fleet))
        if updates != budget:
            raise BadExperiment(
                f"its cohorts have {updates:,} devices a round and those of one cluster {budget:,}; only equal budgets "
                "can be compared"
            )
        cohorts = heterogeneity.mean_cohort_sizes(Schedule(options, fleet, clusters, seed))
        measured = measures(survey, fleet, clusters, cohorts, seed)
        constants = Constants(self.gap, self.L.high, measured.H_cluster, measured.V, largest_square(survey).high)
        with_cohorts = replace(constants, H=measured.H_cluster + measured.sampling)
        return Candidate(
            name=name,
            M=clusters.count,
            cohort=float(cohorts.mean()),
            H_cluster=measured.H_cluster,
            error=measured.error,
            sampling=measured.sampling,
            V=measured.V,
            G2=constants.G2,
            C=constants.C,
            C_cohort=with_cohorts.C,
            C_low=replace(with_cohorts, L=self.L.low).C,
        )


def cluster_counts(devices: int, participation: float) -> list[int]:
    """The values of M to compare, from 1 to participation * n: with more clusters, at least one device in every cohort
    would be more devices a round. Divisors of n where it has enough of them, else 1, 2, 5, 10, ..."""
    largest = max(1, math.floor(participation * devices + 1e-9))
    divisors = [M for M in range(1, largest + 1) if devices % M == 0]
    series = [m * 10**e for e in range(len(str(largest))) for m in (1, 2, 5) if m * 10**e <= largest]
    counts = divisors if len(divisors) >= len(series) else series
    while len(counts) > MAX_COUNTS:  # drop where they are densest, and keep both ends
        gaps = [math.log(b / a) for a, b in zip(counts[:-2], counts[2:], strict=True)]
        counts.pop(1 + gaps.index(min(gaps)))
    return counts


def run_pilots(experiment: Experiment, counts: list[int], out: Path, workers: int, progress: Progress) -> list[Pilot]:
    """Short training runs with each M at its best learning rate. The search begins at local.lr scaled by the theorem's
    1 / sqrt(M)."""
    rounds = min(PILOT_ROUNDS, experiment.rounds)
    given = experiment.clusters.count or 1

    def job(M: int, lr: float, seed: int) -> Job:
        keys: dict[str, Any] = {"seed": seed, "rounds": rounds, "local.lr": lr, "method": "fedcluster"}
        keys |= {"clusters.count": M, "clusters.overlap": min(experiment.clusters.overlap, M - 1)}
        return Job(f"pilot-M{M}-lr{lr:g}-seed{seed}", experiment.override(**keys))

    first_rates = {M: float(f"{experiment.local.lr * math.sqrt(given / M):.3g}") for M in counts}
    best = best_rates(first_rates, job, out, workers, progress, "pilots")
    return [Pilot(M, tuned.lr, rounds, tuned.loss) for M, tuned in best.items()]
