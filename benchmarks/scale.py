"""Cost against the size of the fleet, at a hundred device updates a round, and memory against the number of updates, at
a hundred thousand devices: both should hardly grow.

make bench-scale
"""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
SIZES = [(devices, 100) for devices in (1_000, 10_000, 100_000, 1_000_000)]
COHORTS = [(100_000, updates) for updates in (10, 1_000, 3_000)]


def memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def one(devices: int, updates: int) -> None:
    """In a process of its own, so that memory can be told apart."""
    import fedcluster
    from fedcluster.allocator import keep_memory
    from fedcluster.data import sources
    from fedcluster.runs.progress import Display
    from fedcluster.training import setup as prepare

    keep_memory()
    sources.open_dataset("digits")
    base = memory()
    experiment = fedcluster.Experiment(
        rounds=8 if updates <= 100 else 2,
        fleet={"devices": devices},
        clusters={"participation": updates / devices},
        model={"name": "mlp"},
    )
    began = time.perf_counter()
    prepare.prepare(experiment)
    start_up = time.perf_counter() - began
    history = fedcluster.run(experiment, display=Display()).history
    seconds = median([line["seconds"] for line in history[1:]][-5:])
    found = {"start_up": start_up, "megabytes": memory() - base, "seconds": seconds}
    print(json.dumps({"devices": devices, "updates": updates} | found))


def main() -> None:
    if len(sys.argv) > 1:
        one(*map(int, sys.argv[1:]))
        return
    lines = ["| devices | updates a round | start-up, s | memory beyond the data, MB | seconds a round |"]
    lines.append("| ---: | ---: | ---: | ---: | ---: |")
    results = []
    for devices, updates in SIZES + COHORTS:
        words = [sys.executable, __file__, str(devices), str(updates)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        results.append(json.loads(done.stdout.splitlines()[-1]))
        r = results[-1]
        numbers = f"{r['start_up']:.2f} | {r['megabytes']:.0f} | {r['seconds']:.2f}"
        lines.append(f"| {devices:,} | {updates:,} | {numbers} |")
        print(lines[-1], file=sys.stderr)
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "scale.json").write_text(json.dumps(results, indent=1) + "\n")
    (HERE / "results" / "scale.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
