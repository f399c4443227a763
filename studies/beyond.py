"""What goes beyond the paper, and what each part is worth: momentum over a round, orders, schedules, and their rivals.

    FEDCLUSTER_DATA=... .venv/bin/python studies/beyond.py [--data mnist] [--rho 0.5,0.9] [--seeds 5]

MNIST with the MLP and CIFAR-10 with the CNN, 100 devices of 500 samples, of which 20 take part in a round: all at once
(M = 1), or two at a time in ten clusters (M = 10). 20 steps of batch 30, 40 rounds. Every method in every cell has its
own best `local.lr`, on a ladder of rates with a worse one on either side, and its own best variant (server rate, beta),
on a seed that is not used for results. Every method has the same number of device updates; bytes are in the table.
MNIST takes about an hour of two cores, CIFAR-10 about ten. Interrupted, it goes on where it stopped.

Writes docs/beyond-the-paper/: results.csv, losses.png and table.md, from all methods that are done.
"""

import argparse
import csv
import math
import shutil
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from running import run

from fedcluster.analysis.jobs import Job
from fedcluster.analysis.paper.claims import interval
from fedcluster.analysis.tuning import best_step, next_steps, rate
from fedcluster.errors import Diverged
from fedcluster.experiment import Experiment
from fedcluster.figures import canvas, save
from fedcluster.runs.metrics import Line
from fedcluster.training.executors.processes import cores

ROOT = Path(__file__).parent.parent
ROUNDS, TUNING_SEED, FIRST_RATE = 40, 1_000_003, 0.1
MODELS = {"mnist": "mlp", "cifar10": "cnn"}
ONE = {"clusters.count": 1}
SLIDING = {"server.optimizer": "round_momentum"}
Overrides = dict[str, Any]


def variants(key: str, values: tuple[Any, ...], **fixed: Any) -> list[Overrides]:
    return [{name.replace("__", "."): value for name, value in fixed.items()} | {key: value} for value in values]


BETAS = ([0.3, 0.99], [0.5, 0.99], [0.8, 0.99])
METHODS: dict[str, list[Overrides]] = {
    "FedCluster": [{}],
    "FedAvg": [ONE],
    "FedAvgM": [ONE | one for one in variants("server.lr", (0.3, 1.0), server__optimizer="avgm")],
    "FedAdam": [ONE | one for one in variants("server.lr", (0.01, 0.03, 0.1), server__optimizer="adam")],
    "SCAFFOLD, M = 1": [ONE | {"algorithm.name": "scaffold"}],
    "SCAFFOLD": [{"algorithm.name": "scaffold"}],
    "no clusters, small cohorts": [{"clusters.method": "redrawn"}],
    "server momentum (a cycle)": variants("server.betas", BETAS, server__optimizer="avgm"),
    "round momentum": [SLIDING | one for one in variants("server.betas", BETAS)],
    "round momentum, held": [SLIDING | {"server.memory": "held"} | one for one in variants("server.betas", BETAS)],
    "round momentum, no clusters": [
        SLIDING | {"clusters.method": "redrawn"} | one for one in variants("server.betas", BETAS)
    ],
    "GHBM (twice the download)": variants("algorithm.beta", (0.5, 0.9), algorithm__name="ghbm"),
    "LocalGHBM": variants("algorithm.beta", (0.5, 0.9), algorithm__name="local_ghbm"),
    "FedHBM": [{"algorithm.name": "fedhbm"}],
    "amplified": variants("server.lr", (1.3, 1.5), server__optimizer="amplified"),
    "order cyclic": [{"clusters.order": "cyclic"}],
    "order once": [{"clusters.order": "once"}],
    "order random": [{"clusters.order": "random"}],
    "order balanced": [{"clusters.order": "balanced"}],
    "cosine": [{"local.schedule.name": "cosine"}],
    "round momentum, cosine": [
        SLIDING | {"local.schedule.name": "cosine"} | one for one in variants("server.betas", BETAS)
    ],
}
Cell = tuple[str, str, float]  # method, data, rho_device


def experiment(cell: Cell, variant: int, lr: float, seed: int) -> Experiment:
    method, data, rho = cell
    base = Experiment(
        rounds=ROUNDS,
        data={"name": data},
        fleet={"devices": 100, "samples": 500, "rho_device": rho},
        clusters={"count": 10, "participation": 0.2},
        model={"name": MODELS[data]},
        local={"steps": 20, "batch": 30},
    )
    return base.override(**METHODS[method][variant]).override(seed=seed, **{"local.lr": lr})


def job(cell: Cell, variant: int, lr: float, seed: int) -> Job:
    method, data, rho = cell
    name = "".join(letter if letter.isalnum() else "-" for letter in method.lower())
    return Job(f"{data}-rho{rho}-{name}-v{variant}-lr{lr}-seed{seed}", experiment(cell, variant, lr, seed))


def run_jobs(jobs: dict[Any, Job], runs: Path, stage: str) -> dict[Any, list[Line] | None]:
    """The lines of every run; None for one that diverged or ended worse than it began."""
    histories = run(jobs, runs, stage, cores())
    found: dict[Any, list[Line] | None] = {}
    for key, one in jobs.items():
        shutil.rmtree(runs / one.name / "checkpoint", ignore_errors=True)
        lines = histories[key]
        failed = isinstance(lines, Diverged) or lines[-1]["train_loss"] > lines[0]["train_loss"]
        found[key] = None if failed else lines  # type: ignore[assignment]
    return found


def tune(cells: list[Cell], runs: Path, stage: str) -> dict[Cell, tuple[int, float]]:
    """The best variant of every cell and its rate, each variant at its own best rate."""
    tried: dict[tuple[Cell, int], dict[int, float]] = {
        (cell, variant): {} for cell in cells for variant in range(len(METHODS[cell[0]]))
    }
    while wanted := [(key, step) for key, losses in tried.items() for step in next_steps(losses)]:
        jobs = {(key, step): job(*key, rate(FIRST_RATE, step), TUNING_SEED) for key, step in wanted}
        for (key, step), lines in run_jobs(jobs, runs, stage).items():
            tried[key][step] = math.inf if lines is None else lines[-1]["train_loss"]
    best = {}
    for cell in cells:
        mine = {key: min(losses.values()) for key, losses in tried.items() if key[0] == cell}
        key = min(mine, key=lambda key: mine[key])
        best[cell] = key[1], rate(FIRST_RATE, best_step(tried[key]))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "beyond")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "beyond-the-paper")
    parser.add_argument("--data", default=",".join(MODELS))
    parser.add_argument("--rho", default="0.1,0.5,0.9")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", help="methods, separated by semicolons; default: all")
    arguments = parser.parse_args()
    methods = arguments.only.split(";") if arguments.only else list(METHODS)
    rows: list[list[Any]] = []
    for data, method in product(arguments.data.split(","), methods):
        cells = [(method, data, float(rho)) for rho in arguments.rho.split(",")]
        best = tune(cells, arguments.runs, f"{data}, {method}: tuning")
        jobs = {(cell, seed): job(cell, *best[cell], seed) for cell in cells for seed in range(arguments.seeds)}
        for (cell, seed), lines in run_jobs(jobs, arguments.runs, f"{data}, {method}: measuring").items():
            variant, lr = best[cell]
            chosen = " ".join(f"{key}={value}" for key, value in METHODS[method][variant].items())
            last, losses = (lines[-1], [line["train_loss"] for line in lines[1:]]) if lines else ({}, [math.inf])
            numbers = [last.get("train_loss", math.inf), fmean(losses), last.get("test_accuracy", 0.0)]
            rows.append(
                [data, cell[2], method, chosen, lr, seed, *numbers, last.get("bytes_down", 0), last.get("bytes_up", 0)]
            )
        write(rows, arguments.out)
    print((arguments.out / "table.md").read_text())


def write(rows: list[list[Any]], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with (out / "results.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        names = (
            "data",
            "rho_device",
            "method",
            "variant",
            "lr",
            "seed",
            "train_loss",
            "mean_train_loss",
            "test_accuracy",
        )
        writer.writerow([*names, "bytes_down", "bytes_up"])
        writer.writerows(rows)
    (out / "table.md").write_text(table(rows))
    plot(rows, out / "losses.png")


def losses_of(rows: list[list[Any]], data: str, rho: float, method: str) -> list[float]:
    return [row[6] for row in rows if row[:3] == [data, rho, method]]


def table(rows: list[list[Any]]) -> str:
    """The last training loss by method, and by how many percent it is below FedCluster's, seed by seed, with the 95 %
    interval of the mean."""
    text = ""
    for data in dict.fromkeys(row[0] for row in rows):
        rhos = list(dict.fromkeys(row[1] for row in rows if row[0] == data))
        text += (
            f"{data}\n\n| method | "
            + " | ".join(f"rho {rho}: loss | below FedCluster, % | lr" for rho in rhos)
            + " |\n"
        )
        text += "| --- |" + " --- | --- | --- |" * len(rhos) + "\n"
        for method in dict.fromkeys(row[2] for row in rows if row[0] == data):
            cells = []
            for rho in rhos:
                mine, plain = losses_of(rows, data, rho, method), losses_of(rows, data, rho, "FedCluster")
                lr = next(row[4] for row in rows if row[:3] == [data, rho, method])
                if not all(map(math.isfinite, mine)):
                    cells.append(f"diverges | | {lr:g}")
                    continue
                gains = [100 * (1 - a / b) for a, b in zip(mine, plain, strict=False)]
                mean, low, high = interval(gains)
                gain = "" if method == "FedCluster" else f"{mean:.0f} ({low:.0f} to {high:.0f})"
                cells.append(f"{fmean(mine):.4f} | {gain} | {lr:g}")
            text += f"| {method} | " + " | ".join(cells) + " |\n"
        text += "\n"
    return text


def plot(rows: list[list[Any]], path: Path) -> None:
    """Every method's loss at every rho_device: the mean of the seeds, and a line from the lowest to the highest."""
    panels = list(dict.fromkeys((row[0], row[1]) for row in rows))
    methods = list(dict.fromkeys(row[2] for row in rows))
    figure, axes = canvas(len(panels), 4 + 2.6 * len(panels), 0.3 * len(methods) + 1.3)
    for ax, (data, rho) in zip(axes, panels, strict=True):
        for y, method in enumerate(methods):
            mine = [loss for loss in losses_of(rows, data, rho, method) if math.isfinite(loss)]
            if mine:
                colour = "#0072B2" if method == "FedCluster" else "#D55E00" if "momentum" in method else "#5A5A5A"
                ax.plot([min(mine), max(mine)], [y, y], color=colour, lw=1.5)
                ax.plot(fmean(mine), y, "o", color=colour, ms=5)
        ax.set(xscale="log", title=f"{data}, rho_device = {rho}", xlabel=f"training loss after {ROUNDS} rounds")
        ax.set_yticks(range(len(methods)), methods if ax is axes[0] else [""] * len(methods))
        ax.invert_yaxis()
        ax.grid(alpha=0.25, axis="x", which="both")
    save(figure, path)


if __name__ == "__main__":
    main()
