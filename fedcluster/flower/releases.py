"""What a federation's server keeps for differential privacy: the secret seed of noise and cohorts, and the list of
cycles whose models it has sent on.

    privacy.secret     64 hexadecimal digits. Devices know the experiment's seed, and could subtract noise that follows
                       from it. To repeat a run to the bit, begin it in a folder that holds the same secret.
    releases.jsonl     one line a cycle. It only grows: a resumed run whose checkpoint is older than the last release
                       draws cohort and noise of the cycles in between anew, and counts both releases.
"""

import json
import os
import re
import secrets
from collections import Counter
from pathlib import Path

from fedcluster.errors import BadRun
from fedcluster.files import named
from fedcluster.runs.directory import Folder
from fedcluster.runs.metrics import Line
from fedcluster.state import State
from fedcluster.training.callbacks import Callback
from fedcluster.training.setup import Setup

SECRET, RELEASES = "privacy.secret", "releases.jsonl"


def server_secret(folder: Folder) -> int:
    """The secret of the run, which is drawn when it begins."""
    path = folder.path / SECRET
    if not path.exists():
        if folder.begun:
            raise BadRun(
                f"{path} is missing, from which noise and cohorts are drawn: restore it, or choose another --out"
            )
        with named(path), os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
    text = path.read_text(errors="replace").strip()
    if not re.fullmatch("[0-9a-f]{64}", text):
        raise BadRun(f"{path} is not a secret of 64 hexadecimal digits: restore it, or choose another --out")
    return int(text, 16)


class Releases(Callback):
    """Notes every release before its model is sent to anybody. It is called after the checkpoint of the same cycle is
    written, so that a resumed run does not repeat a cycle that was sent on, unless checkpoints were lost."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / RELEASES
        self.lines = read(self.path)

    def repeats(self, state: State) -> dict[tuple[int, int], int]:
        """How often each cycle, (round, cluster), was released besides the once that everybody counts, for a run that
        continues with this state. Cycles before it were released; those after it will be."""
        past = (state.round, state.cycle)
        counts = Counter[tuple[int, int]]()
        for round, _, cluster in self.lines:
            counts[round, cluster] += 1
        for round, cycle, cluster in set(self.lines):
            counts[round, cluster] -= (round, cycle) < past
        return dict(+counts)

    def on_run_start(self, setup: Setup, state: State, history: list[Line]) -> None:
        """Note the cycle that the checkpoint ends with, if the server was killed before it noted it: this run sends its
        model on. All cycles before it have to be there."""
        noted = {(round, cycle) for round, cycle, _ in self.lines}
        places = [divmod(t, state.cycles) for t in range(state.t)]
        missing = [place for place in places if place not in noted]
        if missing not in ([], places[-1:]):
            raise BadRun(f"{self.path} lacks cycles that were released: restore it from a copy")
        for round, cycle in missing:
            self.add((round, cycle, setup.schedule.round(round)[cycle].cluster))

    def on_cycle_end(self, line: Line, state: State) -> None:
        self.add((line["round"] - 1, line["cycle"], line["cluster"]))

    def add(self, entry: tuple[int, int, int]) -> None:
        self.lines.append(entry)
        with named(self.path), self.path.open("ab") as file:
            file.write(json.dumps(dict(zip(("round", "cycle", "cluster"), entry, strict=True))).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def read(path: Path) -> list[tuple[int, int, int]]:
    """The releases. A line that was cut off is of a release that nobody has seen, and is removed."""
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    lines: list[tuple[int, int, int]] = []
    for number, raw in enumerate(whole.splitlines(), 1):
        try:
            line = json.loads(raw)
            entry = line["round"], line["cycle"], line["cluster"]
            if not all(type(value) is int and value >= 0 for value in entry):
                raise ValueError("not a cycle")
        except (ValueError, KeyError, TypeError, RecursionError):
            raise BadRun(
                f"{path}, line {number}, is damaged, which says what was released: restore it from a copy"
            ) from None
        lines.append(entry)
    if whole != content:
        with named(path):
            os.truncate(path, len(whole))
    return lines
