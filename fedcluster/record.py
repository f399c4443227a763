"""The record: one JSON line per round and one per cycle. Everything else is made from these lines."""

import json
import os
import time
from pathlib import Path
from typing import Any, TextIO

from fedcluster import checkpoint
from fedcluster.clock import Turn
from fedcluster.display import Display
from fedcluster.files import write_atomically
from fedcluster.ledger import Ledger
from fedcluster.state import State

Line = dict[str, Any]

SAVE_EVERY = 2.0  # seconds between checkpoints, so that saving costs little however short a round is,
SAVE_SHARE = 20  # and at least so many times what the last one took, however much devices keep


class Recorder:
    """Writes down cycles and rounds, shows them, and saves the state every few seconds.

    `seconds` is the training time of the round so far: from one record to the next, evaluation and saving
    left out. `history` and `turns` are the lines of an earlier run that this one continues. In a `timed` run the
    lines say what the clock says.
    """

    def __init__(
        self,
        folder: Path | None,
        display: Display,
        ledger: Ledger,
        seconds: float = 0.0,
        history: list[Line] | None = None,
        turns: list[Line] | None = None,
        timed: bool = False,
    ) -> None:
        self.folder, self.display, self.ledger, self.seconds, self.timed = folder, display, ledger, seconds, timed
        self.rounds = Lines(folder / "metrics.jsonl" if folder else None, history or [])
        self.cycles = Lines(folder / "cycles.jsonl" if folder else None, turns or [])
        before: float = self.rounds.lines[-1]["elapsed"] if self.rounds.lines else 0.0
        self.mark = time.perf_counter()
        self.save_at = self.mark + SAVE_EVERY
        self.began = self.mark - before
        self.refused = ledger.counts["refused"]

    @property
    def history(self) -> list[Line]:
        return self.rounds.lines

    def cycle(self, turn: Turn, state: State, changed: bool) -> None:
        cycle = turn.back
        spent = time.perf_counter() - self.mark
        self.seconds += spent
        refusals = self.ledger.close(changed)
        number = self.ledger.counts["refused"] - self.refused  # here and elsewhere; why is known only here
        self.refused += number
        for device, reason in refusals[:3]:
            self.display.say(f"round {cycle.round + 1}: refused the update of device {device} ({reason})")
        if len(refusals) > 3:
            self.display.say(f"round {cycle.round + 1}: refused {len(refusals) - 3} more updates of this cycle")
        self.cycles.append(
            {
                "round": cycle.round + 1,
                "cycle": cycle.cycle,
                "cluster": cycle.cluster,
                "cohort": cycle.cohort.tolist(),
                "changed": changed,
                "refused": number,
                "reasons": refusals,
                "missing": self.ledger.missing,
                "seconds": spent,
                **(simulated(turn) if self.timed else {}),
            }
        )
        self.display.cycle(cycle.round, cycle.cycle, len(cycle.cohort) / spent)
        self.save(state)

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
        self.save(state)

    def save(self, state: State, now: bool = False) -> None:
        """A checkpoint, once its lines are on the disk."""
        began = time.perf_counter()
        if self.folder and (now or began > self.save_at):
            self.rounds.sync()
            self.cycles.sync()
            checkpoint.store(self.folder / "checkpoint", state, self.ledger, self.seconds)
            ended = time.perf_counter()
            self.save_at = ended + max(SAVE_EVERY, (ended - began) * SAVE_SHARE)
        self.mark = time.perf_counter()

    def close(self) -> None:
        self.rounds.close()
        self.cycles.close()


class Lines:
    """A file of JSON lines that grows at its end, or only a list where there is no folder to write to."""

    def __init__(self, path: Path | None, kept: list[Line]) -> None:
        self.lines = kept
        self.file: TextIO | None = None
        if path is not None:
            write_atomically(path, "".join(dump(line) for line in kept))
            self.file = path.open("a", encoding="utf-8")

    def append(self, line: Line) -> None:
        self.lines.append(line)
        if self.file is not None:
            self.file.write(dump(line))
            self.file.flush()

    def sync(self) -> None:
        """Make sure that what a checkpoint builds on is on the disk before it."""
        if self.file is not None:
            os.fsync(self.file.fileno())

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def simulated(turn: Turn) -> Line:
    """What the clock says of a cycle: when it opened, when it was over, and who did not come back."""
    assert turn.lost is not None
    assert turn.late is not None
    return {
        "opened": turn.opened / 1000,
        "simulated_seconds": turn.time.now / 1000,
        "failed": turn.failed,
        "dropped": turn.lost.tolist(),
        "late": turn.late.tolist(),
    }


def dump(line: Line) -> str:
    return json.dumps(line, allow_nan=False) + "\n"


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
        except ValueError:
            break
        if not isinstance(line, dict) or not isinstance(line.get("round"), int):
            break
        lines.append(line)
    return lines
