"""Attacks on runs and their folders: kills, damaged files and full disks, each followed by a resume.

    python -m torture.runs [SEED [SECONDS]]

Every case ends in one of two ways, or the campaign fails: the run comes to the same bytes as one that nobody disturbed,
or it is refused with a sentence and an exit code. Never a traceback, never another model. Cases are drawn from the
seed, kills by the number of cycles done; only what a kill meets within a cycle depends on the machine. Runs are forked
from this process, which has imported everything, so that a case takes about a second.
"""

import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typer

import fedcluster
from fedcluster.cli.common import exit_on_error
from fedcluster.runs.progress import Display, Spoken
from fedcluster.training import checkpoints
from fedcluster.training.executors import processes as workers

KEYS: dict[str, Any] = {
    "rounds": 12,
    "fleet": {"devices": 20, "samples": 30},
    "clusters": {"count": 4, "participation": 0.5},
    "model": {"name": "mlp"},
    "local": {"steps": 5, "batch": 8, "lr": 0.05},
}
EXPERIMENTS = {
    "fedavg": fedcluster.Experiment(**KEYS),
    "scaffold": fedcluster.Experiment(**KEYS | {"local": KEYS["local"] | {"algorithm": "scaffold"}}),
    "clock": fedcluster.Experiment(**KEYS | {"clock": {"dropout": 0.2}, "server": {"optimizer": "adam"}}),
}
LONG = "long"  # enough for workers to start, and only for them
EXPERIMENTS[LONG] = EXPERIMENTS["fedavg"].override(rounds=200)
SHORT = [name for name in EXPERIMENTS if name != LONG]
CYCLES = KEYS["rounds"] * KEYS["clusters"]["count"]
REFUSALS = {2, 3, 5}
LEAST = 200  # bytes, of the largest file that a full disk allows


class Failed(AssertionError):
    """A case ended as none may."""


class Campaign:
    def __init__(self, seed: int, folder: Path) -> None:
        self.random, self.folder, self.counts = random.Random(seed), folder, Counter[str]()
        self.cases = 0
        checkpoints.SAVE_EVERY, checkpoints.SAVE_SHARE = 0.0, 0  # a checkpoint a cycle
        torch.set_num_threads(1)  # threads do not survive a fork
        self.seconds = dict[str, float]()
        for name in SHORT:
            experiment = EXPERIMENTS[name]
            for suffix, one in (("", experiment), ("-other", experiment.override(seed=1))):
                began = time.perf_counter()
                fedcluster.run(one, folder / f"{name}{suffix}", display=Display())
                self.seconds[name] = time.perf_counter() - began

    def begin(self) -> tuple[str, Path]:
        """An experiment, and a new folder for it."""
        self.cases += 1
        return self.random.choice(SHORT), self.folder / f"case-{self.cases}"

    def disturbed(self, name: str, out: Path, number: signal.Signals) -> int:
        """A run that gets this signal when it has done some of its cycles; its exit code."""
        cycles, pause = self.random.randrange(CYCLES), self.random.uniform(0, 0.1 * self.seconds[name])
        child = start(lambda: train(name, out))
        while not gone(child) and done(out) < cycles:
            time.sleep(0.001)
        time.sleep(pause)
        os.kill(child, number)
        code = ended(child)
        self.expect(code in (0, -number, 143 if number == signal.SIGTERM else 0), name, out, f"exit code {code}")
        return code

    def resume(self, name: str, out: Path) -> int:
        return ended(start(lambda: train(name, out)))

    def expect(self, holds: bool, name: str, out: Path, what: str) -> None:
        if not holds:
            said = (out.parent / f"{out.name}.log").read_text(errors="replace")
            raise Failed(f"{what} in {out} ({name}, case {self.cases}, counts {dict(self.counts)})\n{said[-3000:]}")

    def same(self, name: str, out: Path, harmed: str = "") -> None:
        self.expect(essence(out) == essence(self.folder / name), name, out, "another result")
        left = [path.name for path in out.rglob("*") if path.suffix == ".tmp"]
        tensors = {path.stem for path in out.glob("checkpoint/*.safetensors")}
        left += sorted(tensors - {path.stem for path in out.glob("checkpoint/*.json")} - {harmed})
        self.expect(not left, name, out, f"left behind: {left}")
        self.counts["same bytes"] += 1
        shutil.rmtree(out)

    # the cases

    def kill(self) -> None:
        name, out = self.begin()
        number = self.random.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
        for _ in range(self.random.randint(1, 4)):
            code = self.disturbed(name, out, number)
            self.counts[f"{number.name}"] += code != 0
        self.expect(self.resume(name, out) == 0, name, out, "not resumed")
        self.same(name, out)

    def damage(self) -> None:
        """Of a file of a run that was stopped, or has finished."""
        name, out = self.begin()
        if self.random.random() < 0.5:
            shutil.copytree(self.folder / name, out)
        else:
            while not list(out.glob("checkpoint/*.json")) or (out / "model.safetensors").exists():
                shutil.rmtree(out, ignore_errors=True)
                self.disturbed(name, out, signal.SIGKILL)
        finished = (out / "model.safetensors").exists()
        files = sorted(path for path in out.rglob("*") if path.is_file() and path.name not in (".lock", "curves.png"))
        path = self.random.choice(files)
        how = self.harm(path, self.folder / f"{name}-other")
        code = self.resume(name, out)
        self.counts[how] += 1
        what = f"exit code {code} after {how} {path.name} of a {'finished' if finished else 'stopped'} run"
        said = (out.parent / f"{out.name}.log").read_text()
        self.expect(code == 0 or (code in REFUSALS and "\nfedcluster: " in f"\n{said}"), name, out, what)
        if code:
            self.counts["refused with a sentence"] += 1
            shutil.rmtree(out)
        else:
            self.same(name, out, harmed=path.stem if finished else "")  # a finished run is not touched again

    def harm(self, path: Path, other: Path) -> str:
        content = bytearray(path.read_bytes())
        how = self.random.choice(["truncated", "truncated", "bit flipped", "bit flipped", "removed", "swapped"])
        theirs = sorted(other.rglob(f"*{path.suffix}" if path.parent.name == "checkpoint" else path.name))
        if how == "removed" or not content:
            path.unlink()
            return "removed"
        if how == "swapped" and theirs:
            shutil.copy(theirs[-1], path)
            return how
        if how == "truncated":
            del content[self.random.choice([0, self.random.randrange(len(content))]) :]
        else:
            how = "bit flipped"
            content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
        path.write_bytes(content)
        return how

    def full(self) -> None:
        name, out = self.begin()
        largest = max(path.stat().st_size for path in (self.folder / name).rglob("*"))
        room = int(LEAST * (1.1 * largest / LEAST) ** self.random.random())
        code = ended(start(lambda: train(name, out, room)))
        said = (out.parent / f"{out.name}.log").read_text()
        self.expect(
            code == 0 or (code == 5 and "File too large" in said), name, out, f"exit code {code} on a full disk"
        )
        self.counts["full disk"] += code != 0
        self.expect(self.resume(name, out) == 0, name, out, "not resumed")
        self.same(name, out)

    def lose_workers(self) -> None:
        """A run in three processes, two of which are killed as they come."""
        name, (_, out) = LONG, self.begin()
        if not (self.folder / LONG).exists():
            fedcluster.run(EXPERIMENTS[LONG], self.folder / LONG, display=Display())
        child = start(lambda: train(name, out, processes=3))
        for _ in range(self.random.randint(1, 4)):
            time.sleep(self.random.uniform(0, 6))
            for victim in self.random.sample(found := children(child), min(1, len(found))):
                try:
                    os.kill(victim, signal.SIGKILL)
                    self.counts["workers killed"] += 1
                except ProcessLookupError:
                    pass
        self.expect(ended(child) == 0, name, out, "not done")
        self.same(name, out)


def runs(seed: int, seconds: float) -> dict[str, int]:
    """Attack for that long, and count."""
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(seed, Path(folder))
        until = time.monotonic() + seconds
        cases = [campaign.kill, campaign.kill, campaign.damage, campaign.damage, campaign.damage, campaign.full]
        while time.monotonic() < until:
            for case in [*cases, campaign.lose_workers, *(cases * 4)]:
                case()
                if time.monotonic() >= until:
                    break
    return dict(campaign.counts)


def start(work: Callable[[], None]) -> int:
    """In a child of this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except typer.Exit as error:
            code = error.exit_code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return child


def ended(child: int) -> int:
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def gone(child: int) -> bool:
    """Whether it has ended; `ended` can still be asked how."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def done(out: Path) -> int:
    """Cycles on record."""
    try:
        return (out / "cycles.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def train(name: str, out: Path, room: int | None = None, processes: int = 1) -> None:
    """As the command does it, its words in a file beside the folder."""
    log = os.open(out.parent / f"{out.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    experiment = EXPERIMENTS[name]
    if processes > 1:
        workers.WORTH_STARTING = 0.0
    if room is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    with exit_on_error("--resume"):
        fedcluster.run(experiment, out, resume=True, display=Spoken(), workers=processes)


def essence(folder: Path) -> list[Any]:
    """What two runs must share to the bit: all but the times."""
    lines = [
        {key: value for key, value in json.loads(line).items() if key not in ("seconds", "elapsed")}
        for name in ("metrics.jsonl", "cycles.jsonl")
        for line in (folder / name).read_text().splitlines()
    ]
    return [(folder / "model.safetensors").read_bytes(), *lines]


def children(process: int) -> list[int]:
    """Its workers."""
    try:
        found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        return [int(one) for one in found if b"resource_tracker" not in Path(f"/proc/{one}/cmdline").read_bytes()]
    except OSError:
        return []


def main() -> None:
    seed, seconds = (*sys.argv[1:3], *("0", "300")[len(sys.argv) - 1 :])
    counts = runs(int(seed), float(seconds))
    print(json.dumps(dict(sorted(counts.items())), indent=1))


if __name__ == "__main__":
    main()
