"""Our numbers beside somebody else's: Flower's niid_bench, in its own setting.

    FEDCLUSTER_DATA=... .venv/bin/python studies/external.py [--seeds 3] [--rounds 50]

Ten devices, all of which take part in each of 50 rounds, ten local epochs of batch 64, SGD with momentum 0.9 and weight
decay 1e-5 at rate 0.01, a CNN with 6 and 16 filters of 5 x 5 and layers of 120 and 84; MNIST, shared out by
Dirichlet(0.5) or with two classes a device; the test accuracy of the best round. A run takes about 25 minutes of one
core. Interrupted, it goes on where it stopped; `--only fedavg,fedprox` and `--partitions dirichlet` run a part. Writes
docs/external/niid_bench.csv and table.md from all runs that are done.
"""

import argparse
import csv
import json
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from running import run
from torch import Tensor, nn

from fedcluster.algorithms.scaffold import Scaffold
from fedcluster.analysis.jobs import Job
from fedcluster.experiment import Experiment, Section
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.local_sgd import Batches, local_sgd
from fedcluster.models.optimizers import optimizer
from fedcluster.state import Tensors
from fedcluster.training.executors.processes import cores

ROOT = Path(__file__).parent.parent
PARTITIONS: dict[str, dict[str, Any]] = {
    "dirichlet": {"partition": "dirichlet", "alpha": 0.5},
    "two classes": {"partition": "pathological", "classes": 2},
}
PUBLISHED = {  # test accuracy in percent, as its README states
    ("fedavg", "dirichlet"): 98.89,
    ("scaffold", "dirichlet"): 99.07,
    ("fedprox", "dirichlet"): 99.02,
    ("fednova", "dirichlet"): 98.03,
    ("fedavg", "two classes"): 96.86,
    ("scaffold", "two classes"): 96.92,
    ("fedprox", "two classes"): 96.85,
    ("fednova", "two classes"): 96.65,
}


def cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    channels, height, _ = shape
    side = ((height - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * side * side, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )


class MomentumScaffold(Scaffold):
    """SCAFFOLD as niid_bench has it: a step of SGD with momentum, then w <- w - lr (c - c_k), option II."""

    @classmethod
    def local_optimizers(cls, options: Section) -> tuple[str, ...]:
        return ("momentum",)

    def train(self, flat_model: FlatModel, received: Tensors, batches: Batches, device_state: Tensors) -> Tensors:
        start, c, c_k = received["model"], received["variate"], device_state["variate"]
        w = local_sgd(
            flat_model, start, batches, rule=Corrected(optimizer(self.local, batches.lr), c - c_k, batches.lr)
        )
        moved = (start - w)[: flat_model.size]
        new = moved / (batches.steps * batches.lr) - (c - c_k)
        device_state["variate"] = new
        return {"model": w, "variate": new - c_k}


class Corrected:
    """The step of an optimizer, followed by a step along the difference of the variates."""

    def __init__(self, rule: Any, offset: Tensor, lr: float) -> None:
        self.rule, self.offset, self.lr = rule, offset, lr

    def step(self, w: Tensor, g: Tensor) -> None:
        self.rule.step(w, g)
        w.add_(self.offset, alpha=-self.lr)


ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "scaffold": {"name": MomentumScaffold},
    "fedprox": {"name": "fedprox", "mu": 0.01},
    "fednova": {"name": "fednova"},
}


def experiment(algorithm: str, partition: str, seed: int, rounds: int) -> Experiment:
    return Experiment(
        seed=seed,
        rounds=rounds,
        data={"name": "mnist"},
        fleet={"devices": 10, "samples": "all"} | PARTITIONS[partition],
        clusters={"count": 1, "participation": 1.0},
        model={"name": cnn},
        algorithm=ALGORITHMS[algorithm],
        local={
            "optimizer": "momentum",
            "momentum": 0.9,
            "weight_decay": 1e-5,
            "epochs": 10,
            "batch": 64,
            "lr": 0.01,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "external")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "external")
    parser.add_argument("--only", default=",".join(ALGORITHMS))
    parser.add_argument("--partitions", default=",".join(PARTITIONS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=50)
    arguments = parser.parse_args()
    jobs = {
        (name, partition, seed): Job(
            f"{name}-{partition.replace(' ', '-')}-{seed}", experiment(name, partition, seed, arguments.rounds)
        )
        for seed, partition, name in product(
            range(arguments.seeds), arguments.partitions.split(","), arguments.only.split(",")
        )
    }
    run(jobs, arguments.runs, "niid_bench", cores(), lambda: write(arguments.runs, arguments.out))
    write(arguments.runs, arguments.out)
    print((arguments.out / "table.md").read_text())


def write(runs: Path, out: Path) -> None:
    """The best accuracy of every run that is done, and a table of means."""
    rows = []
    for name, partition in PUBLISHED:
        for folder in sorted(runs.glob(f"{name}-{partition.replace(' ', '-')}-*")):
            if (folder / "model.safetensors").exists():
                lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
                best = max(lines, key=lambda line: line["test_accuracy"])
                last = lines[-1]
                seed = folder.name.rsplit("-", 1)[1]
                rows.append(
                    [name, partition, seed, best["test_accuracy"], best["round"], last["test_accuracy"], last["round"]]
                )
    out.mkdir(parents=True, exist_ok=True)
    with (out / "niid_bench.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["algorithm", "partition", "seed", "best_accuracy", "best_round", "last_accuracy", "rounds"])
        writer.writerows(rows)
    lines = [
        "| algorithm | partition | published | ours, mean | lowest to highest | seeds | rounds |",
        "| --- " * 7 + "|",
    ]
    for (name, partition), published in PUBLISHED.items():
        mine = [row for row in rows if row[:2] == [name, partition]]
        if mine:
            best = [100 * row[3] for row in mine]
            ours = f"{fmean(best):.2f} | {min(best):.2f} to {max(best):.2f} | {len(mine)} | {mine[0][6]}"
            lines.append(f"| {name} | {partition} | {published:.2f} | {ours} |")
    (out / "table.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
