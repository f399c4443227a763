"""What goes beyond the paper, and what each part is worth: momentum over a round, orders, schedules, and their rivals.

    FEDCLUSTER_DATA=... .venv/bin/python studies/beyond.py [--data mnist] [--rho 0.5,0.9] [--only "FedAvg;FedHBM"]

MNIST with the MLP and CIFAR-10 with the CNN, 100 devices of 500 samples, of which 20 take part in a round: all at once
(M = 1), or two at a time in ten clusters (M = 10). 20 steps of batch 30, 40 rounds, the same number of device updates
with every method. In every cell a method has its own best `local.lr` and, where it has a second number (beta, server
rate), the best of that: by the mean loss of the last ten rounds, on a seed that is not used for results. The value on
either side is worse.

One core needs about 6 s for a run on MNIST and 80 s on CIFAR-10: PLAN says which cells are run first. Runs that are in
docs/beyond-the-paper/tuning.csv and results.csv are not repeated, so an interrupted study continues where it stopped.
Two processes may share the work, such as one for each data set. At the end, or at once with `--report`, the tables in
docs/beyond-the-paper/README.md and the pictures are written anew.
"""

import argparse
import csv
import gc
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import beyond_report
import torch
from beyond_report import RESULTS, TUNING, late_loss, losses, read
from search import best_point, next_points

from fedcluster.errors import Diverged
from fedcluster.experiment import Experiment
from fedcluster.runs.progress import Display
from fedcluster.training.run import run

ROOT = Path(__file__).parent.parent
ROUNDS, TUNING_SEED, AT_RANDOM = 40, 1_000_003, math.log(10)
MODELS = {"mnist": "mlp", "cifar10": "cnn"}


@dataclass(frozen=True)
class Method:
    """The keys of a method, its second number with the ladder of its values, and where the search starts."""

    keys: dict[str, Any] = field(default_factory=dict)
    second: str | None = None
    values: tuple[Any, ...] = (None,)
    start: int = 0
    first_rate: float = 0.1

    def experiment(self, data: str, rho: float, value: int, lr: float, seed: int) -> Experiment:
        base = Experiment(
            rounds=ROUNDS,
            data={"name": data},
            fleet={"devices": 100, "samples": 500, "rho_device": rho},
            clusters={"count": 10, "participation": 0.2},
            model={"name": MODELS[data]},
            local={"steps": 20, "batch": 30},
        )
        second = {self.second: self.values[value]} if self.second else {}
        return base.override(**self.keys, **second).override(seed=seed, **{"local.lr": lr})


def method(first_rate: float = 0.1, **keys: Any) -> Method:
    """A method of these keys (`local__steps` is `local.steps`). A list is the ladder of the second number, whose search
    starts in the middle."""
    fixed = {key.replace("__", "."): value for key, value in keys.items() if not isinstance(value, list)}
    ladders = [(key.replace("__", "."), tuple(value)) for key, value in keys.items() if isinstance(value, list)]
    second, values = ladders[0] if ladders else (None, (None,))
    return Method(fixed, second, values, len(values) // 2, first_rate)


BETAS = [[beta, 0.99] for beta in (0.1, 0.3, 0.5, 0.7, 0.9)]  # of the server; the second number is Adam's
DEVICE_BETAS = [0.1, 0.3, 0.5, 0.7, 0.9]
SERVER_RATES = [0.3, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8]
ADAM_RATES = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0]
ROUND: dict[str, Any] = {"server__optimizer": "round_momentum"}
METHODS = {
    "FedCluster": method(),
    "round momentum": method(0.05, **ROUND, server__betas=BETAS),
    "round momentum, sliding": method(**ROUND, server__memory="sliding", server__betas=BETAS),
    "FedAvg": method(0.4, clusters__count=1),
    "GHBM": method(algorithm__name="ghbm", algorithm__beta=DEVICE_BETAS),
    "FedHBM": method(algorithm__name="fedhbm"),
    "LocalGHBM": method(algorithm__name="local_ghbm", algorithm__beta=DEVICE_BETAS),
    "FedAvgM, M = 1": method(0.2, clusters__count=1, server__optimizer="avgm", server__lr=SERVER_RATES),
    "FedAdam, M = 1": method(0.2, clusters__count=1, server__optimizer="adam", server__lr=ADAM_RATES),
    "SCAFFOLD": method(algorithm__name="scaffold"),
    "SCAFFOLD, M = 1": method(0.4, clusters__count=1, algorithm__name="scaffold"),
    "order cyclic": method(clusters__order="cyclic"),
    "order once": method(clusters__order="once"),
    "order random": method(clusters__order="random"),
    "order balanced": method(clusters__order="balanced"),
    "no clusters, small cohorts": method(clusters__method="redrawn"),
    "balanced clusters": method(clusters__method="balanced"),
    "similar clusters": method(clusters__method="similar"),
    "minibatch SGD": method(1.6, local__steps=1, local__batch=600),
    "minibatch SGD, M = 1": method(1.6, clusters__count=1, local__steps=1, local__batch=600),
    "overlap of 1": method(clusters__overlap=1),
    "overlap of 3": method(clusters__overlap=3),
    "overlap of 9": method(clusters__overlap=9),
    "cosine": method(local__schedule__name="cosine"),
    "round momentum, cosine": method(0.05, **ROUND, server__betas=BETAS, local__schedule__name="cosine"),
    "round momentum, no clusters": method(0.05, **ROUND, clusters__method="redrawn", server__betas=BETAS),
    "momentum over a cycle": method(server__optimizer="avgm", server__betas=BETAS),
    "amplified": method(server__optimizer="amplified", server__lr=[0.5, 0.7, 1.0, 1.4, 2.0]),
}
NAMES = list(METHODS)
MAIN, ORDERS = NAMES[:11], NAMES[11:24]
CORE = ["FedCluster", "round momentum", "FedAvg"]
PLAN: list[tuple[str, tuple[float, ...], list[str], int]] = [  # data, rho_device, methods, seeds: what is run first
    ("mnist", (0.5, 0.9), MAIN, 5),
    ("mnist", (0.5, 0.9), ORDERS, 5),
    ("cifar10", (0.5, 0.9), CORE, 3),
    ("mnist", (0.5, 0.9), NAMES, 5),
    ("mnist", (0.1,), NAMES, 5),
    ("cifar10", (0.5,), MAIN, 3),
    ("cifar10", (0.5, 0.9, 0.1), NAMES, 5),
]


class Study:
    """The runs so far, in tuning.csv and results.csv of `folder`, and those that are missing."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        for name, columns in (("tuning.csv", TUNING), ("results.csv", RESULTS)):
            if not (folder / name).exists():
                append(folder / name, columns)

    def cell(self, data: str, rho: float, name: str, seeds: int) -> None:
        """Tune a method for a data set and a heterogeneity, then run it on all seeds."""
        value, lr = self.tune(data, rho, name)
        done = {row[:6] for row in read(self.folder / "results.csv")}
        for seed in range(seeds):
            key = (data, rho, name, seed, show(METHODS[name], value), lr)
            if key in done:
                continue
            lines = self.run(name, data, rho, value, lr, seed)
            accuracies = [line["test_accuracy"] for line in lines] or [0.0]
            last = lines[-1] if lines else {}
            spent = [last.get("bytes_down", 0), last.get("bytes_up", 0)]
            row = [*key, accuracies[-1], round(fmean(accuracies), 5), *spent, curve(lines)]
            append(self.folder / "results.csv", row)

    def tune(self, data: str, rho: float, name: str) -> tuple[int, float]:
        """The index of the best second number and the best learning rate."""
        method = METHODS[name]
        names = [show(method, value) for value in range(len(method.values))]
        rows = [row for row in read(self.folder / "tuning.csv") if row[:3] == (data, rho, name)]
        known = {(row[3], row[4]): late_loss(losses(row[5])) for row in rows}
        tried: dict[tuple[int, int], float] = {}
        while wanted := next_points(tried, method.start, len(method.values)):
            for step, value in wanted:
                lr = float(f"{method.first_rate * 2.0**step:.6g}")
                if (names[value], lr) not in known:
                    lines = self.run(name, data, rho, value, lr, TUNING_SEED)
                    known[names[value], lr] = late_loss(losses(curve(lines)))
                    append(self.folder / "tuning.csv", [data, rho, name, names[value], lr, curve(lines)])
                tried[step, value] = known[names[value], lr]
        step, value = best_point(tried)
        return value, float(f"{method.first_rate * 2.0**step:.6g}")

    def run(self, name: str, data: str, rho: float, value: int, lr: float, seed: int) -> list[dict[str, Any]]:
        """The lines of a run; none if it diverged or ended worse than guessing."""
        experiment, began = METHODS[name].experiment(data, rho, value, lr, seed), time.perf_counter()
        try:
            lines = run(experiment, display=Display()).history
        except Diverged:
            lines = []
        gc.collect()  # a finished run is a reference cycle
        failed = not lines or lines[-1]["train_loss"] > AT_RANDOM
        result = "diverged" if failed else f"{lines[-1]['train_loss']:.4f}"
        seconds = time.perf_counter() - began
        print(
            f"{time.strftime('%H:%M')} {data} rho {rho} {name} {show(METHODS[name], value)} lr {lr:g} seed {seed}: "
            f"{result} ({seconds:.0f} s)",
            flush=True,
        )
        return [] if failed else lines


def show(method: Method, value: int) -> str:
    """The second number, such as "server.betas=0.5"."""
    number = method.values[value]
    return f"{method.second}={number[0] if isinstance(number, list) else number}" if method.second else ""


def curve(lines: list[dict[str, Any]]) -> str:
    """The losses of all rounds, as they are written."""
    return " ".join(f"{line['train_loss']:.5g}" for line in lines)


def append(path: Path, row: Any) -> None:
    """Append a line in one write, so that two processes may share the file."""
    with path.open("a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerow(row)


def cells(data: list[str], rhos: list[float], names: list[str]) -> Iterator[tuple[str, float, str, int]]:
    """The cells of PLAN, in its order, of these data sets, heterogeneities and methods."""
    for one, among, methods, seeds in PLAN:
        for name in methods:
            yield from ((one, rho, name, seeds) for rho in among if one in data and rho in rhos and name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "beyond-the-paper")
    parser.add_argument("--data", default=",".join(MODELS))
    parser.add_argument("--rho", default="0.1,0.5,0.9")
    parser.add_argument("--only", help="methods, separated by semicolons; default: all")
    parser.add_argument("--report", action="store_true", help="run nothing; write the tables and pictures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = arguments.only.split(";") if arguments.only else NAMES
    if not arguments.report:
        study = Study(arguments.out)
        for cell in cells(arguments.data.split(","), [float(rho) for rho in arguments.rho.split(",")], names):
            study.cell(*cell)
    beyond_report.write(arguments.out, NAMES)


if __name__ == "__main__":
    main()
