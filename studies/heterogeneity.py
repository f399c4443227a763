"""Does H_cluster decide the speed? Six clusterings of the same fleets, at two heterogeneities, on two data sets.

    FEDCLUSTER_DATA=... .venv/bin/python studies/heterogeneity.py        about an hour on two cores

MNIST with the MLP and CIFAR-10 with the CNN, 100 devices of 500 samples in ten clusters. All devices of a cluster take
part, as in the theorem. All clusterings of a cell have the same learning rate (the theorem's does not depend on them
either): the best of a grid for random clusters, on a seed that is not used for results, or the largest below it at
which no run diverges. Five other seeds give the result. H_cluster is measured at W_0, which is the same for all
clusterings of a seed. The target of a cell is the highest of its runs' lowest training losses, so that every run
reaches it; clusterings with a run that ends higher than it started have learned nothing and are left out of it. Rounds
are interpolated.

An interrupted study continues where it stopped. --quick has a small fleet and three rounds, to check that everything
works.
Writes docs/heterogeneity-study/: results.csv, speed.png and table.md.
"""

import argparse
import csv
import json
import math
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from running import run
from scipy import stats

from fedcluster.allocator import keep_memory
from fedcluster.analysis.heterogeneity import estimated
from fedcluster.analysis.jobs import Job
from fedcluster.analysis.paper.claims import interval, rounds_to
from fedcluster.data import sources
from fedcluster.errors import Diverged
from fedcluster.experiment import Experiment
from fedcluster.figures import canvas, save
from fedcluster.files import write_atomically
from fedcluster.fleet import fleet
from fedcluster.fleet.clustering import clusters
from fedcluster.runs.progress import Display, default_display
from fedcluster.training.executors.processes import cores
from fedcluster.training.sketches import COPIES
from fedcluster.training.survey import gradient_sketches
from fedcluster.training.trainer import build_model

ROOT = Path(__file__).parent.parent
SEEDS, TUNING_SEED, RHOS = (0, 1, 2, 3, 4), 1_000_003, (0.5, 0.9)
CLUSTERINGS: dict[str, dict[str, Any]] = {
    "balanced": {"clusters.method": "balanced"},
    "random": {"clusters.method": "random"},
    "major_class 0.1": {"clusters.method": "major_class", "clusters.rho_cluster": 0.1},
    "major_class 0.5": {"clusters.method": "major_class", "clusters.rho_cluster": 0.5},
    "major_class 0.9": {"clusters.method": "major_class", "clusters.rho_cluster": 0.9},
    "similar": {"clusters.method": "similar"},
}
COLOURS = ("#0072B2", "#5A5A5A", "#56B4E9", "#009E73", "#E69F00", "#D55E00")
DATA: dict[str, dict[str, Any]] = {
    "mnist": {"model": "mlp", "rounds": 40, "steps": 10, "grid": (0.01, 0.03, 0.1, 0.3)},
    "cifar10": {"model": "cnn", "rounds": 15, "steps": 5, "grid": (0.01, 0.03, 0.1, 0.3)},
}
QUICK: dict[str, Any] = {"rounds": 3, "fleet.devices": 20, "fleet.samples": 60}

Cell = tuple[str, float]
Row = dict[str, Any]


def experiment(cell: Cell, name: str, lr: float, seed: int, quick: bool) -> Experiment:
    data, rho = cell
    base = Experiment(
        rounds=DATA[data]["rounds"],
        data={"name": data},
        fleet={"devices": 100, "samples": 500, "rho_device": rho},
        clusters={"count": 10, "participation": 1.0},
        model={"name": DATA[data]["model"]},
        local={"steps": DATA[data]["steps"], "batch": 30},
    )
    return base.override(seed=seed, **{"local.lr": lr, **CLUSTERINGS[name], **(QUICK if quick else {})})


def losses(jobs: dict[Any, Job], runs: Path, stage: str) -> dict[Any, list[float]]:
    """The training loss of every job at the start and after every round; infinite for a run that diverged."""
    return {
        key: [math.inf] if isinstance(lines, Diverged) else [line["train_loss"] for line in lines]
        for key, lines in run(jobs, runs, stage, cores()).items()
    }


def heterogeneity(cell: Cell, seed: int, quick: bool, runs: Path, display: Display) -> dict[str, list[float]]:
    """H_cluster of every clustering at W_0, its standard error, and H_device, from one pass over the fleet; cached."""
    kept = runs / f"{cell[0]}-rho{cell[1]}-seed{seed}-heterogeneity.json"
    if kept.exists():
        found: dict[str, list[float]] = json.loads(kept.read_text())
        return found
    described = {name: experiment(cell, name, 0.01, seed, quick) for name in CLUSTERINGS}
    one = described["random"]
    dataset = sources.open_dataset(one.data)
    everyone, partition = fleet.build(one.fleet, dataset, seed)
    flat_model = build_model(one, dataset)
    sketches = gradient_sketches([flat_model], flat_model.w.clone(), dataset, partition, one.local, seed, display.track)
    found = {}
    for name, each in described.items():
        groups = clusters.build(each.clusters, everyone, seed)
        cut, errors = estimated(sketches, COPIES, everyone.weights, groups)
        found[name] = [cut.cluster, errors["cluster"].error, cut.device]
    runs.mkdir(parents=True, exist_ok=True)
    write_atomically(kept, json.dumps(found))
    return found


def measure(cell: Cell, seeds: tuple[int, ...], quick: bool, runs: Path, display: Display) -> list[Row]:
    """The results for one data set at one rho_device."""
    data, rho = cell
    where = f"{data} rho {rho}"
    grid = {
        lr: Job(f"{data}-rho{rho}-random-lr{lr}-tuning", experiment(cell, "random", lr, TUNING_SEED, quick))
        for lr in DATA[data]["grid"]
    }
    tuned = losses(grid, runs, f"{where}: tuning")
    best = min(grid, key=lambda rate: tuned[rate][-1])
    for lr in [rate for rate in sorted(grid, reverse=True) if rate <= best]:
        jobs = {
            (name, seed): Job(
                f"{data}-rho{rho}-{name.replace(' ', '')}-lr{lr}-seed{seed}", experiment(cell, name, lr, seed, quick)
            )
            for seed, name in product(seeds, CLUSTERINGS)
        }
        curves = losses(jobs, runs, f"{where}: measuring at {lr:g}")
        if all(math.isfinite(curve[-1]) for curve in curves.values()):
            break
    lost = {name for (name, _), curve in curves.items() if curve[-1] > curve[0]}
    target = max(min(curve) for (name, _), curve in curves.items() if name not in lost)
    rows: list[Row] = []
    for seed in seeds:
        apart = heterogeneity(cell, seed, quick, runs, display)
        for name in CLUSTERINGS:
            H, error, H_device = apart[name]
            curve = curves[name, seed]
            rows.append(
                {
                    "data": data,
                    "rho_device": rho,
                    "clusters": name,
                    "seed": seed,
                    "lr": lr,
                    "H_cluster": H,
                    "H_error": error,
                    "H_device": H_device,
                    "target": target,
                    "rounds": rounds_to(curve, target),
                    "last_loss": curve[-1],
                }
            )
    return rows


def spread(values: list[float]) -> str:
    """The mean over seeds and half the width of its 95 % interval (Student's t)."""
    if not all(map(math.isfinite, values)):
        return "never in " + str(sum(not math.isfinite(value) for value in values))
    mean, _, high = interval(values)
    return f"{mean:.3g} ± {high - mean:.2g}"


def agreement(rows: list[Row]) -> list[float]:
    """Spearman's rank correlation of H_cluster and rounds over the clusterings, for each seed."""
    found = []
    for seed in dict.fromkeys(row["seed"] for row in rows):
        mine = [row for row in rows if row["seed"] == seed]
        found.append(float(stats.spearmanr([r["H_cluster"] for r in mine], [r["rounds"] for r in mine]).statistic))
    return found


def by_cell(rows: list[Row]) -> dict[Cell, list[Row]]:
    cells: dict[Cell, list[Row]] = {}
    for row in rows:
        cells.setdefault((row["data"], row["rho_device"]), []).append(row)
    return cells


def table(rows: list[Row]) -> str:
    """H_cluster and rounds to the target of each clustering, and their rank correlation."""
    lines = []
    for (data, rho), cell in by_cell(rows).items():
        found = agreement(cell)
        lines += [
            f"**{data}, rho_device = {rho}**: learning rate {cell[0]['lr']:g}, target loss {cell[0]['target']:.4f}, "
            f"H_device {fmean(row['H_device'] for row in cell):.3g}; rank correlation of H_cluster and rounds "
            f"{spread(found)} (by seed: {', '.join(f'{value:.2f}' for value in found)})",
            "",
            "| clusters | H_cluster | rounds to the target | last loss |",
            "| --- | --- | --- | --- |",
        ]
        for name in CLUSTERINGS:
            mine = [row for row in cell if row["clusters"] == name]
            parts = [spread([row[key] for row in mine]) for key in ("H_cluster", "rounds", "last_loss")]
            lines.append(f"| {name} | " + " | ".join(parts) + " |")
        lines.append("")
    return "\n".join(lines)


def plot(rows: list[Row], path: Path) -> None:
    """Plot rounds to the target over H_cluster, one dot for each run."""
    cells = by_cell(rows)
    figure, axes = canvas(len(cells), 1 + 3.4 * len(cells), 3.9)
    for ax, ((data, rho), cell) in zip(axes, cells.items(), strict=True):
        never = 1.1 * DATA[data]["rounds"]
        if any(row["rounds"] > never for row in cell):
            ax.axhline(never, color="#999999", lw=0.8, ls=":")
            ax.annotate("never", (0.02, never), xycoords=("axes fraction", "data"), va="bottom", fontsize=8)
        for (name, colour), marker in zip(zip(CLUSTERINGS, COLOURS, strict=True), "os^vDP", strict=True):
            mine = [row for row in cell if row["clusters"] == name]
            x, y = [row["H_cluster"] for row in mine], [min(row["rounds"], never) for row in mine]
            ax.plot(x, y, marker, color=colour, ms=5, alpha=0.75, label=name)
        rank = fmean(agreement(cell))
        ax.set(
            title=f"{data}, rho_device {rho}\nrank correlation {rank:.2f}", xscale="log", xlabel="H_cluster at $W_0$"
        )
        ax.grid(alpha=0.25)
    axes[0].set_ylabel("rounds to the target loss")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=6 if len(cells) > 2 else 3, frameon=False, fontsize=9
    )
    save(figure, path)


def main() -> None:
    keep_memory()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "heterogeneity-study")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "heterogeneity-study")
    parser.add_argument("--only", choices=list(DATA), help="one of the data sets; default: both")
    parser.add_argument("--quick", action="store_true", help="a small fleet, three rounds, two seeds")
    arguments = parser.parse_args()
    seeds = SEEDS[:2] if arguments.quick else SEEDS
    rows: list[Row] = []
    for cell in product([arguments.only] if arguments.only else DATA, RHOS):
        rows += measure(cell, seeds, arguments.quick, arguments.runs, default_display())
        write(rows, arguments.out)
    print(table(rows))


def write(rows: list[Row], out: Path) -> None:
    """Write the results so far."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    plot(rows, out / "speed.png")
    (out / "table.md").write_text(table(rows))


if __name__ == "__main__":
    main()
