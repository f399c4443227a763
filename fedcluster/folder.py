"""The output folder of a run: what it holds, who may write to it, and where a stopped run goes on.

experiment.toml    the experiment, resolved
run.json           what it ran on: versions, sizes, fingerprints, the start's loss
metrics.jsonl      one line per round
cycles.jsonl       one line per cycle
checkpoint/        the two newest checkpoints
curves.png         loss and accuracy over rounds
model.safetensors  the final W; its presence says that the run is finished
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fedcluster import checkpoint
from fedcluster.display import Display
from fedcluster.errors import BadRun
from fedcluster.experiment import Experiment, changes, parse, read
from fedcluster.files import write_atomically
from fedcluster.ledger import Ledger
from fedcluster.record import Line, read_lines
from fedcluster.state import Message, State


class Folder:
    """Held by one process at a time, from opening to closing."""

    def __init__(self, path: Path, experiment: Experiment, resume: bool) -> None:
        self.path, self.experiment = path, experiment
        self.begun = (path / "experiment.toml").exists()
        if self.begun and not resume:
            raise BadRun(f"{path} already holds a run: continue it with --resume, or choose another folder with --out")
        try:
            self.made = not path.exists()
            path.mkdir(parents=True, exist_ok=True)
            self.lock = FileLock(path / ".lock")
            self.lock.acquire(timeout=0)
        except Timeout:
            raise BadRun(f"{path} is being written by another process: wait for it, or choose another --out") from None
        except OSError as error:
            raise BadRun(f"cannot write to {path} ({error.strerror}): choose another folder with --out") from None
        try:
            self.check()
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """A run is continued only by the experiment that it began with."""
        if self.begun:
            stored = parse(read(self.path / "experiment.toml"), str(self.path / "experiment.toml"))
            changed = changes(stored, self.experiment.to_dict())
            if changed:
                raise BadRun(
                    f"{self.path} holds a run of another experiment, which differs in {', '.join(changed)}: "
                    "resume it with the experiment it began with, or choose another --out"
                )

    @property
    def finished(self) -> bool:
        return (self.path / "model.safetensors").exists()

    def noted(self, key: str) -> Any:
        """What a run that is continued has noted of itself."""
        try:
            return json.loads((self.path / "run.json").read_bytes())[key]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def begin(self, facts: dict[str, Any]) -> None:
        """Note what this run is and stands on, or make sure that a resumed one stands on the same."""
        for torn in [*self.path.glob(".*.tmp"), *self.path.glob("checkpoint/.*.tmp")]:
            torn.unlink(missing_ok=True)
        path = self.path / "run.json"
        try:
            stored = json.loads(path.read_bytes())["fingerprints"] if path.exists() else None
        except (ValueError, KeyError, TypeError):
            stored = None
        if stored is not None and stored != facts["fingerprints"]:
            changed = [key for key, value in facts["fingerprints"].items() if stored.get(key) != value]
            raise BadRun(
                f"{self.path} was begun with other {' and '.join(changed) or 'data'} than there are now under the "
                "same name: put the old files back, or choose another --out"
            )
        write_atomically(path, json.dumps(facts, indent=2) + "\n")
        write_atomically(self.path / "experiment.toml", self.experiment.to_toml())

    def restore(
        self, start: State, new: Message, devices: int, cycles: int, display: Display
    ) -> tuple[State, Ledger, float, list[Line], list[Line]]:
        """The newest checkpoint that is whole and whose rounds are all on record, else the start."""
        rounds, turns = read_lines(self.path / "metrics.jsonl"), read_lines(self.path / "cycles.jsonl")
        for path in checkpoint.names(self.path / "checkpoint"):
            try:
                state, ledger, seconds = checkpoint.restore(path, start, new, devices, cycles)
                done = [line for line in rounds if line["round"] <= state.round]
                if [line["round"] for line in done] != list(range(1, state.round + 1)):
                    raise ValueError("ahead of metrics.jsonl")
            except ValueError as error:
                display.say(f"checkpoint {path.stem} is {error}; going back to the one before")
                continue
            position = (state.round + 1, state.cycle)
            return state, ledger, seconds, done, [t for t in turns if (t["round"], t.get("cycle", 0)) < position]
        return start, Ledger(devices), 0.0, [], []

    def write(self, name: str, content: bytes | str) -> None:
        write_atomically(self.path / name, content)

    def close(self) -> None:
        """Let others in; a folder in which nothing came to be is not left behind."""
        self.lock.release()
        if not (self.path / "experiment.toml").exists():
            (self.path / ".lock").unlink(missing_ok=True)
            if self.made:
                with suppress(OSError):
                    self.path.rmdir()


def fresh(name: str) -> Path:
    """A folder under runs/ that nobody has: name, name-2, name-3, ..."""
    number = 1
    while True:
        path = Path("runs", name if number == 1 else f"{name}-{number}")
        if not path.exists():
            return path
        number += 1
