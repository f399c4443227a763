"""Overlapping cycles: at what staleness is FedCluster faster than FedAvg, and still better per update?

    .venv/bin/python studies/overlap.py [--nights]        about five minutes of one core; --data mnist: about an hour

Digits (or MNIST) with the MLP, 100 devices that are always free, with log-normal speeds of computing and of links,
20 updates wanted a round: all at once (FedAvg), or two at a time in ten clusters with `clusters.overlap` d. Once every
movement is applied in full, once it is damped by `server.lr` = 1 / (d + 1), as d + 1 of them start from about the
same model. FedAvg also runs for as many rounds as take about as long as FedCluster's. With `--nights`
devices are free at night (`fleet.world = "diurnal"`), and clusters are bands of time zones in the order of their
nights.

Every method has its own best `local.lr`, on a ladder of rates with a worse one on either side, on a seed that is not
used for results; three others give the result. Runs that are in docs/overlap-study/digits.csv (or mnist.csv,
digits-nights.csv) are not repeated. Writes these files and pictures there, and prints the tables of its README.
"""

import argparse
import csv
import math
import tempfile
from itertools import product
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
RHOS = {False: (0.5, 0.9), True: (0.9,)}
SAMPLES = {"digits": 100, "mnist": 500}
DEPTHS = {False: (0, 1, 2, 4, 9), True: (0, 1)}  # with and without nights
LONGER = {False: 128, True: 48}  # rounds of FedAvg that take about as long as FedCluster's
COLOURS = ("#D55E00", "#003A5D", "#0072B2", "#009E73", "#56B4E9", "#CC79A7")
COLUMNS = ("rho", "method", "seed", "lr", "round", "seconds", "updates", "train_loss", "test_accuracy")
Row = dict[str, Any]


def methods_of(nights: bool) -> dict[str, dict[str, Any]]:
    one, depths = {"clusters.method": "random", "clusters.count": 1}, DEPTHS[nights]
    return {
        "FedAvg": one,
        longer(nights): one | {"rounds": LONGER[nights]},
        **{f"FedCluster, d = {d}": {"clusters.overlap": d} for d in depths},
        **{f"FedCluster, d = {d}, damped": {"clusters.overlap": d, "server.lr": 1 / (d + 1)} for d in depths[1:]},
    }


def longer(nights: bool) -> str:
    return f"FedAvg, {LONGER[nights]} rounds"


def fleet_file(folder: Path) -> Path:
    """Devices as in `fleet.world = "diurnal"`, free at all times."""
    rng, path = stream(0, "world"), folder / "fleet.csv"
    columns = (0.005 * np.exp(rng.normal(0, 0.6, DEVICES)), 20 * np.exp(rng.normal(0, 0.8, DEVICES)))
    up = 5 * np.exp(rng.normal(0, 0.8, DEVICES))
    lines = [f"{k},{a:.6f},{b:.3f},{c:.3f}" for k, (a, b, c) in enumerate(zip(*columns, up, strict=True))]
    path.write_text("\n".join(["device,seconds_per_sample,down_mbps,up_mbps", *lines]) + "\n")
    return path


def rows_of(data: str, nights: bool, rho: float, method: str, lr: float, seed: int) -> list[Row]:
    """A run, round by round. A run that diverges has one row with an infinite loss."""
    key = {"rho": rho, "method": method, "seed": seed, "lr": lr}
    by_zone = {"method": "timezone", "order": "cyclic"} if nights else {}
    with tempfile.TemporaryDirectory() as folder:
        described = Experiment(
            rounds=ROUNDS,
            seed=seed,
            data={"name": data},
            fleet={"samples": SAMPLES[data], "rho_device": rho}
            | ({"world": "diurnal", "devices": DEVICES} if nights else {"path": str(fleet_file(Path(folder)))}),
            clusters={"count": 10, "participation": 0.2} | by_zone,
            model={"name": "mlp"},
            local={"steps": 20, "batch": 30, "lr": lr},
            clock={},
        ).override(**methods_of(nights)[method])
        try:
            history = fedcluster.run(described, display=Display()).history
        except Diverged:
            return [key | {"round": 0, "seconds": 0, "updates": 0, "train_loss": math.inf, "test_accuracy": 0}]
    names = {"round": "round", "seconds": "simulated_seconds", "updates": "device_updates"}
    scores = {"train_loss": "train_loss", "test_accuracy": "test_accuracy"}
    return [key | {ours: line[name] for ours, name in (names | scores).items()} for line in history]


class Results:
    """The runs of the study, kept in one file."""

    def __init__(self, path: Path, data: str, nights: bool) -> None:
        self.path, self.data, self.nights, self.rows = path, data, nights, list[Row]()
        if path.exists():
            with path.open(newline="") as file:
                for row in csv.DictReader(file):
                    self.rows.append({name: row[name] if name == "method" else float(row[name]) for name in COLUMNS})

    def of(self, rho: float, method: str, lr: float, seed: int) -> list[Row]:
        found = [row for row in self.rows if [row[name] for name in COLUMNS[:4]] == [rho, method, seed, lr]]
        if not found:
            print(f"rho {rho}: {method}, rate {lr:g}, seed {seed}", flush=True)
            found = rows_of(self.data, self.nights, rho, method, lr, seed)
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
    parser.add_argument("--nights", action="store_true", help="devices are free at night, clusters are time zones")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{arguments.data}{'-nights' * arguments.nights}.csv"
    results = Results(path, arguments.data, arguments.nights)
    found: dict[tuple[float, str], list[list[Row]]] = {}
    for rho, method in product(RHOS[arguments.nights], methods_of(arguments.nights)):
        lr = tune(results, rho, method)
        found[rho, method] = [results.of(rho, method, lr, seed) for seed in SEEDS]
    print(table(found, arguments.nights))
    plot(found, arguments.nights, path.with_suffix(".png"))


def time_to(run: list[Row], loss: float) -> float:
    """Simulated seconds until a run has this loss, between rounds in proportion; infinite where it never has."""
    for before, row in zip([run[0] | {"seconds": 0.0}, *run], run, strict=False):
        if row["train_loss"] <= loss:
            share = (before["train_loss"] - loss) / max(before["train_loss"] - row["train_loss"], 1e-12)
            share = min(max(share, 0.0), 1.0) if row is not run[0] else 1.0
            return float(before["seconds"] + share * (row["seconds"] - before["seconds"]))
    return math.inf


def loss_at(run: list[Row], seconds: float) -> float:
    """The loss of the last round that is over at this time."""
    return float([run[0], *(row for row in run if row["seconds"] <= seconds)][-1]["train_loss"])


def table(found: dict[tuple[float, str], list[list[Row]]], nights: bool) -> str:
    """Losses after all rounds beside FedAvg's at that time, and the time until FedAvg's last loss: means over seeds."""
    unit, name = (3600, "hours") if nights else (60, "minutes")
    columns = ["rho", "method", "rate", "loss after all rounds", "from - to", f"{name} a round"]
    columns += ["FedAvg's loss by then", f"{name} to FedAvg's loss"]
    text = [f"| {' | '.join(columns)} |", "| --- |" + " --- |" * (len(columns) - 1)]
    for (rho, method), runs in found.items():
        fedavg = found[rho, longer(nights)]
        losses = [run[-1]["train_loss"] for run in runs]
        each = fmean(run[-1]["seconds"] / run[-1]["round"] / unit for run in runs)
        beside = fmean(loss_at(long, run[-1]["seconds"]) for run, long in zip(runs, fedavg, strict=True))
        pairs = zip(runs, found[rho, "FedAvg"], strict=True)
        spent = [time_to(run, other[-1]["train_loss"]) / unit for run, other in pairs]
        time = f"{fmean(spent):.1f} ({min(spent):.1f} - {max(spent):.1f})"
        if max(spent) == math.inf:
            time = f"not reached in {spent.count(math.inf)} of {len(spent)}"
        text.append(
            f"| {rho} | {method} | {runs[0][0]['lr']:g} | {fmean(losses):.3f} | {min(losses):.3f} - {max(losses):.3f} "
            f"| {each:.2f} | {beside:.3f} | {time} |"
        )
    return "\n".join(text) + "\n"


def plot(found: dict[tuple[float, str], list[list[Row]]], nights: bool, path: Path) -> None:
    """The training loss over device updates, and over simulated time; damped movements are dashed."""
    rhos, methods = RHOS[nights], [method for method in methods_of(nights) if method != "FedAvg"]  # shorter, the same
    unit, name = (3600, "hours") if nights else (60, "minutes")
    colours = dict(zip([method for method in methods if not method.endswith("damped")], COLOURS, strict=False))
    figure, axes = canvas(2 * len(rhos), 4.2 * 2 * len(rhos), 4.0)
    for ax, (rho, x) in zip(axes, product(rhos, ("updates", "seconds")), strict=True):
        longest = max(run[-1][x] for method in methods[1:] for run in found[rho, method])
        for method in methods:
            runs, dashes = found[rho, method], "--" if method.endswith("damped") else "-"
            xs = [fmean(run[j][x] for run in runs) for j in range(len(runs[0]))]
            ys = [fmean(run[j]["train_loss"] for run in runs) for j in range(len(runs[0]))]
            shown = [i for i, at in enumerate(xs) if at <= longest]
            xs, ys = [xs[i] / (unit if x == "seconds" else 1) for i in shown], [ys[i] for i in shown]
            ax.plot(xs, ys, dashes, color=colours[method.removesuffix(", damped")], lw=1.6, label=method)
        ax.set(yscale="log", title=f"rho_device = {rho}", ylabel="training loss")
        ax.set(xlabel="device updates" if x == "updates" else f"simulated {name}")
        ax.grid(alpha=0.25, which="both")
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, fontsize=9, loc="outside lower center", ncols=5)
    save(figure, path)


if __name__ == "__main__":
    main()
