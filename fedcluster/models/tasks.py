"""Metrics: what the global model is scored by on test data, besides its loss.

A metric is a function of the model's outputs (samples x classes) and the targets (samples) of a batch. It returns the
sum of the batch and what to divide it by, so that batches can be added up: accuracy returns the number of correct
predictions and the number of samples.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from fedcluster.errors import BadExperiment
from fedcluster.experiment import import_object

Function = Callable[[Tensor, Tensor], tuple[float | Tensor, float | Tensor]]


@dataclass(frozen=True)
class Metric:
    """A metric's function, its name in metrics.jsonl (after "test_"), and how it is shown."""

    name: str
    function: Function
    percent: bool = False
    higher_is_better: bool = True

    def text(self, value: float) -> str:
        return f"{value:.2%}" if self.percent else f"{value:.4f}"

    @property
    def label(self) -> str:
        return self.name.replace("_", " ")


def correct(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return (outputs.argmax(1) == targets).sum(), len(targets)


def top(k: int, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """The number of samples whose target is among the k highest outputs."""
    best = outputs.topk(min(k, outputs.shape[1]), dim=1).indices
    return (best == targets[:, None]).sum(), len(targets)


METRICS: Mapping[str, Metric] = {
    "accuracy": Metric("accuracy", correct, percent=True),
    "top5_accuracy": Metric("top5_accuracy", partial(top, 5), percent=True),
}


def find_metric(given: Any) -> Metric:
    """A metric of the table by its name, or one of the user's: a function or a Metric, itself or as
    package.module:name. A function's metric has the function's name."""
    if isinstance(given, str) and ":" not in given:
        if given not in METRICS:
            raise BadExperiment(
                f"metrics: there is no {given!r}; use one of {', '.join(METRICS)}, or package.module:name"
            )
        return METRICS[given]
    found = import_object(given) if isinstance(given, str) else given
    if isinstance(found, Metric):
        return found
    name = getattr(found, "__name__", type(found).__name__)
    if not callable(found) or not name.isidentifier() or name == "loss":
        raise BadExperiment(f"metrics: {name} is not a metric; give a function of outputs and targets, or a Metric")
    return Metric(name, found)


def find_metrics(given: Iterable[Any]) -> list[Metric]:
    metrics = [find_metric(one) for one in given]
    if len({metric.name for metric in metrics}) < len(metrics):
        raise BadExperiment(f"metrics: a name is there twice in {', '.join(metric.name for metric in metrics)}")
    return metrics


def recorded_metrics(line: Mapping[str, Any]) -> list[Metric]:
    """The metrics of a line of metrics.jsonl, in their order. How one of the user's is shown is not on record."""
    names = [key.removeprefix("test_") for key in line if key.startswith("test_") and key != "test_loss"]
    return [METRICS.get(name) or Metric(name, _not_recorded) for name in names]


def _not_recorded(outputs: Tensor, targets: Tensor) -> tuple[float, float]:
    raise NotImplementedError("a recorded metric has values, not its function")
