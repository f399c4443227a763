"""The runs below a folder, and what became of them. It reads what a run has written so far, checks everything, and
imports neither numpy nor torch: a list shall be there at once."""

import json
import os
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

# as in runs/directory.py and runs/metrics.py, which import torch; a test compares them
EXPERIMENT, METRICS, MODEL, DIVERGED = "experiment.toml", "metrics.jsonl", "model.safetensors", "diverged.txt"
DEEP = 3  # folders: runs/, a comparison, its runs
MOST = 2**20  # bytes of an experiment, and of the end of the metrics, that are read


@dataclass(frozen=True)
class Listed:
    """A run: its folder, its state, the rounds that it has and that it shall have, and its last line of metrics."""

    path: Path
    state: str  # running, finished, diverged, interrupted or damaged
    rounds: int
    planned: int | None
    last: dict[str, Any]
    changed: float  # when it last wrote, in seconds since 1970


def list_runs(folder: Path) -> list[Listed]:
    """The runs in a folder and below it, the one that wrote last first."""
    found = [read_run(path) for path in run_folders(folder, DEEP)]
    return sorted(found, key=lambda run: -run.changed)


def run_folders(folder: Path, deep: int) -> Iterator[Path]:
    """Folders that hold a run. Those that cannot be read, and links, which may go round in circles, are passed over."""
    if (folder / EXPERIMENT).is_file() and (folder / "run.json").is_file():
        yield folder
        return
    if deep:
        with suppress(OSError):
            for path in sorted(folder.iterdir()):
                if path.is_dir() and not path.is_symlink() and not path.name.startswith("."):
                    yield from run_folders(path, deep - 1)


def read_run(path: Path) -> Listed:
    planned, last = planned_rounds(path / EXPERIMENT), last_line(path / METRICS)
    rounds = last.get("round", 0)
    return Listed(path, state_of(path, planned), rounds, planned, last, last_change(path))


def state_of(path: Path, planned: int | None) -> str:
    if planned is None:
        return "damaged"
    if is_locked(path / ".lock"):
        return "running"
    if (path / MODEL).exists():
        return "finished"
    return "diverged" if (path / DIVERGED).exists() else "interrupted"


def planned_rounds(path: Path) -> int | None:
    """The rounds that an experiment file asks for; None where there is no telling."""
    try:
        with path.open("rb") as file:
            rounds = tomllib.loads(file.read(MOST).decode()).get("rounds", 100)
    except (OSError, ValueError, RecursionError):
        return None
    return rounds if type(rounds) is int else None


def last_line(path: Path) -> dict[str, Any]:
    """The last complete line of metrics.jsonl; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MOST))
            lines = file.read(MOST).split(b"\n")[:-1]
    except OSError:
        return {}
    for raw in reversed(lines):
        with suppress(ValueError, RecursionError):
            line = json.loads(raw)
            if isinstance(line, dict) and type(line.get("round")) is int:
                return line
    return {}


def last_change(path: Path) -> float:
    changed = 0.0
    for file in (path, path / METRICS, path / MODEL):
        with suppress(OSError):
            changed = max(changed, file.stat().st_mtime)
    return changed


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock. Where there is no lock file, none is made."""
    if not path.is_file():
        return False
    try:
        with FileLock(path, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:
        return False
