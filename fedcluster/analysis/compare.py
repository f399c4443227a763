"""Fair comparison: the same fleet, start and budget for each method, over several seeds."""

import json
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedcluster.analysis.jobs import Job, run_all
from fedcluster.analysis.tuning import best_rates
from fedcluster.data import sources
from fedcluster.errors import BadExperiment, BadRun, Diverged
from fedcluster.experiment import Experiment, changes, parse, read
from fedcluster.files import write_atomically
from fedcluster.fleet import fleet
from fedcluster.fleet.clustering import clusters
from fedcluster.fleet.schedule import Schedule, taking_part
from fedcluster.processes import leave_if_importing
from fedcluster.runs.metrics import Line
from fedcluster.runs.plots import LABELS, X, curves
from fedcluster.runs.progress import Progress

METHODS = ("fedavg", "fedcluster", "centralized")
RATES = ("paper", "equal", "tuned")


@dataclass(frozen=True)
class Outcome:
    """One method: its rate, and its curves by seed, each from the start (round 0)."""

    method: str
    lr: float
    clusters: int
    histories: list[list[Line]]

    def final(self, key: str) -> tuple[float, float]:
        """Mean and standard deviation over seeds at the last round."""
        values = [lines[-1][key] for lines in self.histories]
        return fmean(values), stdev(values) if len(values) > 1 else 0.0

    def rounds_to(self, loss: float) -> list[int | None]:
        """By seed, the first round whose training loss is at or below `loss`."""
        return [next((line["round"] for line in lines if line["train_loss"] <= loss), None) for lines in self.histories]

    def reach(self, loss: float, x: str) -> list[float | None]:
        """By seed, how much of `x` it took until the training loss was at or below `loss`."""
        return [next((X[x][1](line) for line in lines if line["train_loss"] <= loss), None) for lines in self.histories]


@dataclass(frozen=True)
class Comparison:
    outcomes: list[Outcome]
    target: float
    lr: str
    x: str = "rounds"


def compare(
    experiment: Experiment,
    methods: Sequence[str] = METHODS,
    seeds: int = 3,
    lr: str = "paper",
    target: float | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    workers: int = 1,
    progress: Progress = lambda stage, done, total: None,
    x: str = "rounds",
) -> Comparison:
    """Run every method on every seed. `lr`: "paper" (local.lr is FedCluster's and centralized SGD's, FedAvg's
    is M times that), "equal" (local.lr for all), or "tuned" (each method's best on seeds kept for that). The picture
    and the table are over `x`: "rounds", "aggregations", "updates", "bytes" or "time"."""
    leave_if_importing()
    if type(workers) is not int or workers < 1:
        raise BadExperiment(f"workers = {workers!r} is not allowed: use a whole number from 1 on")
    unknown = [method for method in methods if method not in METHODS]
    if unknown or not methods or lr not in RATES or not 1 <= seeds <= 1000:
        raise BadExperiment(
            f"cannot compare methods {', '.join(methods)} with lr {lr} over {seeds} seeds: "
            f"methods are {', '.join(METHODS)}, lr is {', '.join(RATES)}, and seeds at least 1 and at most 1000"
        )
    if x not in X:
        raise BadExperiment(f"cannot compare over {x}: x is {', '.join(X)}")
    if x == "time" and experiment.clock is None:
        raise BadExperiment("to compare over time there must be a clock: add a section [clock] to the experiment")
    count, whole = clusters_and_share(experiment)
    with nullcontext(out) if out is not None else tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        claim(place, experiment, resume or out is None)
        rates = learning_rates(experiment, methods, lr, count, whole, place, workers, progress)
        jobs = {
            method: [
                Job(f"{method}-seed{seed}", variant(experiment, method, rates[method], seed, whole))
                for seed in range(experiment.seed, experiment.seed + seeds)
            ]
            for method in methods
        }
        by_seed = [job for several in zip(*jobs.values(), strict=True) for job in several]
        histories = run_all(by_seed, place, workers, lambda done, total: progress("comparing", done, total))
        outcomes = []
        for method in methods:
            mine = [histories[job.name] for job in jobs[method]]
            broken = next((lines for lines in mine if isinstance(lines, Diverged)), None)
            if broken is not None:
                raise Diverged(f"{LABELS[method]} at rate {rates[method]:g}: {broken}")
            lines = [one for one in mine if isinstance(one, list)]
            outcomes.append(Outcome(method, rates[method], count if method == "fedcluster" else 1, lines))
        if target is None:
            target = max(lines[-1]["train_loss"] for outcome in outcomes for lines in outcome.histories)
        comparison = Comparison(outcomes, target, lr, x)
        curves({o.method: o.histories for o in outcomes}, place / "curves.png", caption(experiment, seeds, lr), x)
        write_atomically(place / "comparison.json", json.dumps(summary(comparison), indent=2) + "\n")
        return comparison


def clusters_and_share(experiment: Experiment) -> tuple[int, float]:
    """M, and the share of all devices that takes part in a round of FedAvg with as many updates as FedCluster's."""
    everyone, _ = fleet.build(experiment.fleet, sources.open_dataset(experiment.data.name), experiment.seed)
    groups = clusters.build(experiment.clusters, everyone, experiment.seed)
    updates = Schedule(experiment.clusters, everyone, groups, experiment.seed).cohort_size()
    return groups.count, fedavg_participation(experiment.clusters.participation, updates, len(everyone))


def learning_rates(
    experiment: Experiment,
    methods: Sequence[str],
    lr: str,
    count: int,
    whole: float,
    out: Path,
    workers: int,
    progress: Progress,
) -> dict[str, float]:
    """The rate of every method: as in the paper, equal, or the best of those tried on seeds kept for tuning."""
    base = experiment.local.lr
    if lr != "tuned":
        return {method: base * (count if method == "fedavg" and lr == "paper" else 1) for method in methods}

    def job(method: str, rate: float, seed: int) -> Job:
        return Job(f"tune-{method}-{rate:g}-seed{seed}", variant(experiment, method, rate, seed, whole))

    best = best_rates(dict.fromkeys(methods, base), job, out, workers, progress)
    return {method: found.lr for method, found in best.items()}


def claim(out: Path, experiment: Experiment, resume: bool) -> None:
    """A comparison's folder is made once, and continued only by the same experiment."""
    path = out / "experiment.toml"
    if path.exists():
        if not resume:
            raise BadRun(f"{out} already holds a comparison: continue it with --resume, or choose another --out")
        changed = changes(parse(read(path), str(path)), experiment.to_dict())
        if changed:
            raise BadRun(f"{out} holds a comparison of another experiment, which differs in {', '.join(changed)}")
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(path, experiment.to_toml())
    except OSError as error:
        raise BadRun(f"cannot write to {out} ({error.strerror}): choose another folder with --out") from None


def fedavg_participation(participation: float, updates: int, devices: int) -> float:
    """The share of all devices that gives FedAvg as many updates a round as FedCluster's cohorts have together. It is
    `participation` itself, unless FedCluster has small clusters that give a device each, or leaves devices out."""
    return participation if taking_part(participation, devices) == updates else updates / devices


def variant(experiment: Experiment, method: str, lr: float, seed: int, whole: float) -> Experiment:
    """The same experiment by another method. FedAvg is one cluster of everybody, of which the share `whole` takes
    part."""
    keys: dict[str, Any] = {"seed": seed, "local.lr": lr, "method": "fedcluster"}
    if method == "fedavg":
        one = {"method": "random", "count": 1, "soft": False, "participation": whole}
        keys |= {f"clusters.{key}": value for key, value in one.items()}
    if method == "centralized":
        keys |= {"method": "centralized"}
    return experiment.override(**keys)


def caption(experiment: Experiment, seeds: int, lr: str) -> str:
    data = experiment.data.name if isinstance(experiment.data.name, str) else "data"
    rates = {
        "paper": "FedAvg's rate is M times FedCluster's, as in the paper",
        "equal": "equal rates",
        "tuned": "each at its own best rate",
    }[lr]
    return f"{Path(data).name}, {seeds} seed{'s' * (seeds > 1)} (band: lowest to highest), {rates}"


def summary(comparison: Comparison) -> dict[str, Any]:
    timed = comparison.x != "rounds"
    return {
        "lr": comparison.lr,
        "target_train_loss": comparison.target,
        "methods": {
            outcome.method: {
                "lr": outcome.lr,
                "clusters": outcome.clusters,
                "rounds_to_target": outcome.rounds_to(comparison.target),
                **({f"{comparison.x}_to_target": outcome.reach(comparison.target, comparison.x)} if timed else {}),
                "final": [lines[-1] for lines in outcome.histories],
            }
            for outcome in comparison.outcomes
        },
    }
