"""Accuracy against epsilon: FedAvg, FedCluster, and FedCluster with noise correlated over the cycles of a round.

    .venv/bin/python studies/privacy.py [--minutes 60]

MNIST, each of its 60,000 samples on one device, in shards of sorted labels (about two classes a device): 1,000 devices
of 60 samples and 10,000 of 6. A logistic model; a tenth of the devices take part in a round; delta is 1 / (10 n).
Every method has its own best local.lr and privacy.clip by the mean accuracy of the last rounds on a seed that is not
used for results, on ladders that go on until the value on either side is worse. Those of epsilon 2 are used for 1 and
2, those of 8 for 4 and 8. All runs are of one process, which stops when its minutes are over. Run again, it continues
with results.csv in docs/privacy-study, where it writes the table in README.md and accuracy.png.
"""

import argparse
import csv
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from search import best_point, next_points

import fedcluster
from fedcluster.analysis.tuning import rate
from fedcluster.data import sources
from fedcluster.errors import Diverged
from fedcluster.experiment import Data
from fedcluster.figures import canvas, save
from fedcluster.runs.progress import Display, default_display

ROOT = Path(__file__).parent.parent
OUT = ROOT / "docs" / "privacy-study"
ROUNDS, LAST, SEEDS, TUNING_SEED = 20, 3, (0, 1, 2), 1_000_003
FLEETS, EPSILONS = (1_000, 10_000), (1.0, 2.0, 4.0, 8.0)
METHODS: dict[str, dict[str, Any]] = {
    "FedAvg": {"clusters.count": 1},
    "FedCluster": {"clusters.count": 10},
    "FedCluster, banded": {"clusters.count": 10, "privacy.mechanism": "banded"},
}
TUNED_AT = {1.0: 2.0, 2.0: 2.0, 4.0: 8.0, 8.0: 8.0, 0.0: 0.0}
FIRST_RATE, CLIPS = 0.1, (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
ORDER = (8.0, 1.0, 2.0, 4.0, 0.0)  # of epsilons, the most telling first
LOCAL: dict[int, dict[str, Any]] = {1_000: {"steps": 10, "batch": 20}, 10_000: {"steps": 5, "batch": 6}}
COLOURS = {"FedAvg": "#D55E00", "FedCluster": "#56B4E9", "FedCluster, banded": "#0072B2"}


class Run(NamedTuple):
    devices: int
    method: str
    epsilon: float  # 0: without differential privacy
    lr: float
    clip: float
    seed: int


Results = dict[Run, float]


def experiment(run: Run, data: fedcluster.Dataset) -> fedcluster.Experiment:
    base = fedcluster.Experiment(
        seed=run.seed,
        rounds=ROUNDS,
        data={"name": data},
        fleet={"devices": run.devices, "samples": "all", "partition": "shards"},
        clusters={"order": "cyclic", "participation": 0.1},
        model={"name": "logistic"},
        local=LOCAL[run.devices] | {"lr": run.lr},
    )
    if run.epsilon:
        private = {"epsilon": run.epsilon, "delta": 0.1 / run.devices, "clip": run.clip}
        base = base.override(privacy=private)
    return base.override(**{k: v for k, v in METHODS[run.method].items() if run.epsilon or "privacy" not in k})


def accuracy(run: Run, data: fedcluster.Dataset) -> float:
    """The mean test accuracy of the last rounds, 0 where training diverged."""
    try:
        history = fedcluster.run(experiment(run, data), display=Display()).history
    except Diverged:
        return 0.0
    return fmean(line["test_accuracy"] for line in history[-LAST:])


def tuning(devices: int, method: str, epsilon: float, done: Results) -> tuple[Run, list[Run]]:
    """The best run on the tuning seed so far, and the runs that the search needs next; none at its end."""
    at, first = TUNED_AT[epsilon], 4 if method == "FedAvg" else 3
    clips = CLIPS if at else (0.0,)
    tried: dict[tuple[int, int], float] = {}
    while points := next_points(tried, first if at else 0, len(clips)):
        runs = {
            point: Run(devices, method, at, rate(FIRST_RATE, point[0]), clips[point[1]], TUNING_SEED)
            for point in points
        }
        if missing := [run for run in runs.values() if run not in done]:
            return missing[0], missing
        tried |= {point: -done[run] for point, run in runs.items()}
    step, clip = best_point(tried)
    return Run(devices, method, at, rate(FIRST_RATE, step), clips[clip], TUNING_SEED), []


def cells() -> Iterator[tuple[int, float, str]]:
    """Devices, epsilon and method of all cells, in the order of how much they tell."""
    for devices in FLEETS:
        for epsilon in ORDER:
            yield from ((devices, epsilon, name) for name in METHODS if epsilon or name != "FedCluster, banded")


def final(devices: int, epsilon: float, method: str, done: Results) -> list[Run]:
    """The runs of a cell on all seeds, at its best rate and clip; none while these are searched."""
    best, missing = tuning(devices, method, epsilon, done)
    return [] if missing else [best._replace(epsilon=epsilon, seed=seed) for seed in SEEDS]


def wanted(done: Results) -> Iterator[Run]:
    """The runs that are left."""
    for devices, epsilon, method in cells():
        while missing := tuning(devices, method, epsilon, done)[1]:
            yield from missing
        yield from (run for run in final(devices, epsilon, method, done) if run not in done)


def read(path: Path) -> Results:
    if not path.exists():
        return {}
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return {
        Run(
            int(row["devices"]),
            row["method"],
            float(row["epsilon"]),
            float(row["lr"]),
            float(row["clip"]),
            int(row["seed"]),
        ): float(row["accuracy"])
        for row in rows
    }


def found(done: Results) -> dict[tuple[int, float, str], list[float]]:
    """The accuracies of all seeds at the best rate and clip, where all are there."""
    runs = {cell: final(*cell, done) for cell in cells()}
    return {cell: [done[one] for one in of] for cell, of in runs.items() if of and all(one in done for one in of)}


def write(done: Results) -> None:
    scores_of = found(done)
    lines = ["| devices | epsilon | " + " | ".join(METHODS) + " |", "| --- | --- |" + " --- |" * len(METHODS)]
    for devices in FLEETS:
        for epsilon in (*EPSILONS, 0.0):
            scores = [scores_of.get((devices, epsilon, method)) for method in METHODS]
            if not any(scores):
                continue
            texts = [f"{fmean(one):.1%} ± {stdev(one):.1%}" if one else "-" for one in scores]
            lines.append(f"| {devices:,} | {f'{epsilon:g}' if epsilon else 'no privacy'} | {' | '.join(texts)} |")
    path = OUT / "README.md"
    path.write_text(path.read_text().partition("| devices |")[0] + "\n".join(lines) + "\n")
    draw(scores_of)


def draw(cells: dict[tuple[int, float, str], list[float]]) -> None:
    fleets = [devices for devices in FLEETS if any(cell[0] == devices for cell in cells)]
    if not fleets:
        return
    figure, axes = canvas(len(fleets), 5 * len(fleets), 4)
    for axis, devices in zip(axes, fleets, strict=True):
        for method, colour in COLOURS.items():
            points = [(epsilon, cells.get((devices, epsilon, method))) for epsilon in EPSILONS]
            known = [(epsilon, scores) for epsilon, scores in points if scores]
            if known:
                x, means = [epsilon for epsilon, _ in known], [100 * fmean(scores) for _, scores in known]
                spread = [100 * stdev(scores) for _, scores in known]
                axis.errorbar(x, means, spread, marker="o", capsize=3, color=colour, label=method)
            if limit := cells.get((devices, 0.0, method)):
                axis.axhline(100 * fmean(limit), color=colour, linestyle=":", linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
        axis.set_xlabel(f"epsilon (delta = {0.1 / devices:.0e})")
        axis.set_title(f"{devices:,} devices of {60_000 // devices} samples")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("test accuracy, %")
    axes[0].legend(title="dotted: without privacy", fontsize=9)
    save(figure, OUT / "accuracy.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="of CPU time")
    arguments = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / "results.csv"
    done, display = read(path), default_display()
    data = sources.open_dataset(Data(name="mnist"))
    if not path.exists():
        path.write_text(",".join([*Run._fields, "accuracy"]) + "\n")
    with path.open("a", newline="") as file:
        rows = csv.writer(file)
        for run in wanted(done):
            if time.process_time() > 60 * arguments.minutes:
                display.say(f"stopped after {arguments.minutes:g} minutes; run it again to continue")
                break
            done[run] = accuracy(run, data)
            rows.writerow([*run, f"{done[run]:.5f}"])
            file.flush()
            display.say(f"{len(done)}: {', '.join(map(str, run))}: {done[run]:.1%}, {time.process_time():.0f} s")
    write(done)


if __name__ == "__main__":
    main()
