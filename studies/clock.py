"""Simulated time to a good model: cycling through time zones against waiting for a fleet-wide cohort.

    .venv/bin/python studies/clock.py        about five minutes on one core

examples/timezones.toml: 500 devices of a diurnal world, 50 wanted a round. Every method has its own best local.lr from
one grid, by the simulated time to the target on a seed that is not used for results; three others give the result,
without drop-out and with 30 %. An interrupted study continues where it stopped. Writes docs/clock-study/: results.csv,
table.md and hours.png.
"""

import argparse
import csv
import math
from pathlib import Path
from statistics import fmean
from typing import Any

from running import run

from fedcluster.analysis.jobs import Job
from fedcluster.errors import Diverged
from fedcluster.experiment import Experiment, load
from fedcluster.figures import canvas, save
from fedcluster.runs.metrics import Line

ROOT = Path(__file__).parent.parent
TARGET, SEEDS, TUNING_SEED = 0.9, range(3), 1_000_003
GRID, DROPOUTS = (0.1, 0.3, 1.0), (0.0, 0.3)
ONE = {"clusters.method": "random", "clusters.count": 1}
METHODS: dict[str, dict[str, Any]] = {
    "FedAvg, waits for its fleet-wide cohort": ONE | {"rounds": 25},
    "FedCluster, 10 random clusters": {"clusters.method": "random", "rounds": 6},
    "FedCluster, 10 bands of time zones": {"rounds": 10},
    "FedAvg, takes who is free within 10 min": ONE | {"rounds": 60, "clock.deadline": 600.0},
}
COLOURS = ("#D55E00", "#56B4E9", "#0072B2", "#E69F00")


def experiment(method: str, lr: float, seed: int, dropout: float) -> Experiment:
    keys = METHODS[method] | {"local.lr": lr, "seed": seed, "clock.dropout": dropout}
    return load(ROOT / "examples" / "timezones.toml").override(**keys)


def hours(lines: list[Line] | Diverged) -> float:
    """Simulated hours until the test accuracy, measured after every round, reaches the target."""
    if isinstance(lines, Diverged):
        return math.inf
    reached = (line["simulated_seconds"] / 3600 for line in lines[1:] if line["test_accuracy"] >= TARGET)
    return next(reached, math.inf)


def job(method: str, lr: float, seed: int, dropout: float) -> Job:
    name = f"{list(METHODS).index(method)}-lr{lr}-seed{seed}-dropout{dropout}"
    return Job(name, experiment(method, lr, seed, dropout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "clock-study")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "clock-study")
    arguments = parser.parse_args()
    grid = {(method, lr): job(method, lr, TUNING_SEED, 0.0) for method in METHODS for lr in GRID}
    tuned = run(grid, arguments.runs, "tuning", workers=1)
    best = {method: min(GRID, key=lambda lr: hours(tuned[method, lr])) for method in METHODS}
    final = {
        (method, dropout, seed): job(method, best[method], seed, dropout)
        for dropout in DROPOUTS
        for method in METHODS
        for seed in SEEDS
    }
    found = run(final, arguments.runs, "measuring", workers=1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write(found, best, arguments.out)


def write(found: dict[Any, list[Line] | Diverged], best: dict[str, float], out: Path) -> None:
    keys = ("round", "aggregations", "device_updates", "dropped", "late", "simulated_seconds", "idle_seconds")
    with (out / "results.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["method", "dropout", "seed", "lr", "hours_to_target", *keys, "test_accuracy"])
        for (method, dropout, seed), lines in found.items():
            last = {} if isinstance(lines, Diverged) else lines[-1]
            row = [method, dropout, seed, best[method], round(hours(lines), 2), *(last.get(key) for key in keys)]
            writer.writerow([*row, last.get("test_accuracy")])
    (out / "table.md").write_text(table(found, best))
    print(table(found, best))
    plot(found, out / "hours.png")


def table(found: dict[Any, list[Line] | Diverged], best: dict[str, float]) -> str:
    """Hours to the target (mean and range over seeds) and hours per aggregation."""
    rows = [
        f"| method | rate | drop-out | hours to {TARGET:.0%} | from - to | hours an aggregation | updates until then |"
    ]
    rows.append("| --- |" + " --- |" * 6)
    for dropout in DROPOUTS:
        for method in METHODS:
            runs = [found[method, dropout, seed] for seed in SEEDS]
            spent = [hours(lines) for lines in runs]
            whole = [lines for lines in runs if not isinstance(lines, Diverged)]
            each = fmean(lines[-1]["simulated_seconds"] / 3600 / lines[-1]["aggregations"] for lines in whole)
            there = [line for lines in whole for line in lines[1:] if line["simulated_seconds"] / 3600 in spent]
            updates = f"{fmean(line['device_updates'] for line in there):,.0f}" if there else "-"
            mean = f"{fmean(spent):.1f}" if max(spent) < math.inf else f"> in {spent.count(math.inf)} of {len(spent)}"
            span = f"{min(spent):.1f} - {max(spent):.1f}"
            rows.append(f"| {method} | {best[method]:g} | {dropout:.0%} | {mean} | {span} | {each:.2f} | {updates} |")
    return "\n".join(rows) + "\n"


def plot(found: dict[Any, list[Line] | Diverged], path: Path) -> None:
    figure, axes = canvas(len(DROPOUTS), 11, 4.5)
    for ax, dropout in zip(axes, DROPOUTS, strict=True):
        for method, colour in zip(METHODS, COLOURS, strict=True):
            for seed in SEEDS:
                lines = found[method, dropout, seed]
                if not isinstance(lines, Diverged):
                    x = [line["simulated_seconds"] / 3600 for line in lines[1:]]
                    y = [100 * line["test_accuracy"] for line in lines[1:]]
                    ax.plot(x, y, color=colour, lw=1, alpha=0.8, label=method if seed == SEEDS[0] else None)
        ax.axhline(100 * TARGET, color="#5A5A5A", lw=1, ls="--")
        ax.set(xscale="log", xlabel="simulated hours", title=f"drop-out {dropout:.0%}", ylabel="test accuracy (%)")
        ax.grid(alpha=0.25)
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside lower center", ncols=4)
    save(figure, path)


if __name__ == "__main__":
    main()
