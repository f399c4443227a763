"""Fair comparison: the same fleet, start and budget for each method, over several seeds."""

import gc
import json
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from threading import Thread
from typing import Any

from fedcluster import clusters, fleet, sources
from fedcluster.allocator import keep_memory
from fedcluster.display import Display
from fedcluster.errors import BadExperiment, BadRun, Diverged
from fedcluster.experiment import Experiment, changes, parse, read
from fedcluster.files import write_atomically
from fedcluster.plots import LABELS, X, curves
from fedcluster.record import Line
from fedcluster.training import run

METHODS = ("fedavg", "fedcluster", "centralized")
RATES = ("paper", "equal", "tuned")
GRID = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # times local.lr, the same for every method
TUNING_SEEDS = (1_000_003, 1_000_004)  # never those of the comparison


@dataclass(frozen=True)
class Job:
    """One run of a comparison: its name is its folder."""

    name: str
    experiment: Experiment


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
    remarks: list[str]
    x: str = "rounds"


Progress = Callable[[str, int, int], None]
"""Told the stage, and the rounds done of how many."""


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
    unknown = [method for method in methods if method not in METHODS]
    if unknown or not methods or lr not in RATES or seeds < 1:
        raise BadExperiment(
            f"cannot compare methods {', '.join(methods)} with lr {lr} over {seeds} seeds: "
            f"methods are {', '.join(METHODS)}, lr is {', '.join(RATES)}, and seeds at least 1"
        )
    if x not in X:
        raise BadExperiment(f"cannot compare over {x}: x is {', '.join(X)}")
    if x == "time" and experiment.clock is None:
        raise BadExperiment("to compare over time there must be a clock: add a section [clock] to the experiment")
    if out is None:
        with tempfile.TemporaryDirectory() as folder:
            return compare(experiment, methods, seeds, lr, target, folder, True, workers, progress, x)
    out = Path(out)
    everyone = fleet.build(experiment.fleet, sources.open_dataset(experiment.data.name), experiment.seed)
    count = clusters.build(experiment.clusters, everyone, experiment.seed).count
    claim(out, experiment, resume)
    remarks: list[str] = []
    rates = {method: experiment.local.lr * (count if method == "fedavg" and lr == "paper" else 1) for method in methods}
    if lr == "tuned":
        rates, remarks = tune(experiment, methods, out, workers, progress)

    jobs = [
        Job(f"{method}-seed{seed}", variant(experiment, method, rates[method], seed))
        for seed in range(experiment.seed, experiment.seed + seeds)
        for method in methods
    ]
    histories = run_all(jobs, out, workers, lambda done, total: progress("comparing", done, total))
    outcomes = []
    for method in methods:
        mine = [histories[job.name] for job in jobs if job.name.startswith(f"{method}-")]
        broken = next((lines for lines in mine if isinstance(lines, Diverged)), None)
        if broken is not None:
            raise Diverged(f"{LABELS[method]} at rate {rates[method]:g}: {broken}")
        outcomes.append(
            Outcome(
                method, rates[method], count if method == "fedcluster" else 1, [x for x in mine if isinstance(x, list)]
            )
        )
    if target is None:
        target = max(lines[-1]["train_loss"] for outcome in outcomes for lines in outcome.histories)
    comparison = Comparison(outcomes, target, lr, remarks, x)
    curves({o.method: o.histories for o in outcomes}, out / "curves.png", caption(experiment, seeds, lr), x)
    write_atomically(out / "comparison.json", json.dumps(summary(comparison), indent=2) + "\n")
    return comparison


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


def variant(experiment: Experiment, method: str, lr: float, seed: int) -> Experiment:
    """The same experiment by another method. FedAvg is one cluster of everybody."""
    keys: dict[str, Any] = {"seed": seed, "local.lr": lr, "method": "fedcluster"}
    if method == "fedavg":
        keys |= {"clusters.method": "random", "clusters.count": 1, "clusters.soft": False}
    if method == "centralized":
        keys |= {"method": "centralized"}
    return experiment.with_(**keys)


def tune(
    experiment: Experiment, methods: Sequence[str], out: Path, workers: int, progress: Progress
) -> tuple[dict[str, float], list[str]]:
    """Each method's best rate: the lowest final training loss, averaged over the tuning seeds."""
    rates = [float(f"{experiment.local.lr * factor:.6g}") for factor in GRID]
    jobs = {
        (method, rate, seed): Job(f"tune-{method}-{rate:g}-seed{seed}", variant(experiment, method, rate, seed))
        for method in methods
        for rate in rates
        for seed in TUNING_SEEDS
    }
    histories = run_all(list(jobs.values()), out, workers, lambda done, total: progress("tuning", done, total))
    best, remarks = {}, []
    for method in methods:
        losses = {}
        for rate in rates:
            runs = [histories[jobs[method, rate, seed].name] for seed in TUNING_SEEDS]
            losses[rate] = fmean(math.inf if isinstance(x, Diverged) else x[-1]["train_loss"] for x in runs)
        best[method] = min(losses, key=losses.__getitem__)
        if not math.isfinite(losses[best[method]]):
            raise Diverged(f"{LABELS[method]} diverges at every rate of the grid {rates}: lower local.lr")
        if best[method] in (rates[0], rates[-1]):
            remarks.append(f"{LABELS[method]}'s best rate {best[method]:g} is at the edge of the grid: move local.lr")
    return best, remarks


def run_all(
    jobs: list[Job], out: Path, workers: int, progress: Callable[[int, int], None]
) -> dict[str, list[Line] | Diverged]:
    """Every job's curve from its start, or how it diverged. Finished runs in the folder are not run again."""
    total = sum(job.experiment.rounds for job in jobs)
    results: dict[str, list[Line] | Diverged] = {}
    if workers < 2:
        for job in jobs:
            before = sum(other.experiment.rounds for other in jobs[: len(results)])
            results[job.name] = run_one(job, out, Counting(lambda n, before=before: progress(before + n, total)))  # type: ignore[misc]
        return results
    context = get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=enlist) as pool:
        pending: dict[Future[list[Line] | Diverged], str] = {pool.submit(run_one, job, out): job.name for job in jobs}
        try:
            while pending:
                for future in wait(pending, timeout=0.3, return_when=FIRST_COMPLETED).done:
                    results[pending.pop(future)] = future.result()
                progress(sum(rounds_done(out / job.name) for job in jobs), total)
        except BaseException:
            processes = list(pool._processes.values())
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()
            raise
    return results


def enlist() -> None:
    """A process of the pool ends when it is told to, without a word, or when we are gone: its runs can be resumed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    keep_memory()
    Thread(target=end_with, args=(os.getppid(),), daemon=True).start()


def end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def rounds_done(folder: Path) -> int:
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def run_one(job: Job, out: Path, display: Display | None = None) -> list[Line] | Diverged:
    folder = out / job.name
    try:
        history = run(job.experiment, folder, resume=True, display=display or Display()).history
    except Diverged as error:
        return error
    finally:
        gc.collect()  # a run ends in a ring of references, and its data set may be hundreds of megabytes
    start = json.loads((folder / "run.json").read_bytes())["start"]
    return [{"round": 0, **start}, *history]


class Counting(Display):
    """Reports the rounds that a run in this process has done."""

    def __init__(self, report: Callable[[int], None]) -> None:
        self.report = report

    def round(self, line: Line) -> None:
        self.report(line["round"])


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
        "remarks": comparison.remarks,
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
