"""A federation on one machine, step by step: certificates, a server, and eight devices in four parts of the world.

    python examples/federation/walk.py [FOLDER] [--rounds 20]

Every step is a command that could run on a machine of its own; it is printed before it runs. Data and results stay in
FOLDER; the plot is FOLDER/out/curves.png.
"""

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np

import fedcluster
from fedcluster.data import sources
from fedcluster.fleet import fleet

HERE = Path(__file__).resolve().parent
ZONES = [
    "Asia/Tokyo",
    "Australia/Sydney",
    "Asia/Kolkata",
    "Asia/Dubai",
    "Europe/Berlin",
    "Africa/Lagos",
    "America/New_York",
    "America/Los_Angeles",
]


def command(*words: object) -> list[str]:
    print("$ fedcluster", shlex.join(map(str, words)), flush=True)
    return [sys.executable, "-m", "fedcluster", *map(str, words)]


def run(*words: object) -> None:
    """Run a command, and exit if it fails; it has printed why."""
    code = subprocess.run(command(*words)).returncode
    if code != 0:
        sys.exit(code)


def write_devices(folder: Path) -> None:
    """In real life devices have their data already; here each gets its share of the digits, mostly of one class."""
    experiment = fedcluster.load(HERE / "experiment.toml")
    dataset = sources.open_dataset("digits")
    _, partition = fleet.build(experiment.fleet, dataset, experiment.seed)
    x, y = dataset.x_train.numpy(), dataset.y_train.numpy()
    for k in range(len(partition)):
        rows = partition.sample_indices(k)
        np.savez(folder / f"device-{k}.npz", x_train=x[rows], y_train=y[rows], x_test=x[:1], y_test=y[:1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("federation"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--port", type=int, default=9092)
    options = parser.parse_args()
    if options.folder.exists() and any(options.folder.iterdir()):
        sys.exit(f"walk.py: {options.folder} is not empty: choose another folder, or delete it")
    options.folder.mkdir(parents=True, exist_ok=True)
    os.chdir(options.folder)
    write_devices(Path())

    run("certificates", "certificates", "--nodes", 8)
    server, trust = f"127.0.0.1:{options.port}", ("--certificates", "certificates")
    devices = []
    for k, zone in enumerate(ZONES):
        words = ("--server", server, "--device", k, "--data", f"device-{k}.npz", "--timezone", zone, *trust)
        with Path(f"device-{k}.log").open("wb") as log:
            devices.append(subprocess.Popen(command("join", *words), stdout=log, stderr=log))
    try:
        words = ("--listen", server, "--nodes", 8, "--out", "out", "-o", f"rounds={options.rounds}", *trust)
        run("serve", HERE / "experiment.toml", *words)
    finally:
        for device in devices:
            device.terminate()
        for device in devices:
            device.wait()
    print(f"Plot saved to {Path('out/curves.png').resolve()}")


if __name__ == "__main__":
    main()
