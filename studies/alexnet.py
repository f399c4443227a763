"""The paper's own model: one panel of figures 2 and 3 with the small AlexNet, for as long as two cores allow.

    FEDCLUSTER_DATA=... .venv/bin/python studies/alexnet.py        two hours of two cores

FedAvg and FedCluster at rho_device 0.9 and the paper's learning rates, on CIFAR-10 and on MNIST, one seed: an hour for
each data set, its two runs side by side. Interrupted, it goes on where it stopped. Writes docs/reproduction/alexnet.csv
and alexnet.png.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from running import run

from fedcluster.allocator import keep_memory
from fedcluster.errors import Diverged
from fedcluster.files import write_atomically
from fedcluster.paper import drawing, table
from fedcluster.paper.figures import FEDAVG, FEDCLUSTER, experiment, panels, rate
from fedcluster.paper.reproduce import job
from fedcluster.workers import cores

ROOT = Path(__file__).parent.parent
CURVES = (FEDAVG, FEDCLUSTER)


def main() -> None:
    keep_memory()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "alexnet")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "reproduction")
    parser.add_argument("--rounds", type=int, default=50)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    done, runs = [], {}
    for panel in [panels(figure, "paper")[-1] for figure in ("fig2", "fig3")]:
        jobs = {
            curve: job(experiment(panel, curve, "paper", "paper", 0).with_(rounds=arguments.rounds)) for curve in CURVES
        }
        done.append(replace(panel, curves=CURVES))
        for curve, lines in run(jobs, arguments.runs, panel.data, cores()).items():
            if isinstance(lines, Diverged):
                raise SystemExit(f"{curve.label} on {panel.data}: {lines}")
            runs[done[-1], curve] = [lines]
        title = "The small AlexNet, one seed, the paper's learning rates"
        drawing.draw(done, runs, "rounds", title, arguments.out / "alexnet.png")
        text = table.written(done, runs, lambda panel, curve: rate(panel, curve, "paper"))
        write_atomically(arguments.out / "alexnet.csv", text)


if __name__ == "__main__":
    main()
