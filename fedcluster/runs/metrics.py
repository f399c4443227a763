"""The record of a run: one JSON line per round and one per cycle. Everything else is made from these lines.

A checkpoint holds the length and the SHA-256 of each file as it was when the checkpoint was written. A resumed run
keeps exactly these bytes, and refuses files that were altered.
"""

import json
import os
import time
from collections.abc import Sequence
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fedcluster.files import named, write_atomically
from fedcluster.fleet.clock import CycleOutcome
from fedcluster.runs.checkpoint import Prefix
from fedcluster.runs.ledger import Ledger
from fedcluster.runs.movement import measure
from fedcluster.state import State

Line = dict[str, Any]

METRICS, CYCLES = "metrics.jsonl", "cycles.jsonl"


class Kept(NamedTuple):
    """The beginning of a file of lines that a resumed run keeps: the lines, and their bytes."""

    lines: list[Line]
    content: bytes


class Record:
    """The lines of a run so far, in memory, and the ledger that they are made from.

    `seconds` is the training time of the unfinished round, without evaluation, callbacks and saving. A resumed run
    begins with the lines of the earlier one. In a `timed` run the lines have simulated time. `movement` is that of
    the latest cycle that moved the model, sampled (`runs/movement.py`).
    """

    def __init__(
        self,
        ledger: Ledger,
        seconds: float = 0.0,
        history: Sequence[Line] = (),
        cycles: Sequence[Line] = (),
        timed: bool = False,
        movement: Tensor | None = None,
    ) -> None:
        self.ledger, self.seconds, self.timed, self.movement = ledger, seconds, timed, movement
        self.history, self.cycles = list(history), list(cycles)
        before: float = self.history[-1]["elapsed"] if self.history else 0.0
        self.began = time.perf_counter() - before
        self.refused = ledger.counts["refused"]

    def cycle(
        self,
        outcome: CycleOutcome,
        seconds: float,
        before: State,
        after: State,
        remarks: Line | None = None,
    ) -> Line:
        """The line of a cycle. `remarks` are what only some cycles have: why it was undone, for example."""
        cycle, changed = outcome.reported, after.model is not before.model
        moved, cosine, self.movement = measure(before.w, after.w, self.movement)
        self.seconds += seconds
        refusals = self.ledger.finish_cycle(changed)
        number = self.ledger.counts["refused"] - self.refused
        self.refused += number
        line = {
            "round": cycle.round + 1,
            "cycle": cycle.cycle,
            "cluster": cycle.cluster,
            "cohort": cycle.cohort.tolist(),
            "changed": changed,
            "moved": moved,
            "cosine": cosine,
            "refused": number,
            "reasons": [(refusal.device, refusal.reason) for refusal in refusals],
            "missing": self.ledger.missing,
            "seconds": seconds,
            **({"diverged": True} if any(refusal.diverged for refusal in refusals) else {}),
            **({"discarded": self.ledger.discarded} if self.ledger.discarded else {}),
            **{name: remark for name, remark in (remarks or {}).items() if remark},
            **({"faults": self.ledger.faults} if self.ledger.faults else {}),
            **({"staleness": cycle.staleness} if cycle.staleness else {}),
            **(simulated(outcome) if self.timed else {}),
        }
        self.cycles.append(line)
        return line

    def round(self, state: State, scores: dict[str, Any]) -> Line:
        """The line of a round, whose model has these scores."""
        elapsed = time.perf_counter() - self.began
        line = {"round": state.round, **scores, **self.ledger.counts, "seconds": self.seconds, "elapsed": elapsed}
        if discarded := self.discarded(state.round):
            line["discarded"] = discarded
        if self.timed:
            simulated_time = state.time
            line |= {"simulated_seconds": simulated_time.now / 1000, "idle_seconds": simulated_time.idle / 1000}
            line |= {
                "dropped": simulated_time.dropped,
                "late": simulated_time.late,
                "failed_cycles": simulated_time.failed,
            }
        self.history.append(line)
        self.seconds = 0.0
        return line

    def discarded(self, round: int) -> int:
        """The updates that the aggregation rule discarded or changed up to this round, the latest."""
        before: int = self.history[-1].get("discarded", 0) if self.history else 0
        latest = takewhile(lambda cycle: cycle["round"] == round, reversed(self.cycles))
        return before + sum(len(cycle.get("discarded", ())) for cycle in latest)

    def drop_round(self, round: int) -> None:
        """Forget the cycles of a round that is repeated."""
        self.cycles = [line for line in self.cycles if line["round"] <= round]
        self.seconds = 0.0


class Lines:
    """A file of JSON lines that grows at its end. It begins with the bytes that a resumed run keeps."""

    def __init__(self, path: Path, kept: bytes = b"") -> None:
        self.path, self.size, self.digest = path, len(kept), sha256(kept)
        write_atomically(path, kept)
        self.file = path.open("ab", buffering=0)

    def append(self, *lines: Line) -> None:
        content = "".join(map(dump, lines)).encode()
        with named(self.path):
            rest = memoryview(content)
            while rest:
                rest = rest[self.file.write(rest) :]
        self.digest.update(content)
        self.size += len(content)

    def position(self) -> Prefix:
        return Prefix(bytes=self.size, sha256=self.digest.hexdigest())

    def sync(self) -> None:
        """Flush to the disk: a checkpoint is written only after the lines that it builds on."""
        with named(self.path):
            os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


def simulated(outcome: CycleOutcome) -> Line:
    """Simulated time of a cycle: when it began and ended, and the devices whose updates did not come in time."""
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
    """A file of lines does not begin with the bytes that a checkpoint was written with."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"not of this {path.name}")
        self.path = path


def beginning(path: Path, expected: Prefix) -> Kept:
    """The lines that a checkpoint builds on, without those written after it. ValueError if they are not all there."""
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
    """The lines of a file, up to the first that is incomplete."""
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
