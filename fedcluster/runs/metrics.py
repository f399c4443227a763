"""The record: one JSON line per round and one per cycle. Everything else is made from these lines.

Every checkpoint holds the length and the SHA-256 of both files as they were when it was written. A resumed run keeps
exactly these bytes, and does not continue a record that was altered.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from fedcluster.runs import checkpoint
from fedcluster.runs.checkpoint import Prefix
from fedcluster.fleet.clock import CycleOutcome
from fedcluster.runs.progress import Display
from fedcluster.files import named, write_atomically
from fedcluster.runs.ledger import Ledger
from fedcluster.fleet.schedule import Cycle
from fedcluster.state import Message, State

Line = dict[str, Any]

METRICS, CYCLES = "metrics.jsonl", "cycles.jsonl"
SAVE_EVERY = 2.0  # seconds between checkpoints, so that saving costs little however short a round is,
SAVE_SHARE = 20  # and at least so many times what the last one took, however much devices keep


class Kept(NamedTuple):
    """The beginning of a file of lines that a resumed run continues: as lines, and as the bytes that they are."""

    lines: list[Line]
    content: bytes


@dataclass(frozen=True)
class Whole:
    """What the last cycle that ended left: all that a checkpoint needs."""

    state: State
    seconds: float
    counts: dict[str, int]
    record: dict[str, Prefix]


@dataclass(frozen=True)
class Undo:
    """What a cycle under way changes in place, as it was before: the ledger's columns and what devices keep."""

    cycle: Cycle
    columns: list[Any]
    devices: dict[int, Message | None]


class Recorder:
    """Writes down cycles and rounds, shows them, and saves the state every few seconds.

    `seconds` is the training time of the round so far: from one record to the next, evaluation and saving
    left out. `history` and `turns` are the lines of an earlier run that this one continues. In a `timed` run the
    lines say what the clock says. With `save_every_round` a checkpoint follows every round. `run` is the digest of the run to which the checkpoints belong, `name` how people
    know the device of a number.
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
        run: str = "",
        name: Callable[[int], str] = str,
    ) -> None:
        self.folder, self.display, self.ledger, self.seconds, self.timed = folder, display, ledger, seconds, timed
        self.run, self.name = run, name
        self.rounds = Lines(folder / METRICS if folder else None, history or Kept([], b""))
        self.cycles = Lines(folder / CYCLES if folder else None, turns or Kept([], b""))
        before: float = self.rounds.lines[-1]["elapsed"] if self.rounds.lines else 0.0
        self.mark = time.perf_counter()
        self.save_at = self.mark + SAVE_EVERY
        self.began = self.mark - before
        self.refused = ledger.counts["refused"]
        self.undo: Undo | None = None
        self.whole: Whole | None = None
        self.waited = False
        self.save_every_round = False

    @property
    def history(self) -> list[Line]:
        return self.rounds.lines

    def open(self, cycle: Cycle, state: State) -> None:
        """A cycle begins: note what it will change in place."""
        if self.waited:
            self.mark, self.waited = time.perf_counter(), False
        if self.folder:
            devices = {device: state.devices.get(device) for device in cycle.cohort.tolist()}
            self.undo = Undo(cycle, self.ledger.part(cycle.cohort), devices)

    def fail(self, updates: int) -> None:
        """The open cycle has failed, with so many updates."""
        assert self.undo is not None, "cycles fail in a federation, which has a folder"
        cycle = self.undo.cycle
        self.ledger.fail(cycle.cohort, self.undo.columns)
        if updates:
            where = f"round {cycle.round + 1}, cluster {cycle.cluster}"
            self.display.say(f"{where}: too few updates ({updates}), so the model stays as it is")

    def drop(self, state: State) -> None:
        """No cycle of the round has succeeded, so that it leaves no lines. It is going to be waited: save now."""
        self.cycles.drop()
        self.seconds, self.waited = 0.0, True
        self.save(state, now=True)

    def cycle(self, outcome: CycleOutcome, state: State, changed: bool, hold: bool = False, undone: str | None = None) -> None:
        """`hold` back the line until a cycle of the round succeeds. `undone` says why the cycle was."""
        cycle = outcome.reported
        spent = time.perf_counter() - self.mark
        self.seconds += spent
        refusals = self.ledger.finish_cycle(changed)
        number = self.ledger.counts["refused"] - self.refused
        self.refused += number
        for device, reason in refusals[:3]:
            self.display.say(f"round {cycle.round + 1}: refused the update of device {self.name(device)} ({reason})")
        if len(refusals) > 3:
            self.display.say(f"round {cycle.round + 1}: refused {len(refusals) - 3} more updates of this cycle")
        if undone:
            self.display.say(f"round {cycle.round + 1}, {undone}")
        self.cycles.append(
            hold=hold,
            line={
                "round": cycle.round + 1,
                "cycle": cycle.cycle,
                "cluster": cycle.cluster,
                "cohort": cycle.cohort.tolist(),
                "changed": changed,
                "refused": number,
                "reasons": refusals,
                "missing": self.ledger.missing,
                "seconds": spent,
                **({"undone": undone} if undone else {}),
                **(simulated(outcome) if self.timed else {}),
            },
        )
        self.display.cycle(cycle.round, cycle.cycle, len(cycle.cohort) / spent)
        if hold:
            self.mark = time.perf_counter()
        else:
            self.commit(state)

    def round(self, state: State, scores: dict[str, float]) -> None:
        elapsed = time.perf_counter() - self.began
        line = {"round": state.round, **scores, **self.ledger.counts, "seconds": self.seconds, "elapsed": elapsed}
        if self.timed:
            told = state.time
            line |= {"simulated_seconds": told.now / 1000, "idle_seconds": told.idle / 1000}
            line |= {"dropped": told.dropped, "late": told.late, "failed_cycles": told.failed}
        self.rounds.append(line)
        self.display.round(line)
        self.seconds = 0.0
        self.commit(state, now=self.save_every_round)

    def commit(self, state: State, now: bool = False) -> None:
        """A cycle or a round is over and on record."""
        if self.folder:
            record = {METRICS: self.rounds.position(), CYCLES: self.cycles.position()}
            self.whole = Whole(state, self.seconds, dict(self.ledger.counts), record)
        self.save(state, now)

    def save(self, state: State, now: bool = False) -> None:
        """A checkpoint, if it is time for one."""
        began = time.perf_counter()
        if self.folder and (now or began > self.save_at):
            record = {METRICS: self.rounds.position(), CYCLES: self.cycles.position()}
            self.store(Whole(state, self.seconds, self.ledger.counts, record))
            ended = time.perf_counter()
            self.save_at = ended + max(SAVE_EVERY, (ended - began) * SAVE_SHARE)
        self.mark = time.perf_counter()

    def rescue(self) -> None:
        """A checkpoint of the last whole cycle, when the run is interrupted in the middle of the next: what that one
        has changed in place is undone. Its lines, if there are any, are cut off by whoever resumes."""
        whole, undo = self.whole, self.undo
        if whole is None or self.folder is None:
            return
        if undo is not None and (undo.cycle.round, undo.cycle.cycle) >= (whole.state.round, whole.state.cycle):
            self.ledger.put_back(undo.cycle.cohort, undo.columns)
            for device, message in undo.devices.items():
                if message is not None:
                    whole.state.devices[device] = message
                else:
                    whole.state.devices.pop(device, None)
        self.ledger.counts = dict(whole.counts)
        self.store(whole)

    def store(self, whole: Whole) -> None:
        """A checkpoint, once its lines are on the disk."""
        assert self.folder is not None
        self.rounds.sync()
        self.cycles.sync()
        checkpoint.store(self.folder / "checkpoint", whole.state, self.ledger, whole.seconds, self.run, whole.record)
        self.whole = None  # it is saved

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
