"""Checkpoints as a callback: the state is saved every few seconds, and when the run ends or is interrupted."""

import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedcluster.errors import Diverged
from fedcluster.files import write_atomically
from fedcluster.fleet.schedule import Cycle
from fedcluster.runs import checkpoint
from fedcluster.runs.checkpoint import Prefix
from fedcluster.runs.directory import DIVERGED
from fedcluster.runs.metrics import Line, Record
from fedcluster.state import State
from fedcluster.training.callbacks import Callback
from fedcluster.training.recorder import Recorder

SAVE_EVERY = 2.0  # seconds between checkpoints, so that saving costs little however short a round is,
SAVE_SHARE = 20  # and at least so many times what the last one took, however much devices keep


@dataclass(frozen=True)
class Whole:
    """What a checkpoint needs, as it was after the last finished cycle or round."""

    state: State
    seconds: float
    counts: dict[str, int]
    record: dict[str, Prefix]
    movement: Tensor | None


class Checkpoints(Callback):
    """Saves the state and the ledger beside the recorder's files.

    `run` is the digest of the run to which the checkpoints belong. With `every_round` a checkpoint follows every round,
    with `every_cycle` every cycle.
    """

    def __init__(
        self,
        recorder: Recorder,
        record: Record,
        run: str = "",
        every_round: bool = False,
        every_cycle: bool = False,
    ) -> None:
        self.recorder, self.record, self.ledger = recorder, record, record.ledger
        self.path, self.run, self.every_round = recorder.folder / "checkpoint", run, every_round
        self.every_cycle = every_cycle
        self.save_at = time.perf_counter() + SAVE_EVERY
        self.whole: Whole | None = None
        self.open: tuple[Cycle, list[Any]] | None = None  # the latest cycle, and the ledger's rows before it
        self.round = 0  # the unfinished one

    def on_round_start(self, state: State) -> None:
        self.round = state.round

    def on_cycle_start(self, cycle: Cycle, state: State) -> None:
        self.open = cycle, self.ledger.rows(cycle.cohort)

    def on_cycle_end(self, line: Line, state: State) -> None:
        if not self.recorder.held:
            self.commit(state, now=self.every_cycle)

    def on_round_failed(self, state: State) -> None:
        self.commit(state, now=True)

    def on_round_end(self, line: Line, state: State) -> None:
        self.commit(state, now=self.every_round)

    def on_run_end(self, history: list[Line], state: State) -> None:
        if self.whole is not None:
            self.store(self.whole)

    def on_exception(self, error: BaseException) -> None:
        """Save the last whole cycle. Lines that were written after it are cut off by the run that resumes. After a
        divergence, forget what was saved of the round instead: a resumed run begins it again."""
        if isinstance(error, Diverged):
            checkpoint.roll_back(self.path, self.round)
            write_atomically(self.recorder.folder / DIVERGED, f"{error}\n")
            if self.round:
                error.args = (f"{error}; rounds 1 to {self.round} are in {self.recorder.folder}",)
            return
        whole = self.whole
        if whole is None or self.open is None:
            return
        cycle, rows = self.open
        if (cycle.round, cycle.cycle) >= (whole.state.round, whole.state.cycle):
            self.ledger.restore_rows(cycle.cohort, rows)
        self.ledger.counts = dict(whole.counts)
        self.store(whole)

    def commit(self, state: State, now: bool = False) -> None:
        """Note the end of a cycle or a round, whose lines are written; save it now, or when it is due."""
        began = time.perf_counter()
        record, positions = self.record, self.recorder.positions()
        self.whole = Whole(state, record.seconds, dict(self.ledger.counts), positions, record.movement)
        if now or began > self.save_at:
            self.store(self.whole)
            ended = time.perf_counter()
            self.save_at = ended + max(SAVE_EVERY, (ended - began) * SAVE_SHARE)

    def store(self, whole: Whole) -> None:
        """Write a checkpoint after flushing its lines to the disk."""
        self.recorder.sync()
        parts = whole.state, self.ledger, whole.seconds, self.run, whole.record, whole.movement
        checkpoint.store(self.path, *parts)
        self.whole = None
