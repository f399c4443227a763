"""The table of trackers, and the callback that feeds them.

A tracker is created before the run as `Tracker(project)`; this is where it imports its library. Then these are called:

    start(run)                 the run begins or resumes; returns how many rounds the tracker has from before
    log(round, numbers)        after every round, and once for every earlier round that the tracker does not have
    finish(files)              all is trained and written: pictures, model, experiment.toml
    abort()                    the run was interrupted or failed

A tracker that raises is reported once and not called again. It never ends a run.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fedcluster.errors import BadExperiment
from fedcluster.experiment import Experiment, import_object
from fedcluster.reporting import Say
from fedcluster.runs.directory import MODEL, Folder
from fedcluster.runs.metrics import Line
from fedcluster.state import State
from fedcluster.training.callbacks import Callback
from fedcluster.training.setup import Setup

TRACKERS = {
    "tensorboard": "fedcluster.training.tracking.tensorboard:TensorBoard",
    "mlflow": "fedcluster.training.tracking.mlflow:MLflow",
    "wandb": "fedcluster.training.tracking.wandb:WandB",
    "csv": "fedcluster.training.tracking.table:CSV",
    "parquet": "fedcluster.training.tracking.table:Parquet",
}
FILES = ("curves.png", "devices.png", "experiment.toml", MODEL)


class TrackedRun(NamedTuple):
    """What a tracker is told at the start. `parameters` are the experiment's keys, such as "local.lr". `resumed` says
    whether the folder's run continues, and `rounds` how many rounds it has recorded."""

    folder: Path
    parameters: dict[str, Any]
    resumed: bool
    rounds: int


class Tracker(Protocol):
    def start(self, run: TrackedRun) -> int: ...
    def log(self, round: int, numbers: dict[str, float]) -> None: ...
    def finish(self, files: Sequence[Path]) -> None: ...
    def abort(self) -> None: ...


class Tracking(Callback):
    """Feeds the trackers of a run. `finish` is called once the folder is complete."""

    def __init__(self, trackers: Mapping[str, Tracker], folder: Folder, say: Say) -> None:
        self.trackers, self.folder, self.say = dict(trackers), folder, say

    def on_run_start(self, setup: Setup, state: State, history: list[Line]) -> None:
        parameters = flatten(setup.experiment.to_dict())
        run = TrackedRun(self.folder.path, parameters, self.folder.begun, len(history))
        there = self.call("start", run)
        for name, rounds in there.items():
            for line in history[rounds or 0 :]:
                self.call("log", line["round"], numbers_of(line), only=name)

    def on_round_end(self, line: Line, state: State) -> None:
        self.call("log", line["round"], numbers_of(line))

    def on_exception(self, error: BaseException) -> None:
        self.call("abort")

    def finish(self) -> None:
        self.call("finish", [path for name in FILES if (path := self.folder.path / name).exists()])

    def call(self, method: str, *arguments: Any, only: str | None = None) -> dict[str, Any]:
        """What each tracker, or `only` one, returns. One that fails is reported, and forgotten."""
        returned = {}
        for name, tracker in [*self.trackers.items()]:
            if only in (None, name):
                try:
                    returned[name] = getattr(tracker, method)(*arguments)
                except Exception as error:
                    del self.trackers[name]
                    why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
                    self.say(f"{name} no longer tracks this run ({why[:200]}); the run goes on")
        return returned


def tracking(experiment: Experiment, folder: Folder | None, say: Say) -> list[Tracking]:
    """The callback that [track] asks for, if it does. A library that is missing is told before the run begins."""
    track = experiment.track
    if track is None or not track.to:
        return []
    trackers = {str(name): find(name)(track.project) for name in track.to}
    if folder is None:
        say("track.to: a run without a folder is not tracked; give run() the argument out")
        return []
    return [Tracking(trackers, folder, say)]


def find(name: Any) -> Any:
    """A tracker's class, by its name, as `package.module:name`, or in Python itself."""
    return import_object(TRACKERS.get(name, name)) if isinstance(name, str) else name


def missing(library: str) -> BadExperiment:
    return BadExperiment(f'track.to: {library} is not installed; pip install "fedcluster[track]" installs it')


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys as dotted ones: {"local": {"lr": 0.1}} -> {"local.lr": 0.1}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def numbers_of(line: Line) -> dict[str, float]:
    """The numbers of a line of metrics.jsonl. Of a list, each has its position in its name: per_class_accuracy.3."""
    numbers: dict[str, float] = {}
    for key, value in flatten(line).items():
        if isinstance(value, list):
            numbers |= {f"{key}.{n}": float(one) for n, one in enumerate(value) if isinstance(one, int | float)}
        elif isinstance(value, int | float) and key != "round":
            numbers[key] = float(value)
    return numbers
