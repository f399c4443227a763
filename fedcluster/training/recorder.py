"""The recorder as a callback: it appends the lines of cycles and rounds to the run's files."""

from pathlib import Path

from fedcluster.runs.checkpoint import Prefix
from fedcluster.runs.devices import DEVICES
from fedcluster.runs.metrics import CYCLES, METRICS, Kept, Line, Lines
from fedcluster.state import State
from fedcluster.training.callbacks import Callback


class Recorder(Callback):
    """Writes metrics.jsonl, cycles.jsonl and, in a run that evaluates devices, devices.jsonl. `kept` is what a resumed
    run keeps of each.

    Where failed rounds are repeated (`repeats`, in a federation), the lines of a round's cycles are held back until
    one of them succeeds.
    """

    def __init__(self, folder: Path, kept: dict[str, Kept] | None = None, repeats: bool = False) -> None:
        self.folder, self.repeats = folder, repeats
        kept = kept or dict.fromkeys((METRICS, CYCLES), Kept([], b""))
        self.files = {name: Lines(folder / name, begun.content) for name, begun in kept.items()}
        self.held: list[Line] = []
        self.holding = False

    def on_round_start(self, state: State) -> None:
        self.holding = self.repeats and state.cycle == 0

    def on_cycle_end(self, line: Line, state: State) -> None:
        self.held.append(line)
        self.holding = self.holding and not line["changed"]
        if not self.holding:
            self.files[CYCLES].append(*self.held)
            self.held.clear()

    def on_round_failed(self, state: State) -> None:
        self.held.clear()

    def on_devices_evaluated(self, line: Line, state: State) -> None:
        self.files[DEVICES].append(line)

    def on_round_end(self, line: Line, state: State) -> None:
        self.files[METRICS].append(line)

    def positions(self) -> dict[str, Prefix]:
        """How far the files are written."""
        return {name: lines.position() for name, lines in self.files.items()}

    def sync(self) -> None:
        for lines in self.files.values():
            lines.sync()

    def close(self) -> None:
        for lines in self.files.values():
            lines.close()
