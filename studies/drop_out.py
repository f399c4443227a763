"""What helps where devices drop out: more devices for every update wanted, or a deadline.

    .venv/bin/python studies/drop_out.py        about two minutes of one core

The fleet, the methods, the rates and the seeds of studies/clock.py, with 30 % drop-out. Every cycle asks for
`over_select` times the devices wanted, or ends at a deadline with the updates that are in. An interrupted study
continues where it stopped. Writes docs/clock-study/drop-out.csv and drop-out.md.
"""

import argparse
import csv
import math
from pathlib import Path
from statistics import fmean
from typing import Any

from clock import METHODS, ROOT, SEEDS, experiment, hours
from running import run

from fedcluster.analysis.jobs import Job
from fedcluster.errors import Diverged
from fedcluster.runs.metrics import Line

DROPOUT = 0.3
RATES = {"FedAvg, waits for its fleet-wide cohort": 1.0, "FedCluster, 10 bands of time zones": 0.3}
REMEDIES: dict[str, dict[str, Any]] = {
    "over_select = 1.3": {},
    "over_select = 1.6": {"clock.over_select": 1.6},
    "over_select = 2": {"clock.over_select": 2.0},
    "over_select = 3": {"clock.over_select": 3.0},
    "deadline = 12 h": {"clock.deadline": 12 * 3600.0},
}
Found = dict[tuple[str, str, int], list[Line] | Diverged]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "drop-out")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "clock-study")
    arguments = parser.parse_args()
    jobs = {
        (method, remedy, seed): Job(
            f"{list(METHODS).index(method)}-{list(REMEDIES).index(remedy)}-seed{seed}",
            experiment(method, lr, seed, DROPOUT).override(**keys),
        )
        for remedy, keys in REMEDIES.items()
        for method, lr in RATES.items()
        for seed in SEEDS
    }
    found = run(jobs, arguments.runs, "measuring", workers=1)
    write(found, arguments.out)


def write(found: Found, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with (out / "drop-out.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["method", "remedy", "seed", "hours_to_target", "hours", "aggregations", "downloads", "updates"]
        )
        for key, lines in found.items():
            last = {} if isinstance(lines, Diverged) else lines[-1]
            spent = [last.get(name) for name in ("aggregations", "downloads", "device_updates")]
            writer.writerow([*key, round(hours(lines), 2), round(last.get("simulated_seconds", 0) / 3600, 2), *spent])
    (out / "drop-out.md").write_text(table(found))
    print(table(found))


def table(found: Found) -> str:
    rows = ["| method | cycle | hours to 90% | from - to | hours an aggregation | downloads an update |"]
    rows.append("| --- |" + " --- |" * 5)
    for method in RATES:
        for remedy in REMEDIES:
            runs = [found[method, remedy, seed] for seed in SEEDS]
            spent, whole = (
                [hours(lines) for lines in runs],
                [lines for lines in runs if not isinstance(lines, Diverged)],
            )
            each = fmean(lines[-1]["simulated_seconds"] / 3600 / lines[-1]["aggregations"] for lines in whole)
            asked = fmean(lines[-1]["downloads"] / lines[-1]["device_updates"] for lines in whole)
            mean = f"{fmean(spent):.0f}" if max(spent) < math.inf else f"not in {spent.count(math.inf)} of {len(spent)}"
            rows.append(
                f"| {method} | {remedy} | {mean} | {min(spent):.0f} - {max(spent):.0f} | {each:.2f} | {asked:.2f} |"
            )
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
