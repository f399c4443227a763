"""A federation on loopback under attack, whose processes are killed and resumed.

Runs of four honest devices follow one another until the time is up. While they train, hostile clients attack the server
(torture/hostile.py). In some runs the server or its SuperLink is killed and the run is resumed: the model must be that
of the undisturbed run. In some a device is killed: the run must finish all the same. In the others memory and open
files of the server and its SuperLink must not grow. `python -m torture.federation [SEED [SECONDS]]` prints the counts.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import fedcluster
from fedcluster.flower import certificates
from fedcluster.runs.progress import Display
from tests.federation import Federation, Process, kill, until
from torture.hostile import Hostile, Rng

EXPERIMENT = fedcluster.Experiment(
    rounds=24,
    fleet={"devices": 4, "samples": 40},
    clusters={"count": 2, "participation": 1.0},
    model={"name": "mlp"},
    local={"steps": 5, "batch": 10, "lr": 0.05, "algorithm": "scaffold"},
)
KINDS = ("soak", "server killed", "superlink killed", "device killed")
WARM_UP = 4  # cycles before memory is measured
ATTACKED = EXPERIMENT.rounds  # cycles under attack, half of all; the others leave time for what follows
MAX_GROWTH = 48 * 2**20  # bytes by which memory may grow
MAX_DESCRIPTORS = 16  # by which open files may grow
DEFECTS = ("failed runs", "other models", "tracebacks", "leaks", "let in")


class Campaign:
    def __init__(self, folder: Path, seed: int) -> None:
        self.seed, self.counts = seed, Counter[str]()
        self.federation = Federation(folder, EXPERIMENT)
        for name in ("a", "b"):
            certificates.add_device(folder / "certificates", name)
        self.hostile = Hostile(self.federation.port, folder / "certificates", ("a", "b"))
        fedcluster.run(EXPERIMENT, folder / "undisturbed", display=Display())
        self.expected = self.federation.model("undisturbed")

    def run(self, number: int, kind: str) -> None:
        """One run, from its first device to its final model."""
        federation, rng, out = self.federation, np.random.default_rng([self.seed, number]), f"run-{number}"
        for device in "0123":
            if device not in federation.devices or federation.devices[device].poll() is not None:
                federation.join(device)
        server = federation.serve(out, nodes=4, deadline=60)
        self.attack(server, out, rng, WARM_UP)
        if kind in ("server killed", "superlink killed"):
            for pid in children(server.pid) if kind == "superlink killed" else [server.pid]:
                os.kill(pid, signal.SIGKILL)
            server.wait(300)
            server = federation.serve(out, "--resume", nodes=4, deadline=60)
        elif kind == "device killed":
            kill(federation.devices[str(rng.integers(4))])
        before = usage(server.pid)
        self.attack(server, out, rng, ATTACKED)
        if kind == "soak":
            self.compare(out, before, server)
        self.counts[f"runs, {kind}"] += 1
        self.judge(server, out, kind)

    def attack(self, server: Process, out: str, rng: Rng, cycles: int) -> None:
        """Attack until `cycles` cycles are done."""
        until(lambda: server.poll() is not None or self.federation.lines(out) != [], 300)
        end = time.monotonic() + 600
        while server.poll() is None and len(self.federation.lines(out)) < cycles and time.monotonic() < end:
            act = self.hostile.acts[rng.integers(len(self.hostile.acts))]
            try:
                act(rng)
            except AssertionError as error:
                self.defect("let in", f"{out}: {error}")
            self.counts[f"acts, {act.__name__}"] += 1

    def compare(self, out: str, before: dict[int, tuple[int, int]], server: Process) -> None:
        """Hostile connections are closed within seconds; then memory and open files must be as before."""
        end, grown = time.monotonic() + 20, [""]
        while grown and server.poll() is None and time.monotonic() < end:
            time.sleep(0.5)
            grown = []
            for pid, (memory, handles) in usage(server.pid).items():
                old = before.get(pid, (memory, handles))
                if memory > old[0] + MAX_GROWTH or handles > old[1] + MAX_DESCRIPTORS:
                    grown.append(f"process {pid}: memory {old[0]:,} -> {memory:,}, descriptors {old[1]} -> {handles}")
        if server.poll() is not None:
            return
        self.counts["soaks measured"] += 1
        if grown:
            self.defect("leaks", f"{out}: {grown}")

    def judge(self, server: Process, out: str, kind: str) -> None:
        try:
            code: int | None = server.wait(600)
        except subprocess.TimeoutExpired:
            code = None
            kill(server)
        log = self.federation.log(out)
        if code != 0:
            self.defect("failed runs", f"{out} ({kind}), exit code {code}: {log[-2000:]}")
        elif kind != "device killed" and self.federation.model(out) != self.expected:
            self.defect("other models", f"{out} ({kind}): {log[-2000:]}")
        if "Traceback" in log:
            self.defect("tracebacks", f"{out} ({kind}): {log[-2000:]}")

    def defect(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        print(f"{kind}: seed {self.seed}, {text}\n", flush=True)


def children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(word) for word in found.stdout.split()]


def usage(pid: int) -> dict[int, tuple[int, int]]:
    """Resident memory and open descriptors of a process and its children."""
    found = {}
    for one in (pid, *children(pid)):
        try:
            pages = int(Path(f"/proc/{one}/statm").read_text().split()[1])
            found[one] = pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{one}/fd"))
        except OSError:  # it has just ended
            continue
    return found


def federation(seed: int, seconds: float) -> dict[str, int]:
    """One run after another for so many seconds, at least one of each kind; the counts of acts, runs and defects."""
    end, number = time.monotonic() + seconds, 0
    with TemporaryDirectory(prefix="torture-") as folder:
        campaign = Campaign(Path(folder), seed)
        with campaign.federation:
            while number < len(KINDS) or time.monotonic() < end:
                campaign.run(number, KINDS[number % len(KINDS)])
                number += 1
    return dict.fromkeys(DEFECTS, 0) | dict(campaign.counts)


if __name__ == "__main__":
    arguments = [float(word) for word in sys.argv[1:]] + [0.0, 300.0][len(sys.argv) - 1 :]
    found = federation(int(arguments[0]), arguments[1])
    print(json.dumps(found, indent=1))
    sys.exit(any(found[kind] for kind in DEFECTS))
