"""The tables and pictures of studies/beyond.py, from its tuning.csv and results.csv.

A loss is given as a multiple of FedCluster's: the geometric mean over seeds, which are paired, and its 95 % interval
(Student's, of the logarithms). The target is FedCluster's mean last loss in the cell.
"""

import csv
from collections.abc import Callable, Sequence
from math import exp, inf, isfinite, log
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from fedcluster.analysis.paper.claims import interval, rounds_to
from fedcluster.figures import canvas, save
from fedcluster.runs.plots import log_ticks

TUNING = ("data", "rho_device", "method", "second", "lr", "train_losses")
RESULTS = (
    *("data", "rho_device", "method", "seed", "second", "lr", "test_accuracy", "mean_test_accuracy"),
    *("bytes_down", "bytes_up", "train_losses"),
)
WORDS = {"data", "method", "second", "train_losses"}
PLAIN = "FedCluster"
SHOWN = {
    PLAIN: "#0072B2",
    "round momentum": "#D55E00",
    "LocalGHBM": "#009E73",
    "FedAdam, M = 1": "#CC79A7",
    "FedAvg": "#5A5A5A",
}
NAMES = {"mnist": "MNIST, MLP", "cifar10": "CIFAR-10, CNN"}
BEGIN, END = "<!-- from studies/beyond.py -->\n", "<!-- end -->\n"


class Run(NamedTuple):
    """A row of results.csv. `losses` are those of all rounds; none for a run that diverged."""

    data: str
    rho: float
    method: str
    seed: int
    second: str
    lr: float
    accuracy: float
    mean_accuracy: float
    down: float
    up: float
    losses: list[float]

    @property
    def last(self) -> float:
        return self.losses[-1] if self.losses else inf

    @property
    def late(self) -> float:
        return late_loss(self.losses)

    @property
    def mean(self) -> float:
        return fmean(self.losses) if self.losses else inf


Cell = dict[str, list[Run]]
"""The runs of a data set and a heterogeneity, by method."""


def read(path: Path) -> list[tuple[Any, ...]]:
    """The rows of a file, with numbers as numbers."""
    with path.open(newline="") as file:
        rows = csv.reader(file)
        columns = next(rows)
        convert = [str if column in WORDS else int if column == "seed" else float for column in columns]
        return [tuple(kind(cell) for kind, cell in zip(convert, row, strict=True)) for row in rows]


def losses(text: str) -> list[float]:
    """The losses of all rounds, from how they are written."""
    return [float(loss) for loss in text.split()]


def late_loss(losses: list[float]) -> float:
    """The mean loss of the last ten rounds; infinite for a run that diverged."""
    return fmean(losses[-10:]) if losses else inf


def write(folder: Path, methods: Sequence[str]) -> None:
    """All tables, into README.md, and the pictures, of the cells in which FedCluster and others are done."""
    runs = [Run._make((*row[:-1], losses(row[-1]))) for row in read(folder / "results.csv")]
    chosen = {run[:3]: (run.second, run.lr) for run in runs}  # a cell that was tuned again has older rows
    cells: dict[tuple[str, float], Cell] = {}
    for run in sorted(runs, key=lambda run: (run.data != "mnist", run.rho, methods.index(run.method), run.seed)):
        if (run.second, run.lr) == chosen[run[:3]]:
            cells.setdefault((run.data, run.rho), {}).setdefault(run.method, []).append(run)
    cells = {place: cell for place, cell in cells.items() if PLAIN in cell and len(cell) > 1}
    text = "\n".join(table(*place, cell) for place, cell in cells.items())
    path = folder / "README.md"
    before, _, rest = path.read_text().partition(BEGIN)
    path.write_text(before + BEGIN + "\n" + text + "\n" + END + rest.partition(END)[2])
    plot_gains(cells, methods, folder / "gains.png")
    plot_curves(cells, folder / "curves.png")


def table(data: str, rho: float, cell: Cell) -> str:
    target = fmean(run.last for run in cell[PLAIN])
    lines = [
        f"**{NAMES[data]}, rho_device = {rho:g}**; target: a training loss of {target:.3g}",
        "",
        "| method | rate | last loss | times FedCluster's | last 10 rounds | all rounds | accuracy, % | rounds | GB |",
        "|" + " --- |" * 9,
    ]
    for method, runs in cell.items():
        second = runs[0].second.rpartition("=")[2]
        name = f"{method}, {second}" if second else method
        if not all(run.losses for run in runs):
            lines.append(f"| {name} | {runs[0].lr:g} | diverges | | | | | | |")
            continue
        scores: list[Callable[[Run], float]] = [lambda run: run.last, lambda run: run.late, lambda run: run.mean]
        last, late, whole = (multiple(runs, cell[PLAIN], score) for score in scores)
        accuracy = fmean(run.accuracy for run in runs)
        few = "" if len(runs) > 3 else f" ({len(runs)} seed{'s' * (len(runs) > 1)})"
        lines.append(
            f"| {name}{few} | {runs[0].lr:g} | {fmean(run.last for run in runs):.3g} | {last} | {late} | {whole} "
            f"| {100 * accuracy:.1f} | {reached(runs, target)} | {(runs[0].down + runs[0].up) / 1e9:.2f} |"
        )
    return "\n".join(lines) + "\n"


def ratio(runs: list[Run], plain: list[Run], score: Callable[[Run], float]) -> tuple[float, float, float]:
    """Our loss over FedCluster's, on the seeds that both have: the geometric mean and its interval."""
    theirs = {run.seed: score(run) for run in plain}
    mean, low, high = interval([log(score(run) / theirs[run.seed]) for run in runs if run.seed in theirs])
    return exp(mean), exp(low), exp(high) if isfinite(high) else inf


def multiple(runs: list[Run], plain: list[Run], score: Callable[[Run], float]) -> str:
    if runs is plain:
        return "1"
    mean, low, high = ratio(runs, plain, score)
    return f"{mean:.2f} ({low:.2f} to {high:.2f})" if len(runs) > 1 else f"{mean:.2f}"


def reached(runs: list[Run], target: float) -> str:
    """The median number of rounds to the target; how many seeds reach it, where it is not all."""
    rounds = [rounds_to([inf, *run.losses], target) for run in runs]
    rounds = [one if isfinite(one) else inf for one in rounds]
    there = sum(map(isfinite, rounds))
    if not there:
        return "never"
    middle = f"{median(rounds):.0f}" if isfinite(median(rounds)) else "-"
    return middle if there == len(runs) else f"{middle} ({there} of {len(runs)})"


def plot_gains(cells: dict[tuple[str, float], Cell], methods: Sequence[str], path: Path) -> None:
    """The loss of every method in the last ten rounds over FedCluster's: the mean over seeds and its interval."""
    names = [name for name in methods if any(name in cell for cell in cells.values()) and name != PLAIN]
    figure, axes = canvas(len(cells), 2.6 + 2.7 * len(cells), 0.29 * len(names) + 1.2)
    for ax, ((data, rho), cell) in zip(axes, cells.items(), strict=True):
        ax.axvline(1, color=SHOWN[PLAIN], lw=1.5)
        for y, name in enumerate(names):
            runs = cell.get(name, [])
            if not runs or not all(run.losses for run in runs):
                continue
            mean, low, high = ratio(runs, cell[PLAIN], lambda run: run.late)
            colour = SHOWN["round momentum"] if "momentum" in name or "HBM" in name else SHOWN["FedAvg"]
            if len(runs) > 1:
                ax.plot([low, high], [y, y], color=colour, lw=1.5)
            ax.plot(mean, y, "o", color=colour, ms=5)
        ax.set(xscale="log", title=f"{NAMES[data]}\nrho_device = {rho:g}", xlim=(0.2, 45))
        log_ticks(ax.xaxis, (1, 2, 5))
        ax.set_yticks(range(len(names)), names if ax is axes[0] else [""] * len(names))
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.grid(alpha=0.25, axis="x")
    figure.supxlabel(
        "training loss of the last ten rounds, as a multiple of FedCluster's (left of the line: lower)", fontsize=10
    )
    save(figure, path)


def plot_curves(cells: dict[tuple[str, float], Cell], path: Path) -> None:
    """The training loss over rounds of a few methods: the mean over seeds, a band from the lowest to the highest."""
    columns, rows = min(2, len(cells)), -(-len(cells) // 2)
    figure, axes = canvas(columns, 4.5 * columns, 3.2 * rows + 0.4, rows=rows)
    for ax in axes[len(cells) :]:
        ax.set_visible(False)
    for ax, ((data, rho), cell) in zip(axes, cells.items(), strict=False):
        for name, colour in SHOWN.items():
            curves = np.array([run.losses for run in cell.get(name, []) if run.losses])
            if not len(curves):
                continue
            rounds = np.arange(1, curves.shape[1] + 1)
            ax.plot(rounds, curves.mean(axis=0), color=colour, lw=1.8, label=name)
            ax.fill_between(rounds, curves.min(axis=0), curves.max(axis=0), color=colour, alpha=0.15, lw=0)
        ax.set(yscale="log", title=f"{NAMES[data]}, rho_device = {rho:g}", xlabel="rounds")
        log_ticks(ax.yaxis, (1, 2, 5))
        ax.grid(alpha=0.25)
    for ax in axes[::columns]:
        ax.set_ylabel("training loss")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    save(figure, path)
