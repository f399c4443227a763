"""Which algorithms gain from cycling? Every algorithm, with one cluster and with ten, at three heterogeneities.

    FEDCLUSTER_DATA=... .venv/bin/python studies/algorithms.py        about 90 minutes on two cores

MNIST and the MLP on 100 devices of 500 samples, of which 20 take part in a round (with ten clusters two of ten at a
time), 20 steps of batch 30, 20 rounds. Every algorithm in every cell has its own best local.lr, with a worse rate on
either side, found on a seed that is not used for results; three other seeds give the result. An interrupted study
continues where it stopped. Writes docs/algorithms-study/: results.csv, losses.png and table.md, which is copied into
the README there.
"""

import argparse
import csv
import math
import shutil
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

from running import run

from fedcluster.algorithms.registry import ALGORITHMS
from fedcluster.analysis.jobs import Job
from fedcluster.analysis.tuning import best_step, next_steps, rate
from fedcluster.errors import Diverged
from fedcluster.experiment import Experiment
from fedcluster.figures import canvas, save
from fedcluster.training.executors.processes import cores

ROOT = Path(__file__).parent.parent
ROUNDS, SEEDS, TUNING_SEED = 20, (0, 1, 2), 1_000_003
COUNTS, RHOS = (1, 10), (0.1, 0.5, 0.9)
FIRST_RATE = 0.1  # of the search
SERVER_LR = {"avgm": 1.0, "adagrad": 0.03, "adam": 0.03, "yogi": 0.03}
ROWS: dict[str, dict[str, Any]] = {name: {"algorithm.name": name} for name in ALGORITHMS} | {
    f"server {name}": {"server.optimizer": name, "server.lr": lr} for name, lr in SERVER_LR.items()
}
ROWS["fednova"] |= {"local.steps": [10, 30]}
ROWS = {"fedavg, steps [10, 30]": {"local.steps": [10, 30]}} | ROWS

AT_RANDOM = math.log(10)  # cross-entropy of guessing one of ten classes
Cell = tuple[str, int, float]


def experiment(cell: Cell, lr: float, seed: int) -> Experiment:
    name, count, rho = cell
    base = Experiment(
        rounds=ROUNDS,
        data={"name": "mnist"},
        fleet={"devices": 100, "samples": 500, "rho_device": rho},
        clusters={"count": count, "participation": 0.2},
        model={"name": "mlp"},
    )
    return base.override(seed=seed, **{"local.lr": lr, **ROWS[name]})


def label(cell: Cell, lr: float, seed: int) -> str:
    name, count, rho = cell
    return (
        f"{name} M{count} rho{rho} lr{lr} seed{seed}".replace(", ", "_")
        .replace(" ", "_")
        .replace("[", "")
        .replace("]", "")
    )


def losses(jobs: dict[Any, Job], runs: Path, stage: str) -> dict[Any, tuple[float, float]]:
    """The last training loss (infinite where it is worse than guessing) and test accuracy of every job."""
    histories = run(jobs, runs, stage, cores())
    found = {}
    for key, job in jobs.items():
        shutil.rmtree(runs / job.name / "checkpoint", ignore_errors=True)  # device states are large
        lines = histories[key]
        last = {} if isinstance(lines, Diverged) else lines[-1]
        loss = last.get("train_loss", math.inf)
        found[key] = (loss if loss < AT_RANDOM else math.inf, last.get("test_accuracy", 0.0))
    return found


def tune(cells: list[Cell], runs: Path, stage: str) -> dict[Cell, float]:
    """Each cell's best rate, with a worse one on either side, on a seed that is not used for results."""
    found: dict[Cell, dict[int, float]] = {cell: {} for cell in cells}
    while wanted := [(cell, step) for cell, tried in found.items() for step in next_steps(tried)]:
        jobs = {
            (cell, step): Job(label(cell, lr, TUNING_SEED), experiment(cell, lr, TUNING_SEED))
            for cell, step in wanted
            for lr in [rate(FIRST_RATE, step)]
        }
        for (cell, step), (loss, _) in losses(jobs, runs, stage).items():
            found[cell][step] = loss
    return {cell: rate(FIRST_RATE, best_step(tried)) for cell, tried in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "algorithms-study")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "algorithms-study")
    parser.add_argument("--only", help="algorithms, separated by semicolons; default: all")
    arguments = parser.parse_args()
    names = arguments.only.split(";") if arguments.only else list(ROWS)
    cells: list[Cell] = list(product(names, COUNTS, RHOS))
    rows = []
    for name in names:  # one at a time, so that what is done is done
        mine = [cell for cell in cells if cell[0] == name]
        rates = tune(mine, arguments.runs, f"{name}: tuning")
        final = {
            (cell, seed): Job(label(cell, rates[cell], seed), experiment(cell, rates[cell], seed))
            for cell, seed in product(mine, SEEDS)
        }
        found = losses(final, arguments.runs, f"{name}: measuring")
        for cell in mine:
            for seed in SEEDS:
                loss, accuracy = found[cell, seed]
                rows.append([*cell, rates[cell], seed, round(loss, 6), round(accuracy, 4)])
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / "results.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["algorithm", "clusters", "rho_device", "lr", "seed", "train_loss", "test_accuracy"])
        writer.writerows(rows)
    plot(rows, arguments.out / "losses.png")
    (arguments.out / "table.md").write_text(table(rows))
    print(table(rows))


def cell_losses(rows: list[list[Any]], name: str, count: int, rho: float) -> tuple[list[float], float]:
    mine = [row for row in rows if row[:3] == [name, count, rho]]
    return [row[5] for row in mine], mine[0][3]


def table(rows: list[list[Any]]) -> str:
    """Loss after the last round with one cluster and with ten, and how many times lower the latter is."""
    lines = ["| algorithm | " + " | ".join(f"rho {rho}: M = 1 | M = 10 | ratio" for rho in RHOS) + " |"]
    lines.append("| --- |" + " --- |" * (3 * len(RHOS)))
    for name in dict.fromkeys(row[0] for row in rows):
        parts = []
        for rho in RHOS:
            (one, one_lr), (ten, ten_lr) = (cell_losses(rows, name, count, rho) for count in COUNTS)
            ratios = [a / b for a, b in zip(one, ten, strict=True) if math.isfinite(a) and math.isfinite(b)]
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""
            parts.append(f"{loss_text(one)} ({one_lr:g}) | {loss_text(ten)} ({ten_lr:g}) | {spread}")
        lines.append(f"| {name} | " + " | ".join(parts) + " |")
    return "\n".join(lines) + "\n"


def loss_text(found: list[float]) -> str:
    lost = sum(map(math.isinf, found))
    return f"diverges, {lost} of {len(found)}" if lost else f"{fmean(found):.3f}"


def plot(rows: list[list[Any]], path: Path) -> None:
    """Plot the median over seeds, with a line from the lowest to the highest."""
    names = list(dict.fromkeys(row[0] for row in rows))
    figure, axes = canvas(len(RHOS), 11, 0.32 * len(names) + 1.3)
    for ax, rho in zip(axes, RHOS, strict=True):
        for count, colour, marker, shift in ((1, "#D55E00", "o", -0.14), (10, "#0072B2", "s", 0.14)):
            for y, name in enumerate(names):
                found, _ = cell_losses(rows, name, count, rho)
                found = [min(loss, AT_RANDOM) for loss in found]
                ax.plot([min(found), max(found)], [y + shift] * 2, color=colour, lw=1.5)
                ax.plot(median(found), y + shift, marker, color=colour, ms=5, label=f"M = {count}" if y == 0 else None)
        ax.axvline(AT_RANDOM, color="#9a9a9a", lw=1, ls=":", label="a guess, or diverged")
        ax.set(xscale="log", title=f"rho_device = {rho}", xlabel=f"training loss after {ROUNDS} rounds")
        ax.set_yticks(range(len(names)), names if ax is axes[0] else [""] * len(names))
        ax.invert_yaxis()
        ax.grid(alpha=0.25, axis="x", which="both")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    save(figure, path)


if __name__ == "__main__":
    main()
