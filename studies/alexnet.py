"""The paper's own model: one panel of figures 2 and 3 with the small AlexNet, for as long as two cores allow.

    FEDCLUSTER_DATA=... .venv/bin/python studies/alexnet.py        two hours on two cores

FedAvg and FedCluster at rho_device 0.9 and the paper's learning rates, on CIFAR-10 and on MNIST, one seed: an hour for
each data set, its two runs in parallel. An interrupted study continues where it stopped, also with more --minutes.
Writes docs/reproduction/alexnet.csv and alexnet.png.
"""

import argparse
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from running import run

from fedcluster.analysis.jobs import Job
from fedcluster.analysis.paper import plots, table
from fedcluster.analysis.paper.figures import FEDAVG, FEDCLUSTER, Curve, Panel, experiment, panels, rate
from fedcluster.analysis.paper.reproduce import job
from fedcluster.files import write_atomically
from fedcluster.runs.metrics import Line, read_lines

ROOT = Path(__file__).parent.parent
CURVES = (FEDAVG, FEDCLUSTER)


class TimeIsUp(Exception):
    pass


def train(jobs: dict[Curve, Job], runs: Path, stage: str, minutes: float) -> dict[Curve, list[Line]]:
    """Train in parallel until one run has taken its time, over all sessions: the curves so far."""
    folders = {curve: runs / one.name for curve, one in jobs.items()}

    def check_time() -> None:
        for folder in folders.values():
            if any(line["elapsed"] >= 60 * minutes for line in read_lines(folder / "metrics.jsonl")):
                raise TimeIsUp

    with suppress(TimeIsUp):
        check_time()
        run(jobs, runs, f"{stage}, to be stopped after {minutes:g} minutes", len(jobs), check_time)
    return {
        curve: [
            {"round": 0, **json.loads((folder / "run.json").read_bytes())["start"]},
            *read_lines(folder / "metrics.jsonl"),
        ]
        for curve, folder in folders.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "alexnet")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "reproduction")
    parser.add_argument("--minutes", type=float, default=60, help="for each data set")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    done: list[Panel] = []
    curves: table.Runs = {}
    for panel in [panels(figure, "paper")[-1] for figure in ("fig2", "fig3")]:
        jobs = {curve: job(experiment(panel, curve, "paper", "paper", 0)) for curve in CURVES}
        done.append(replace(panel, curves=CURVES))
        for curve, lines in train(jobs, arguments.runs, panel.data, arguments.minutes).items():
            curves[done[-1], curve] = [lines]
        title = "The small AlexNet: one seed, the paper's learning rates"
        plots.draw(done, curves, "rounds", title, arguments.out / "alexnet.png")
        text = table.to_csv(done, curves, lambda panel, curve: rate(panel, curve, "paper"))
        write_atomically(arguments.out / "alexnet.csv", text)


if __name__ == "__main__":
    main()
