"""Scores of a run's model: on its test data, on other data, and by device."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedcluster.data import sources
from fedcluster.data.dataset import Dataset
from fedcluster.data.targets import PLURALS
from fedcluster.errors import BadData, BadExperiment, BadRun
from fedcluster.experiment import Data, load
from fedcluster.models.metrics import Metric
from fedcluster.reporting import Say
from fedcluster.runs.devices import TABLE, score_names, write_table
from fedcluster.runs.directory import BEST
from fedcluster.runs.metrics import Line
from fedcluster.runs.plots import device_plot
from fedcluster.runs.progress import tracked
from fedcluster.training.best_model import stored_round
from fedcluster.training.load_model import rounds_of, saved_tensors
from fedcluster.training.open_data import with_targets
from fedcluster.training.setup import Setup, prepare
from fedcluster.training.threads import repeatable

COLUMNS = ("features", "target", "device", "categories", "encoding", "standardise", "tokenizer", "length")


@dataclass(frozen=True)
class Evaluation:
    """The scores of a model on the test part of a data set, and, where devices were scored, theirs: a line of
    devices.jsonl and its summary."""

    data: str
    samples: int
    round: int
    scores: dict[str, float]
    metrics: list[Metric]
    names: Any = None  # of the devices
    by_device: Line | None = None
    summary: dict[str, Any] = field(default_factory=dict)

    def shown(self) -> list[Metric]:
        """The metrics that have one value."""
        return [metric for metric in self.metrics if metric.name in self.scores]

    def texts(self) -> dict[str, Callable[[float | None], str]]:
        """How the scores of devices are written, by name."""
        assert self.by_device is not None
        known = {metric.name: metric for metric in self.metrics}

        def writer(name: str) -> Callable[[float | None], str]:
            text = known[name].text if name in known else "{:.4f}".format
            return lambda value: "-" if value is None else text(value)

        return {name: writer(name) for name in score_names(self.by_device)}


def evaluate(run: Path, data: str | None, devices: bool, best: bool, workers: int, say: Say) -> Evaluation:
    """Score a run's model. Other data are prepared as the run's own data were."""
    tensors, rounds, experiment = saved_tensors(run, best), rounds_of(run), load(run / "experiment.toml")
    with repeatable():
        setup = prepare(experiment, say, track=tracked)
        setup.evaluate.threads = workers
        if devices and setup.evaluate_devices is None:
            raise BadExperiment("--devices needs samples that devices hold out, but the run's fleet.test_share is 0")
        assert setup.dataset is not None
        tested = setup.dataset if data is None else other_data(setup, data, say)
        try:
            w = setup.flat_model.from_state_dict(tensors)
        except ValueError as error:
            raise BadRun(f"the saved model does not fit the model of {run} ({error})") from None
        round = stored_round(run / BEST) if best else rounds
        setup.evaluate.dataset = tested
        scores = setup.evaluate.measure(w, tested.x_test, tested.y_test, setup.evaluate.metrics)
        line, summary = None, dict[str, Any]()
        if devices and setup.evaluate_devices:
            several = range(setup.clusters.count if setup.experiment.pluralistic and not best else 0)
            by_cluster = [setup.flat_model.from_state_dict(saved_tensors(run, cluster=K)) for K in several]
            line, summary = setup.evaluate_devices.measure(w, round, by_cluster)
    metrics = list(setup.evaluate.metrics)
    return Evaluation(tested.name, len(tested.y_test), round, scores, metrics, setup.fleet.names, line, summary)


def other_data(setup: Setup, name: str, say: Say) -> Dataset:
    """Another data set, prepared with the statistics, levels and classes of the one that the model was trained on."""
    trained, data = setup.dataset, setup.experiment.data
    assert trained is not None
    if data.tokenizer == "characters":
        raise BadData(
            "--data: the run numbers characters by its training text, and other text has others: train with "
            'data.tokenizer = "bytes", or a tokenizer from disk'
        )
    keys = {key: getattr(data, key) for key in COLUMNS if getattr(data, key) is not None}
    given = Data(**keys | json.loads(trained.preparation) | {"name": name})
    other = with_targets(sources.open_for_scores(given, say, setup.task.target), setup.task)
    unlike = other.shape != trained.shape or other.x_test.dtype != trained.x_test.dtype
    if unlike or other.outputs > trained.outputs or other.vocabulary > trained.vocabulary:
        what = PLURALS[trained.target]
        raise BadData(
            f"--data: {other.name} has samples {list(other.shape)} of {other.outputs} {what} ({other.x_test.dtype}), "
            f"but the model was trained on {list(trained.shape)} of {trained.outputs} ({trained.x_test.dtype})"
        )
    if trained.scale is None or trained.shift is None:
        return other
    return other.standardised(trained.scale.reshape(-1).tolist(), trained.shift.reshape(-1).tolist())


def write(evaluation: Evaluation, out: Path) -> list[Path]:
    """The scores of the devices as a table, and their distribution as a plot."""
    assert evaluation.by_device is not None
    out.mkdir(parents=True, exist_ok=True)
    write_table([evaluation.by_device], out / TABLE, evaluation.names)
    device_plot([evaluation.by_device], out / "devices.png", evaluation.metrics, title=evaluation.data)
    return [out / TABLE, out / "devices.png"]
