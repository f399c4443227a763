"""Overlapping cycles: at what staleness is FedCluster faster than FedAvg, and still better per update?

    .venv/bin/python studies/overlap.py        about two minutes of one core; --data mnist: about ten

Digits (or MNIST) with the MLP, 100 devices that are always free, with log-normal speeds of computing and of links,
20 updates wanted a round: all at once (FedAvg), or two at a time in ten clusters with `clusters.overlap` d. Every
method has its own best `local.lr`, on a ladder of rates with a worse one on either side, on a seed that is not used for
results; three others give the result. Runs that are in docs/overlap-study/digits.csv (or mnist.csv) are not repeated.
Writes digits.csv and digits.png there, and prints the table of its README.
"""

import argparse
import csv
import math
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

import fedcluster
from fedcluster.analysis.tuning import best_step, next_steps, rate
from fedcluster.errors import Diverged
from fedcluster.experiment import Experiment
from fedcluster.figures import canvas, save
from fedcluster.rng import stream
from fedcluster.runs.progress import Display

ROOT = Path(__file__).parent.parent
ROUNDS, SEEDS, TUNING_SEED, FIRST_RATE, DEVICES = 16, range(3), 1_000_003, 0.1, 100
AT_RANDOM = math.log(10)
RHOS = (0.5, 0.9)
SAMPLES = {"digits": 100, "mnist": 500}
METHODS: dict[str, dict[str, Any]] = {
    "FedAvg": {"count": 1},
    "FedCluster, d = 0": {"count": 10},
    "FedCluster, d = 1": {"count": 10, "overlap": 1},
    "FedCluster, d = 4": {"count": 10, "overlap": 4},
    "FedCluster, d = 9": {"count": 10, "overlap": 9},
    "FedCluster, d = 2": {"count": 10, "overlap": 2},
}
SHOWN = ["FedAvg", *(f"FedCluster, d = {d}" for d in (0, 1, 2, 4, 9))]
COLOURS = ("#D55E00", "#003A5D", "#0072B2", "#009E73", "#56B4E9", "#CC79A7")
COLUMNS = ("rho", "method", "seed", "lr", "round", "seconds", "updates", "train_loss", "test_accuracy")
Row = dict[str, Any]


def fleet_file(folder: Path) -> Path:
    """Devices as in `fleet.world = "diurnal"`, free at all times."""
    rng, path = stream(0, "world"), folder / "fleet.csv"
    columns = (0.005 * np.exp(rng.normal(0, 0.6, DEVICES)), 20 * np.exp(rng.normal(0, 0.8, DEVICES)))
    up = 5 * np.exp(rng.normal(0, 0.8, DEVICES))
    lines = [f"{k},{a:.6f},{b:.3f},{c:.3f}" for k, (a, b, c) in enumerate(zip(*columns, up, strict=True))]
    path.write_text("\n".join(["device,seconds_per_sample,down_mbps,up_mbps", *lines]) + "\n")
    return path


def rows_of(data: str, rho: float, method: str, lr: float, seed: int) -> list[Row]:
    """A run, round by round. A run that diverges has one row with an infinite loss."""
    key = {"rho": rho, "method": method, "seed": seed, "lr": lr}
    with tempfile.TemporaryDirectory() as folder:
        described = Experiment(
            rounds=ROUNDS,
            seed=seed,
            data={"name": data},
            fleet={"path": str(fleet_file(Path(folder))), "samples": SAMPLES[data], "rho_device": rho},
            clusters={"participation": 0.2} | METHODS[method],
            model={"name": "mlp"},
            local={"steps": 20, "batch": 30, "lr": lr},
            clock={},
        )
        try:
            history = fedcluster.run(described, display=Display()).history
        except Diverged:
            return [key | {"round": 0, "seconds": 0, "updates": 0, "train_loss": math.inf, "test_accuracy": 0}]
    names = {"round": "round", "seconds": "simulated_seconds", "updates": "device_updates"}
    scores = {"train_loss": "train_loss", "test_accuracy": "test_accuracy"}
    return [key | {ours: line[name] for ours, name in (names | scores).items()} for line in history]


class Results:
    """The runs of the study, kept in one file."""

    def __init__(self, path: Path, data: str) -> None:
        self.path, self.data, self.rows = path, data, list[Row]()
        if path.exists():
            with path.open(newline="") as file:
                for row in csv.DictReader(file):
                    self.rows.append({name: row[name] if name == "method" else float(row[name]) for name in COLUMNS})

    def of(self, rho: float, method: str, lr: float, seed: int) -> list[Row]:
        found = [row for row in self.rows if [row[name] for name in COLUMNS[:4]] == [rho, method, seed, lr]]
        if not found:
            print(f"rho {rho}: {method}, rate {lr:g}, seed {seed}", flush=True)
            found = rows_of(self.data, rho, method, lr, seed)
            self.rows += found
            with self.path.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerows(self.rows)
        return found


def tune(results: Results, rho: float, method: str) -> float:
    """The rate with the lowest last training loss. A run that ends worse than guessing counts as diverged."""
    tried: dict[int, float] = {}
    while steps := next_steps(tried):
        for step in steps:
            loss = results.of(rho, method, rate(FIRST_RATE, step), TUNING_SEED)[-1]["train_loss"]
            tried[step] = loss if loss < AT_RANDOM else math.inf
    return rate(FIRST_RATE, best_step(tried))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "overlap-study")
    parser.add_argument("--data", default="digits", choices=SAMPLES)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = Results(arguments.out / f"{arguments.data}.csv", arguments.data)
    found: dict[tuple[float, str], list[list[Row]]] = {}
    for method in METHODS:
        for rho in RHOS:
            lr = tune(results, rho, method)
            found[rho, method] = [results.of(rho, method, lr, seed) for seed in SEEDS]
    print(table(found))
    plot(found, arguments.out / f"{arguments.data}.png")


def minutes_to(runs: list[list[Row]], losses: list[float]) -> list[float]:
    """Simulated minutes until each run has the loss that belongs to its seed, between rounds in proportion; infinite
    where it never has."""
    found = []
    for run, loss in zip(runs, losses, strict=True):
        found.append(math.inf)
        for before, row in zip([run[0] | {"seconds": 0.0}, *run], run, strict=False):
            if row["train_loss"] <= loss:
                share = (before["train_loss"] - loss) / max(before["train_loss"] - row["train_loss"], 1e-12)
                share = min(max(share, 0.0), 1.0) if row is not run[0] else 1.0
                found[-1] = (before["seconds"] + share * (row["seconds"] - before["seconds"])) / 60
                break
    return found


def table(found: dict[tuple[float, str], list[list[Row]]]) -> str:
    """Losses after the same number of updates, and the time until FedAvg's last loss, mean and range over seeds."""
    text = ["| rho | method | rate | loss after all rounds | from - to | minutes a round | minutes to FedAvg's loss |"]
    text.append("| --- |" + " --- |" * 6)
    for rho in RHOS:
        target = [run[-1]["train_loss"] for run in found[rho, "FedAvg"]]
        for method in SHOWN:
            runs = found[rho, method]
            losses = [run[-1]["train_loss"] for run in runs]
            span = f"{min(losses):.3f} - {max(losses):.3f}"
            each = fmean(run[-1]["seconds"] / run[-1]["round"] / 60 for run in runs)
            spent = minutes_to(runs, target)
            time = f"{fmean(spent):.1f} ({min(spent):.1f} - {max(spent):.1f})"
            if max(spent) == math.inf:
                time = f"not reached in {spent.count(math.inf)} of {len(spent)}"
            text.append(
                f"| {rho} | {method} | {runs[0][0]['lr']:g} | {fmean(losses):.3f} | {span} | {each:.2f} | {time} |"
            )
    return "\n".join(text) + "\n"


def plot(found: dict[tuple[float, str], list[list[Row]]], path: Path) -> None:
    """The training loss over device updates, and over simulated time."""
    figure, axes = canvas(2 * len(RHOS), 4.2 * 2 * len(RHOS), 4.0)
    places = [(rho, x) for rho in RHOS for x in ("updates", "seconds")]
    for ax, (rho, x) in zip(axes, places, strict=True):
        for method, colour in zip(SHOWN, COLOURS, strict=True):
            runs = found[rho, method]
            xs = [fmean(run[j][x] for run in runs) / (60 if x == "seconds" else 1) for j in range(ROUNDS)]
            ys = [fmean(run[j]["train_loss"] for run in runs) for j in range(ROUNDS)]
            ax.plot(xs, ys, color=colour, lw=1.6, label=method)
        ax.set(yscale="log", title=f"rho_device = {rho}", ylabel="training loss")
        ax.set(xlabel="device updates" if x == "updates" else "simulated minutes")
        ax.grid(alpha=0.25, which="both")
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, fontsize=9, loc="outside lower center", ncols=6)
    save(figure, path)


if __name__ == "__main__":
    main()
