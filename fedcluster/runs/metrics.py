"""The record: one JSON line per round and one per cycle. Everything else is made from these lines.

Every checkpoint holds the length and the SHA-256 of both files as they were when it was written. A resumed run keeps
exactly these bytes, and does not continue a record that was altered.
"""

import json
import os
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from fedcluster.files import named, write_atomically
from fedcluster.fleet.clock import CycleOutcome
from fedcluster.runs.checkpoint import Prefix
from fedcluster.runs.ledger import Ledger
from fedcluster.runs.progress import Display
from fedcluster.state import State

Line = dict[str, Any]

METRICS, CYCLES = "metrics.jsonl", "cycles.jsonl"


class Kept(NamedTuple):
    """The beginning of a file of lines that a resumed run continues: as lines, and as the bytes that they are."""

    lines: list[Line]
    content: bytes


class Recorder:
    """Writes a line for every cycle and every round.

    `seconds` is the training time of the round so far, without evaluation and saving. `history` and `turns` are the
    lines of an earlier run that this one continues. In a `timed` run the lines say what the clock says. `name` is the
    name of the device of a number.
    """

    def __init__(
        self,
        folder: Path | None,
        display: Display,
        ledger: Ledger,
        seconds: float = 0.0,
        history: Kept | None = None,
        turns: Kept | None = None,
        timed: bool = False,
        name: Callable[[int], str] = str,
    ) -> None:
        self.folder, self.display, self.ledger, self.seconds = folder, display, ledger, seconds
        self.timed, self.name = timed, name
        self.rounds = Lines(folder / METRICS if folder else None, history or Kept([], b""))
        self.cycles = Lines(folder / CYCLES if folder else None, turns or Kept([], b""))
        before: float = self.rounds.lines[-1]["elapsed"] if self.rounds.lines else 0.0
        self.began = time.perf_counter() - before
        self.refused = ledger.counts["refused"]

    @property
    def history(self) -> list[Line]:
        return self.rounds.lines

    def cycle(
        self, outcome: CycleOutcome, seconds: float, changed: bool, hold: bool = False, undone: str | None = None
    ) -> Line:
        """Record a cycle. `hold` keeps the line back until a cycle of the round succeeds. `undone` says why the cycle
        was."""
        cycle = outcome.reported
        self.seconds += seconds
        refusals = self.ledger.finish_cycle(changed)
        number = self.ledger.counts["refused"] - self.refused
        self.refused += number
        for _, device, reason, _ in refusals[:3]:
            self.display.say(f"round {cycle.round + 1}: refused the update of device {self.name(device)} ({reason})")
        if len(refusals) > 3:
            self.display.say(f"round {cycle.round + 1}: refused {len(refusals) - 3} more updates of this cycle")
        if undone:
            self.display.say(f"round {cycle.round + 1}, {undone}")
        line = {
            "round": cycle.round + 1,
            "cycle": cycle.cycle,
            "cluster": cycle.cluster,
            "cohort": cycle.cohort.tolist(),
            "changed": changed,
            "refused": number,
            "reasons": [(refusal.device, refusal.reason) for refusal in refusals],
            "missing": self.ledger.missing,
            "seconds": seconds,
            **({"diverged": True} if any(refusal.diverged for refusal in refusals) else {}),
            **({"undone": undone} if undone else {}),
            **(simulated(outcome) if self.timed else {}),
        }
        self.cycles.append(line, hold)
        return line

    def drop(self) -> None:
        """Forget the cycles of a round in which none succeeded."""
        self.cycles.drop()
        self.seconds = 0.0

    def round(self, state: State, scores: dict[str, float]) -> Line:
        elapsed = time.perf_counter() - self.began
        line = {"round": state.round, **scores, **self.ledger.counts, "seconds": self.seconds, "elapsed": elapsed}
        if self.timed:
            told = state.time
            line |= {"simulated_seconds": told.now / 1000, "idle_seconds": told.idle / 1000}
            line |= {"dropped": told.dropped, "late": told.late, "failed_cycles": told.failed}
        self.rounds.append(line)
        self.seconds = 0.0
        return line

    def positions(self) -> dict[str, Prefix]:
        """How far both files are written."""
        if self.folder is None:
            return {}
        return {METRICS: self.rounds.position(), CYCLES: self.cycles.position()}

    def sync(self) -> None:
        self.rounds.sync()
        self.cycles.sync()

    def close(self) -> None:
        self.rounds.close()
        self.cycles.close()


class Lines:
    """A file of JSON lines that grows at its end, or only a list where there is no folder to write to."""

    def __init__(self, path: Path | None, kept: Kept) -> None:
        self.lines, self.path, self.size = kept.lines, path, len(kept.content)
        self.held = 0  # lines at the end that are not written yet
        if path is not None:
            write_atomically(path, kept.content)
            self.file = path.open("ab", buffering=0)
            self.digest = sha256(kept.content)

    def append(self, line: Line, hold: bool = False) -> None:
        self.lines.append(line)
        self.held += 1
        if hold:
            return
        if self.path is not None:
            content = "".join(map(dump, self.lines[-self.held :])).encode()
            with named(self.path):
                rest = memoryview(content)
                while rest:
                    rest = rest[self.file.write(rest) :]
            self.digest.update(content)
            self.size += len(content)
        self.held = 0

    def drop(self) -> None:
        """Forget the lines that are held back."""
        del self.lines[len(self.lines) - self.held :]
        self.held = 0

    def position(self) -> Prefix:
        return Prefix(bytes=self.size, sha256=self.digest.hexdigest())

    def sync(self) -> None:
        """Make sure that what a checkpoint builds on is on the disk before it."""
        if self.path is not None:
            with named(self.path):
                os.fsync(self.file.fileno())

    def close(self) -> None:
        if self.path is not None:
            self.file.close()


def simulated(outcome: CycleOutcome) -> Line:
    """What the clock says of a cycle: when it opened, when it was over, and who did not come back."""
    assert outcome.dropped is not None
    assert outcome.stragglers is not None
    return {
        "opened": outcome.opened / 1000,
        "simulated_seconds": outcome.time.now / 1000,
        "failed": outcome.failed,
        "dropped": outcome.dropped.tolist(),
        "late": outcome.stragglers.tolist(),
    }


def dump(line: Line) -> str:
    return json.dumps(line, allow_nan=False) + "\n"


class Altered(ValueError):
    """A file of lines is not the one that a checkpoint was written with."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"not of this {path.name}")
        self.path = path


def beginning(path: Path, expected: Prefix) -> Kept:
    """The lines that a checkpoint builds on; what was written after it is left out. ValueError says why not."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        content = b""
    if len(content) < expected.bytes:
        raise ValueError(f"ahead of {path.name}")
    content = content[: expected.bytes]
    if sha256(content).hexdigest() != expected.sha256:
        raise Altered(path)
    return Kept([json.loads(line) for line in content.splitlines()], content)


def read_lines(path: Path) -> list[Line]:
    """The whole lines of a file, up to the first that is torn."""
    lines: list[Line] = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return lines
    for raw in text.splitlines():
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            break
        if not isinstance(line, dict) or not isinstance(line.get("round"), int):
            break
        lines.append(line)
    return lines
