"""The ledger: every message that a device received or sent. One download and one upload a round, no more."""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from fedcluster.errors import BudgetExceeded
from fedcluster.fleet.fleet import Ints
from fedcluster.fleet.schedule import Cycle
from fedcluster.state import Refusal, Remote, Reply, Tensors, Unsent, Update

COUNTS = ("aggregations", "device_updates", "downloads", "uploads", "bytes_down", "bytes_up", "refused")


class Ledger:
    """Totals since the start of the run, and downloads and uploads of every device. `missing` are the devices of the
    latest cohort that sent nothing, `discarded` those whose updates the aggregation rule discarded or changed, and how,
    `faults` what some of it did against the protocol of secure aggregation.

    In centralized training nothing travels: a ledger over no devices counts nothing.
    """

    def __init__(self, devices: int) -> None:
        self.counts = dict.fromkeys(COUNTS, 0)
        self.downloads, self.uploads = np.zeros(devices, np.int64), np.zeros(devices, np.int64)
        self.last_download, self.last_upload = np.full(devices, -1), np.full(devices, -1)
        self.refusals: list[Refusal] = []
        self.discarded: list[tuple[int, str]] = []
        self.faults: list[tuple[int, str]] = []
        self.received = 0
        self.missing: list[int] = []
        self.broadcast = 0  # bytes of the latest one

    def send(self, cycle: Cycle, message: Tensors, phase: int = 0) -> None:
        """Count the downloads of a cohort. Those of later phases are counted, not refused: the run has reported that
        its algorithm needs them."""
        if not len(self.downloads):
            return
        if phase == 0:
            self.missing, self.discarded, self.faults = [], [], []
            self.spend(self.last_download, cycle.cohort, cycle.round, "download")
        self.downloads[cycle.cohort] += 1
        self.counts["downloads"] += len(cycle.cohort)
        self.broadcast = size(message)
        self.counts["bytes_down"] += len(cycle.cohort) * self.broadcast

    def receive(self, replies: Iterable[Reply], cycle: Cycle, upload_spec: Tensors, phase: int = 0) -> Iterator[Update]:
        """Count the uploads of a cohort, and pass on those that this process has. Updates of devices outside the cohort
        and second updates are not counted: `accept` refuses them. A download that could not be sent is not counted."""
        waiting = set(cycle.cohort.tolist()) if len(self.uploads) and upload_spec else set()
        for update in replies:
            if isinstance(update, Unsent):
                self.downloads[update.device] -= 1
                self.counts["downloads"] -= 1
                self.counts["bytes_down"] -= self.broadcast
                continue
            self.received += 1
            if update.device in waiting:
                waiting.remove(update.device)
                if phase == 0:
                    self.spend(self.last_upload, np.array([update.device]), cycle.round, "upload")
                self.uploads[update.device] += 1
                self.counts["uploads"] += 1
                self.counts["device_updates"] += "model" in upload_spec
                self.counts["bytes_up"] += size(upload_spec if isinstance(update, Remote) else update.message)
            if not isinstance(update, Remote):
                yield update
        self.missing = sorted({*self.missing, *waiting})

    def fail(self, devices: Ints, rows: list[Ints]) -> None:
        """Let the devices of a failed cycle take part again in this round. What was sent stays counted. `rows` is what
        `rows` returned before the cycle."""
        self.last_download[devices], self.last_upload[devices] = rows[2:]

    def refuse(self, update: Update, reason: str, diverged: bool) -> None:
        self.refusals.append(Refusal(self.received, update.device, reason, diverged))

    def finish_cycle(self, changed: bool) -> list[Refusal]:
        """Count the cycle's aggregation if it changed the model, and return its refusals in the order in which the
        updates came."""
        self.counts["aggregations"] += bool(len(self.downloads)) and changed
        self.counts["refused"] += len(self.refusals)
        refusals = sorted(self.refusals)
        self.refusals, self.received = [], 0
        return refusals

    @staticmethod
    def spend(last: Ints, devices: Ints, round: int, what: str) -> None:
        over = devices[last[devices] == round]
        if len(over):
            raise BudgetExceeded(
                f"device {over[0]} would {what} a second time in round {round + 1}; "
                f"FedCluster's budget is one {what} per device and round, so the schedule is wrong"
            )
        last[devices] = round

    @property
    def columns(self) -> tuple[Ints, ...]:
        return self.downloads, self.uploads, self.last_download, self.last_upload

    def rows(self, devices: Ints) -> list[Ints]:
        """A copy of the rows of these devices."""
        return [column[devices] for column in self.columns] if len(self.downloads) else []

    def restore_rows(self, devices: Ints, rows: list[Ints]) -> None:
        for column, values in zip(self.columns, rows, strict=False):
            column[devices] = values

    def to_array(self) -> NDArray[np.int64]:
        """The devices that ever took part: their numbers, then the columns."""
        active = np.flatnonzero(self.downloads)
        return np.stack([active, *(column[active] for column in self.columns)])

    def restore(self, array: NDArray[np.int64], counts: dict[str, int]) -> None:
        active = array[0]
        self.downloads[active], self.uploads[active] = array[1], array[2]
        self.last_download[active], self.last_upload[active] = array[3], array[4]
        self.counts = {name: counts[name] for name in COUNTS}


def size(message: Tensors) -> int:
    """Bytes of the tensors; framing depends on the wire and is not counted."""
    return sum(tensor.numel() * tensor.element_size() for tensor in message.values())
