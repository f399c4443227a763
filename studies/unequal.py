"""Unequal clusters: a full step for each of them, or learning rates in proportion to their share of the samples?

    FEDCLUSTER_DATA=... .venv/bin/python studies/unequal.py        about five minutes of one core

MNIST with the MLP, 100 devices of 500 samples, 20 updates a round in ten clusters of 2 to 28 devices, 20 rounds. A
share rho_device of a device's samples is of one class; clusters are random, or hold the devices of neighbouring
classes. `clusters.weighting` is "cluster" or "sample". Either has its own best `local.lr`, on a ladder of doublings
with a worse rate on either side, by the mean training loss of the last five rounds, on a seed that is not used for
results. Runs that are in docs/beyond-the-paper/unequal.csv are not repeated. Prints the table of the README there.
"""

import csv
import math
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray

from fedcluster.analysis.paper.claims import interval
from fedcluster.analysis.tuning import best_step, next_steps
from fedcluster.errors import Diverged
from fedcluster.experiment import Experiment
from fedcluster.fleet.fleet import Fleet
from fedcluster.runs.progress import Display
from fedcluster.training.run import run

PATH = Path(__file__).parent.parent / "docs" / "beyond-the-paper" / "unequal.csv"
ROUNDS, SEEDS, TUNING_SEED, FIRST_RATE, LAST, AT_RANDOM = 20, range(5), 1_000_003, 0.1, 5, math.log(10)
SIZES = (28, 20, 15, 10, 8, 6, 5, 4, 2, 2)  # devices in each cluster
COLUMNS = ("rho_device", "clusters", "weighting", "seed", "lr", "test_accuracy", "train_losses")


def in_order(devices: NDArray[np.int64]) -> NDArray[np.int64]:
    """The clusters of devices that are taken in this order."""
    assignment = np.empty(len(devices), np.int64)
    assignment[devices] = np.repeat(np.arange(len(SIZES)), SIZES)
    return assignment


def random(fleet: Fleet, rng: Generator, options: Any) -> NDArray[np.int64]:
    return in_order(rng.permutation(len(fleet)))


def by_class(fleet: Fleet, rng: Generator, options: Any) -> NDArray[np.int64]:
    return in_order(np.lexsort((rng.random(len(fleet)), fleet.major_class)))


CLUSTERINGS = {"random": random, "by class": by_class}


def losses_of(row: list[Any]) -> list[float]:
    return [float(loss) for loss in row[-1].split()]


def late(row: list[Any]) -> float:
    """The mean loss of the last rounds; infinite for a run that diverged or ended worse than guessing."""
    losses = losses_of(row)
    return fmean(losses[-LAST:]) if losses and losses[-1] < AT_RANDOM else math.inf


class Results:
    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        if PATH.exists():
            with PATH.open(newline="") as file:
                kinds = (float, str, str, int, float, float, str)
                for row in list(csv.reader(file))[1:]:
                    self.rows.append([kind(cell) for kind, cell in zip(kinds, row, strict=True)])

    def of(self, rho: float, clusters: str, weighting: str, seed: int, lr: float) -> list[Any]:
        key = [rho, clusters, weighting, seed, lr]
        if not (found := [row for row in self.rows if row[:5] == key]):
            cycling = {"method": CLUSTERINGS[clusters], "count": len(SIZES), "participation": 0.2}
            described = Experiment(
                rounds=ROUNDS,
                seed=seed,
                data={"name": "mnist"},
                fleet={"devices": sum(SIZES), "samples": 500, "rho_device": rho},
                clusters=cycling | {"weighting": weighting},
                model={"name": "mlp"},
                local={"steps": 20, "batch": 30, "lr": lr},
            )
            try:
                lines = run(described, display=Display()).history
            except Diverged:
                lines = []
            accuracy = fmean([line["test_accuracy"] for line in lines[-LAST:]] or [0.0])
            found = [[*key, round(accuracy, 5), " ".join(f"{line['train_loss']:.5g}" for line in lines)]]
            print(*key, late(found[0]), flush=True)
            self.rows += found
            with PATH.open("w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([COLUMNS, *self.rows])
        return found[0]

    def tune(self, rho: float, clusters: str, weighting: str) -> float:
        tried: dict[int, float] = {}
        while steps := next_steps(tried):
            for step in steps:
                tried[step] = late(self.of(rho, clusters, weighting, TUNING_SEED, FIRST_RATE * 2.0**step))
        return FIRST_RATE * 2.0 ** best_step(tried)


def main() -> None:
    torch.set_num_threads(1)
    results, columns = Results(), ["rho_device", "clusters", "weighting", "rate", "loss", "times", "accuracy, %"]
    text = [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    for rho, clusters in product((0.5, 0.9), CLUSTERINGS):
        found: dict[str, list[list[Any]]] = {}
        for weighting in ("cluster", "sample"):
            lr = results.tune(rho, clusters, weighting)
            found[weighting] = rows = [results.of(rho, clusters, weighting, seed, lr) for seed in SEEDS]
            loss, accuracy = fmean(map(late, rows)), 100 * fmean(row[5] for row in rows)
            cells = [
                rho,
                clusters,
                weighting,
                f"{lr:g}",
                f"{loss:.3f}",
                times(rows, found["cluster"]),
                f"{accuracy:.1f}",
            ]
            text.append(f"| {' | '.join(map(str, cells))} |")
    print("\n".join(text))


def times(rows: list[list[Any]], others: list[list[Any]]) -> str:
    """The loss as a multiple of that of others: the geometric mean over seeds, which are paired, and its interval."""
    if rows is others:
        return "1"
    mean, low, high = interval([math.log(late(a) / late(b)) for a, b in zip(rows, others, strict=True)])
    return f"{math.exp(mean):.2f} ({math.exp(low):.2f} to {math.exp(high):.2f})"


if __name__ == "__main__":
    main()
