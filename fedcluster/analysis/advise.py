"""Which M, and which clusters? What the theorem's C / sqrt(M) says for this fleet, and short runs that check it.

C grows with M, because smaller clusters differ more and average less; sqrt(M) grows with M, because there are more
cycles in a round. In between is a best M. The theorem lets all devices of a cluster take part; where only cohorts do,
what a cohort is further from the fleet than its cluster counts like H_cluster, and the advice goes by that sum.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedcluster.analysis import heterogeneity
from fedcluster.analysis.analyze import Cells, sample_remark
from fedcluster.analysis.bound import Constants, Range
from fedcluster.analysis.jobs import Job
from fedcluster.analysis.measures import device_sample, largest_square, mean_loss, measures
from fedcluster.analysis.plots import canvas, save
from fedcluster.analysis.smoothness import smoothness
from fedcluster.analysis.tuning import best_rates
from fedcluster.errors import BadExperiment
from fedcluster.experiment import Clusters as Options
from fedcluster.experiment import Experiment
from fedcluster.files import write_atomically
from fedcluster.fleet.clustering import clusters as clusterings
from fedcluster.fleet.schedule import cohort_sizes, taking_part
from fedcluster.models.flat_model import FlatModel
from fedcluster.runs.progress import Display, Progress
from fedcluster.training.loop import repeatable
from fedcluster.training.setup import Setup, prepare
from fedcluster.training.survey import Survey, survey

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
    devices = device_sample(setup.fleet, experiment.seed)
    parts = setup.dataset, setup.fleet, devices, experiment.local, experiment.seed, display
    return Scale(setup, survey(flat_models, w, *parts), smoothness(flat_models, w, *parts))


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


def verdict(advice: Advice, participation: float) -> list[str]:
    """Which to take, and why."""
    ranked = sorted(advice.choices, key=lambda choice: choice.cohort_height)
    theory = min(advice.choices, key=lambda choice: choice.height)
    best, last = ranked[0], advice.choices[-1]
    said = [f"Take M = {advice.take}."]
    if participation < 1 and theory.M != best.M:
        said.append(
            f"C / sqrt(M) is least at M = {theory.M} if all devices of a cluster take part, as the theorem has it; "
            f"with a share of {participation:g} of them, at M = {best.M}."
        )
    else:
        said.append(f"C / sqrt(M) is least at M = {best.M}.")
    lower = min(advice.choices, key=lambda choice: choice.C_low / math.sqrt(choice.M))
    if lower.M != best.M:
        said.append(
            f"It is a close call: L is between {advice.L.low:.3g} and {advice.L.high:.3g}, and at the lower end "
            f"M = {lower.M} would be best."
        )
    said.append(f"Participation = {participation:g} allows up to M = {last.M}, with a device in every cohort.")
    if advice.pilots:
        order = sorted(advice.pilots, key=lambda pilot: pilot.loss)
        results = ", ".join(f"M = {p.M}: {p.loss:.4f} at rate {p.lr:g}" for p in order)
        agrees = order[0].M == best.M
        said.append(
            f"The pilots ({order[0].rounds} rounds, training loss by M, each at its best rate) "
            + ("agree" if agrees else f"disagree, and are believed: theory's constants are loose, M = {order[0].M} won")
            + f": {results}."
        )
    else:
        said.append("This is an upper bound's advice: --pilot checks it by short runs.")
    said += clusterings_verdict(advice)
    if error := max(choice.error for choice in advice.choices + advice.others):
        said.append(f"Standard errors of H_cluster are {error:.2g} or less.")
    return said


def clusterings_verdict(advice: Advice) -> list[str]:
    """Which clusters to take at the M to take."""
    if advice.take == 1:
        return ["With one cluster of all devices there is nothing to cluster, and H_cluster is 0."]
    if not advice.others:
        return []
    plain = next(choice for choice in advice.others if choice.name == "random")
    better = min(advice.others, key=lambda choice: choice.H_cluster)
    if better is plain:
        return [f"At M = {advice.take}, no clusters have a smaller H_cluster than random ones, {plain.H_cluster:.3g}."]
    return [
        f"At M = {advice.take}, clusters that are {better.name}, have H_cluster {better.H_cluster:.3g}; "
        f"random ones have {plain.H_cluster:.3g}"
        + (f", and cohorts add {better.sampling:.3g} to either." if better.sampling > better.H_cluster else ".")
    ]


def table(choices: list[Choice], first: str) -> Cells:
    """By clustering: what H_cluster, cohorts and batches add to C, and what the bound makes of it. Where M is the same
    for all, so is the cohort."""
    columns = [first[:12], "H_cluster", "cohorts", "V", "C/√M", "+ cohorts"]
    rows = [
        [
            choice.name,
            *(f"{value:.3g}" for value in (choice.H_cluster, choice.sampling, choice.V)),
            *(f"{height:.3g}" for height in (choice.height, choice.cohort_height)),
        ]
        for choice in choices
    ]
    if len({choice.M for choice in choices}) > 1:
        columns.insert(1, "cohort")
        for row, choice in zip(rows, choices, strict=True):
            row.insert(1, f"{choice.cohort:.4g}")
    return columns, rows


def write(advice: Advice, participation: float, out: Path) -> list[Path]:
    """advice.json and the curve."""
    out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = asdict(advice) | {"verdict": verdict(advice, participation)}
    write_atomically(out / "advice.json", json.dumps(report, indent=2) + "\n")
    picture(advice, participation, out / "advice.png")
    return [out / "advice.json", out / "advice.png"]


def picture(advice: Advice, participation: float, path: Path) -> None:
    """C / sqrt(M) over M with its minimum, and what C consists of."""
    from matplotlib.ticker import LogLocator

    figure, (left, right) = canvas(2, 10.5, 3.9)
    M = [choice.M for choice in advice.choices]
    curves = [("all of a cluster take part", "#0072B2", [choice.height for choice in advice.choices])]
    if participation < 1:
        name = f"cohorts: {participation:g} of a cluster"
        curves.append((name, "#D55E00", [choice.cohort_height for choice in advice.choices]))
    for name, colour, heights in curves:
        low = heights.index(min(heights))
        left.plot(M, heights, "o-", color=colour, lw=1.8, ms=4, label=name)
        left.plot(M[low], heights[low], "o", ms=11, mfc="none", mew=1.8, color=colour)
        left.annotate(f"M = {M[low]}", (M[low], heights[low]), (0, -18), textcoords="offset points", ha="center")
    left.set(title="the bound's C / sqrt(M); circles: least", xlabel="M, clusters", xscale="log", yscale="log")
    left.margins(y=0.2)
    left.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    left.yaxis.set_major_formatter(lambda height, _: f"{height:g}")
    left.legend(frameon=False)
    for name, colour, values in (
        ("H_cluster", "#0072B2", [choice.H_cluster for choice in advice.choices]),
        ("cohorts add", "#D55E00", [choice.sampling for choice in advice.choices]),
        ("V (batches)", "#E69F00", [choice.V for choice in advice.choices]),
    ):
        shown = [(m, value) for m, value in zip(M, values, strict=True) if value > 1e-9]
        if shown:
            right.plot(*zip(*shown, strict=True), "o-", color=colour, lw=1.8, ms=4, label=name)
    right.set(title="what grows with M", xlabel="M, clusters", xscale="log", yscale="log")
    right.legend(frameon=False)
    for ax in (left, right):
        ax.set_xticks(M, [str(m) for m in M])
        ax.minorticks_off()
        ax.grid(alpha=0.25)
    save(figure, path)
