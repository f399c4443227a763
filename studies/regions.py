"""Where the night matters: what labels or features depend on the region, who is awake, and who is learned from.

    FEDCLUSTER_DATA=... .venv/bin/python studies/regions.py        about ten minutes of one core

MNIST with the MLP on 500 devices of 100 samples in the diurnal world, 50 updates wanted a round, five simulated days.
`fleet.partition = "regional"` with strength 1: labels that depend on the region, or pictures that are turned by up to
90 degrees. Every method has its own best `local.lr`, on a ladder of rates with a worse one on either side, on a seed
that is not used for results; three others give the result. The accuracy of a region is measured on the test set, with
the region's shares of the classes or turned as its pictures are, once an hour or after every cycle. Runs that are in
docs/clock-study/regions.csv are not repeated. Writes regions.csv, regions.md and regions.png there.
"""

import argparse
import csv
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

import fedcluster
from fedcluster.analysis.tuning import best_step, next_steps, rate
from fedcluster.data.partitions.by_feature import rotated
from fedcluster.data.partitions.regional import class_shares, degrees, regions
from fedcluster.errors import Diverged
from fedcluster.experiment import Experiment
from fedcluster.figures import canvas, save
from fedcluster.models.metrics import METRICS
from fedcluster.runs.metrics import Line
from fedcluster.runs.progress import Display
from fedcluster.state import State
from fedcluster.training.setup import Setup

ROOT = Path(__file__).parent.parent
DAYS, SEEDS, TUNING_SEED, FIRST_RATE = 5, range(3), 1_000_003, 0.3
CELLS = {"labels 1": ("labels", 1.0), "features 1": ("features", 1.0)}
ONE = {"clusters.method": "random", "clusters.count": 1}
SLIDING = {"server.optimizer": "round_momentum", "server.memory": "sliding"}
METHODS: dict[str, dict[str, Any]] = {
    "FedAvg, waits": ONE,
    "FedAvg, deadline 1 h": ONE | {"clock.deadline": 3600.0},
    "FedCluster by time zone, waits": {},
    "FedCluster by time zone, waits, round momentum": SLIDING,
    "FedCluster by time zone, deadline 2.4 h": {"clock.deadline": 2.4 * 3600},
    "FedCluster, deadline 2.4 h, round momentum": {"clock.deadline": 2.4 * 3600} | SLIDING,
}
COLOURS = ("#D55E00", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#5A5A5A")
COLUMNS = ("cell", "method", "seed", "days", "lr", "hours", "updates", "utc_offset", "devices", "accuracy")
Row = dict[str, Any]


def experiment(cell: str, method: str, lr: float, seed: int) -> Experiment:
    what, strength = CELLS[cell]
    base = Experiment(
        rounds=100_000,
        data={"name": "mnist"},
        fleet={
            "world": "diurnal",
            "devices": 500,
            "samples": 100,
            "partition": "regional",
            "what": what,
            "strength": strength,
        },
        clusters={"method": "timezone", "count": 10, "order": "cyclic"},
        model={"name": "mlp"},
        local={"steps": 20, "batch": 20},
        clock={},
    )
    return base.override(**METHODS[method]).override(seed=seed, **{"local.lr": lr})


class Regions(fedcluster.Callback):
    """Measures the accuracy of every region, at most once an hour, and ends the run after so many days."""

    def __init__(self, days: float) -> None:
        self.hours, self.next = 24 * days, 0.0
        self.found: list[tuple[float, list[float]]] = []  # hours, and the accuracy of every region

    def on_run_start(self, setup: Setup, state: State, history: list[Line]) -> None:
        offsets, data, options = setup.fleet.known.utc_offset, setup.dataset, setup.experiment.fleet.options
        assert offsets is not None
        assert data is not None
        self.setup, x, y = setup, data.x_test, data.y_test
        self.offsets = np.unique(offsets)
        region, ends = regions(offsets)
        self.devices = np.bincount(region)
        if options.what == "labels":  # what a region has of the classes
            self.parts = [(x[y == c], y[y == c]) for c in range(data.outputs)]
            self.shares = class_shares(ends, len(self.parts), options.strength)
        else:
            some = torch.arange(0, len(y), 10)
            self.parts = [(rotated(x[some], angle), y[some]) for angle in degrees(ends, options.strength)]
            self.shares = np.eye(len(self.parts))

    def on_cycle_end(self, line: Line, state: State) -> None:
        hours = line["simulated_seconds"] / 3600
        if self.next <= hours <= self.hours:
            measure, metrics = self.setup.evaluate.measure, [METRICS["accuracy"]]
            scores = [measure(state.model, x, y, metrics)["accuracy"] for x, y in self.parts]
            self.found.append((hours, (self.shares @ scores).tolist()))
            self.next = np.floor(hours) + 1

    def on_round_end(self, line: Line, state: State) -> None:
        self.updates = line["device_updates"]
        if line["simulated_seconds"] / 3600 >= self.hours:
            raise fedcluster.StopTraining


def rows_of(cell: str, method: str, lr: float, seed: int, days: float) -> list[Row]:
    """A run: the accuracy of every region over time. A run that diverges has a row without an accuracy."""
    watching, key = Regions(days), {"cell": cell, "method": method, "seed": seed, "days": days, "lr": lr}
    try:
        fedcluster.run(experiment(cell, method, lr, seed), display=Display(), callbacks=[watching])
    except Diverged:
        return [key | {"hours": 0, "accuracy": 0}]
    return [
        key
        | {"hours": round(hours, 2), "updates": watching.updates, "utc_offset": offset, "devices": n}
        | {"accuracy": round(accuracy, 4)}
        for hours, scores in watching.found
        for offset, n, accuracy in zip(watching.offsets.tolist(), watching.devices.tolist(), scores, strict=True)
    ]


class Results:
    """The runs of the study, kept in one file."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, list[Row]()
        if path.exists():
            with path.open(newline="") as file:
                self.rows = [{name: number(text) for name, text in row.items()} for row in csv.DictReader(file)]

    def of(self, cell: str, method: str, lr: float, seed: int, days: float = DAYS) -> list[Row]:
        key = [cell, method, seed, days, lr]
        found = [row for row in self.rows if [row[name] for name in COLUMNS[:5]] == key]
        if not found:
            print(f"{cell}: {method}, rate {lr:g}, seed {seed}", flush=True)
            found = rows_of(cell, method, lr, seed, days)
            found = thin(found)
            self.rows += found
            with self.path.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerows(self.rows)
        return found


def number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def thin(rows: list[Row]) -> list[Row]:
    """Every third hour of the last day, where there are more, and the last one before: the file is committed."""
    hours = sorted({row["hours"] for row in rows})
    first = max((hour for hour in hours if hour <= 24 * (DAYS - 1)), default=0.0)
    last = [hour for hour in hours if hour >= first]
    kept = {hour for before, hour in zip([-9.0, *last], last, strict=False) if int(hour / 3) > int(before / 3)}
    return [row for row in rows if row["hours"] in kept]


def last_day(rows: list[Row]) -> dict[float, tuple[float, float]]:
    """By region: its accuracy in the last day, on average over the hours and at the worst hour. What is measured less
    than once a day counts until it is measured again."""
    by_hour = sorted({row["hours"] for row in rows})
    end = 24 * rows[0]["days"]
    at = {float(hour): max((h for h in by_hour if h <= hour), default=None) for hour in np.arange(end - 24, end)}
    found = {}
    for offset in sorted({row.get("utc_offset", 0) for row in rows}):
        mine = {row["hours"]: row["accuracy"] for row in rows if row.get("utc_offset", 0) == offset}
        scores = [0.1 if hour is None else mine[hour] for hour in at.values()]
        found[offset] = fmean(scores), min(scores)
    return found


def mean_accuracy(rows: list[Row]) -> float:
    """The mean over devices in the last day."""
    scores, devices = last_day(rows), {row.get("utc_offset", 0): row.get("devices") or 1 for row in rows}
    total: float = sum(scores[offset][0] * n for offset, n in devices.items()) / sum(devices.values())
    return total


def tune(results: Results, cell: str, method: str) -> float:
    """The rate with the highest mean accuracy in the last day."""
    tried: dict[int, float] = {}
    while steps := next_steps(tried):
        for step in steps:
            rows = results.of(cell, method, rate(FIRST_RATE, step), TUNING_SEED)
            tried[step] = 1 - mean_accuracy(rows)
    return rate(FIRST_RATE, best_step(tried))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "clock-study")
    parser.add_argument("--cells", default=",".join(CELLS))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = Results(arguments.out / "regions.csv")
    found: dict[tuple[str, str], list[list[Row]]] = {}
    for cell in arguments.cells.split(","):
        for method in METHODS:
            lr = tune(results, cell, method)
            found[cell, method] = [results.of(cell, method, lr, seed) for seed in SEEDS]
    (arguments.out / "regions.md").write_text(table(found))
    print(table(found))
    plot(found, arguments.out / "regions.png")


def span(values: Iterable[float]) -> str:
    values = list(values)
    return f"{100 * fmean(values):.1f} ({100 * min(values):.1f} - {100 * max(values):.1f})"


def table(found: dict[tuple[str, str], list[list[Row]]]) -> str:
    rows = [
        "| depends on the region | method | rate | mean over devices, % | worst region | its worst hour | updates |"
    ]
    rows.append("| --- |" * 1 + " --- |" * 6)
    for (cell, method), runs in found.items():
        days = [last_day(run) for run in runs]
        means = span(map(mean_accuracy, runs))
        worst = span(min(mean for mean, _ in day.values()) for day in days)
        hour = span(min(least for _, least in day.values()) for day in days)
        updates = fmean(run[0]["updates"] for run in runs)
        rows.append(f"| {cell} | {method} | {runs[0][0]['lr']:g} | {means} | {worst} | {hour} | {updates:,.0f} |")
    return "\n".join(rows) + "\n"


def plot(found: dict[tuple[str, str], list[list[Row]]], path: Path) -> None:
    """Every region's accuracy in the last day, by its hours ahead of UTC: the mean of the seeds."""
    cells = list(dict.fromkeys(cell for cell, _ in found))
    figure, axes = canvas(len(cells), 5 * len(cells), 4.5)
    for ax, cell in zip(axes, cells, strict=True):
        for method, colour in zip(METHODS, COLOURS, strict=True):
            if (cell, method) not in found:
                continue
            days = [last_day(run) for run in found[cell, method]]
            offsets = sorted(set.intersection(*(set(day) for day in days)))
            means = [100 * fmean(day[offset][0] for day in days) for offset in offsets]
            ax.plot(offsets, means, "o-", color=colour, ms=3, lw=1.5, label=method)
        ax.set(title=f"{cell.split()[0]} depend on the region, strength {cell.split()[1]}")
        ax.set(xlabel="region: hours ahead of UTC", ylabel="accuracy in the fifth day (%)")
        ax.grid(alpha=0.25)
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside lower center", ncols=3)
    save(figure, path)


if __name__ == "__main__":
    main()
