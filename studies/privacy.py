"""Accuracy against epsilon: FedAvg, FedCluster, and FedCluster with noise correlated over the cycles of a round.

    .venv/bin/python studies/privacy.py [--minutes 60]

MNIST, each of its 60,000 samples on one device, in shards of sorted labels (about two classes a device): 1,000 devices
of 60 samples and 10,000 of 6. A logistic model; a tenth of the devices take part in a round; delta is 1 / (10 n). Every
method has its own best local.lr and privacy.clip by the mean accuracy of the last rounds on a seed that is not used for
results: of twelve pairs with 1,000 devices, where those of epsilon 2 are used for 1 and 2, those of 8 for 4 and 8; of
four pairs at epsilon 8 with 10,000. All runs are of one process, which stops when its minutes are over. Run again, it
continues with results.csv in docs/privacy-study, where it writes README.md and accuracy.png.
"""

import argparse
import csv
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import fedcluster
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
TUNED_AT = {1_000: {1.0: 2.0, 2.0: 2.0, 4.0: 8.0, 8.0: 8.0}, 10_000: dict.fromkeys(EPSILONS, 8.0)}
RATES = {1_000: (0.003, 0.03, 0.1, 0.3), 10_000: (0.03, 0.1)}
CLIPS: dict[int, dict[str, tuple[float, ...]]] = {  # a movement of M cycles may be M times as long in a round
    1_000: {"FedAvg": (0.3, 1.0, 3.0), "FedCluster": (0.03, 0.1, 0.3), "FedCluster, banded": (0.03, 0.1, 0.3)},
    10_000: {"FedAvg": (0.3, 1.0), "FedCluster": (0.1, 0.3), "FedCluster, banded": (0.1, 0.3)},
}
ORDER = {1_000: (8.0, 2.0, 4.0, 1.0, 0.0), 10_000: (8.0, 1.0, 2.0, 4.0)}  # of epsilons, the most telling first
LOCAL: dict[int, dict[str, Any]] = {1_000: {"steps": 10, "batch": 20}, 10_000: {"steps": 5, "batch": 6}}
COLOURS = {"FedAvg": "#D55E00", "FedCluster": "#56B4E9", "FedCluster, banded": "#0072B2"}


TEXT = """# Accuracy against epsilon

![Test accuracy of FedAvg, FedCluster and FedCluster with banded noise, against epsilon](accuracy.png)

Test accuracy of a logistic model on MNIST after 20 rounds in which a tenth of the devices take part: mean of the last
three rounds, and its standard deviation over three seeds. Every sample is on one device, which has about two classes.
FedCluster has ten random clusters and `order = "cyclic"`. delta is a tenth of one over the number of devices.
Learning rate and clip are each method's own best of a grid, on another seed. The grids are small
([studies/privacy.py](../../studies/privacy.py)), and several of the best are at their edges. [results.csv](results.csv)
has all runs.
This is one small model on one data set. Cells that are missing have not been measured yet.

Independent noise makes cycling expensive: at every epsilon FedCluster is behind FedAvg, most at the smallest, though
without privacy it is ahead. Banded noise gives nearly all of that back: it is within two points of FedAvg
everywhere. Under differential privacy these runs give no reason to cycle for accuracy alone.

"""


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


def tuning(devices: int, method: str, epsilon: float) -> list[Run]:
    clips = CLIPS[devices][method] if epsilon else (0.0,)
    epsilon = TUNED_AT[devices].get(epsilon, 0.0)
    return [Run(devices, method, epsilon, lr, clip, TUNING_SEED) for lr in RATES[devices] for clip in clips]


def wanted(done: Results) -> Iterator[Run]:
    """The runs that are left, in the order of how much they tell."""
    for devices in FLEETS:
        for epsilon in ORDER[devices]:
            for method in METHODS:
                if not (epsilon or method != "FedCluster, banded"):
                    continue
                grid = tuning(devices, method, epsilon)
                yield from (run for run in grid if run not in done)
                best = max(grid, key=lambda run: done[run])
                final = [best._replace(epsilon=epsilon, seed=seed) for seed in SEEDS]
                yield from (run for run in final if run not in done)


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
    cells: dict[tuple[int, float, str], list[float]] = {}
    for devices in FLEETS:
        for epsilon in ORDER[devices]:
            for method in METHODS:
                grid = tuning(devices, method, epsilon)
                if all(run in done for run in grid):
                    best = max(grid, key=lambda run: done[run])
                    scores = [done.get(best._replace(epsilon=epsilon, seed=seed)) for seed in SEEDS]
                    known = [score for score in scores if score is not None]
                    if len(known) == len(SEEDS):
                        cells[devices, epsilon, method] = known
    return cells


def write(done: Results) -> None:
    cells = found(done)
    lines = ["| devices | epsilon | " + " | ".join(METHODS) + " |", "| --- | --- |" + " --- |" * len(METHODS)]
    for devices in FLEETS:
        for epsilon in (*EPSILONS, 0.0):
            scores = [cells.get((devices, epsilon, method)) for method in METHODS]
            if not any(scores):
                continue
            texts = [f"{fmean(one):.1%} ± {stdev(one):.1%}" if one else "-" for one in scores]
            lines.append(f"| {devices:,} | {f'{epsilon:g}' if epsilon else 'no privacy'} | {' | '.join(texts)} |")
    (OUT / "README.md").write_text(TEXT + "\n".join(lines) + "\n")
    draw(cells)


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
