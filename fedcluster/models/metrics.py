"""Metrics: what the global model is scored by on test data, besides its loss.

A metric is a function of the outputs and the targets of a batch, as the task has them (see `tasks`), that returns sums.
Sums of batches, or of devices, are added, and `value` makes the metric from the total. Without a `value` the function
returns (sum, count) and the metric is their ratio: accuracy returns the number of correct predictions and the number of
samples. A metric may have several values, such as one for each class; they are recorded as name/part.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcluster.data.targets import IGNORED, PLURALS
from fedcluster.errors import BadExperiment
from fedcluster.experiment import import_object

Statistics = Callable[[Tensor, Tensor], Tensor | Sequence[float | Tensor]]
Value = Callable[[Tensor], float | Mapping[str, float]]

BINS, LARGEST_LOGIT = 4000, 20.0  # of the logits that average precision is computed from: bins of 0.01


def ratio(sums: Tensor) -> float:
    """A sum divided by a count; 0 where nothing was counted."""
    return float(sums[0] / sums[1]) if sums[1] else 0.0


@dataclass(frozen=True)
class Metric:
    """A metric: its name in metrics.jsonl (after "test_"), its sums, what they come to, and how it is shown.

    `targets` are the kinds of targets that it can be used with; empty means any.
    """

    name: str
    statistics: Statistics
    percent: bool = False
    higher_is_better: bool = True
    value: Value = ratio
    targets: tuple[str, ...] = ()
    several: bool = False

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The sums of a batch, float64 on the CPU."""
        try:
            statistics: Any = self.statistics(outputs, targets)
            if not isinstance(statistics, Tensor):
                statistics = torch.tensor([float(part) for part in statistics], dtype=torch.float64)
            sums: Tensor = statistics.detach().to("cpu", torch.float64)
            return sums
        except Exception as error:  # code of the user's may raise anything
            raise BadExperiment(f"the metric {self.name} failed ({type(error).__name__}: {error})") from error

    def values(self, sums: Tensor) -> dict[str, float]:
        """The metric as it is recorded, by name; several, as name/part, where it has several values."""
        try:
            result: Any = self.value(sums)
            if isinstance(result, Mapping):
                return {f"{self.name}/{part}": float(value) for part, value in result.items()}
            return {self.name: float(result)}
        except Exception as error:
            raise BadExperiment(f"the metric {self.name} failed ({type(error).__name__}: {error})") from error

    def text(self, value: float) -> str:
        return f"{value:.2%}" if self.percent else f"{value:.4f}"

    @property
    def label(self) -> str:
        return self.name.replace("_", " ")


# Classes: outputs are scores [N, classes], targets [N].


def correct(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return (outputs.argmax(1) == targets).sum(), len(targets)


def top(k: int, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """The number of samples whose target is among the k highest outputs."""
    best = outputs.topk(min(k, outputs.shape[1]), dim=1).indices
    return (best == targets[:, None]).sum(), len(targets)


def by_class(outputs: Tensor, targets: Tensor) -> Tensor:
    """True positives, targets and predictions of each class, [3, classes]."""
    classes, predicted = outputs.shape[1], outputs.argmax(1)
    hits = targets[predicted == targets]
    return torch.stack([torch.bincount(labels, minlength=classes) for labels in (hits, targets, predicted)])


def macro_f1(sums: Tensor) -> float:
    """The mean over classes of 2 TP / (targets + predictions); classes that never occur are left out."""
    hits, targets, predicted = sums
    there = targets + predicted > 0
    return float((2 * hits[there] / (targets + predicted)[there]).mean()) if there.any() else 0.0


def recall_of_classes(sums: Tensor) -> dict[str, float]:
    """The share of each class's samples that are predicted as such; classes without samples are left out."""
    return {str(c): float(hits / count) for c, (hits, count) in enumerate(sums[:2].T) if count}


# Numbers: outputs and targets are [N] or [N, T].


def square_errors(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return (outputs.double() - targets.double()).square().sum(), targets.numel()


def absolute_errors(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return (outputs.double() - targets.double()).abs().sum(), targets.numel()


def moments(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of each number: the count, and the sums of y, y^2 and the squared error, [4, T]."""
    y, error = targets.double(), outputs.double() - targets.double()
    y, error = y.reshape(len(y), -1), error.reshape(len(y), -1)
    return torch.stack([torch.ones_like(y).sum(0), y.sum(0), y.square().sum(0), error.square().sum(0)])


def r2(sums: Tensor) -> float:
    """1 - sum (f - y)^2 / sum (y - mean y)^2, the mean over the numbers of a sample; 0 for one that is constant."""
    count, total, squares, errors = sums
    spread = squares - total.square() / count
    known = spread > 1e-12 * squares
    return float(torch.where(known, 1 - errors / spread.where(known, torch.ones(())), 0.0).mean())


# Several labels: outputs are logits [N, labels], targets 0 or 1.


def label_counts(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """True positives, targets and predictions, of all labels together."""
    predicted = outputs > 0
    return (predicted & (targets > 0)).sum(), targets.sum(), predicted.sum()


def micro_f1(sums: Tensor) -> float:
    """2 TP / (targets + predictions)."""
    hits, targets, predicted = sums
    return float(2 * hits / (targets + predicted)) if targets + predicted else 0.0


def score_histograms(outputs: Tensor, targets: Tensor) -> Tensor:
    """How many positives and negatives of each label have a logit in each of BINS bins, [2, labels, BINS]."""
    labels = outputs.shape[1]
    logits = outputs.double().nan_to_num().clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
    bins = ((logits / LARGEST_LOGIT + 1) * (BINS / 2)).long().clamp(max=BINS - 1)
    bins += BINS * torch.arange(labels, device=outputs.device)
    counts = [torch.bincount(bins[chosen], minlength=labels * BINS) for chosen in (targets > 0, targets <= 0)]
    return torch.stack(counts).view(2, labels, BINS)


def mean_average_precision(sums: Tensor) -> float:
    """The mean over labels of sum_b (R_b - R_{b-1}) P_b over the bins of logits, from the highest on; labels without
    positives are left out."""
    positives, negatives = sums.flip(2).cumsum(2)
    there = positives[:, -1] > 0
    if not there.any():
        return 0.0
    positives, negatives = positives[there], negatives[there]
    recall = positives / positives[:, -1:]
    precision = positives / (positives + negatives).clamp(min=1)
    steps = torch.diff(recall, prepend=torch.zeros_like(recall[:, :1]))
    return float((steps * precision).sum(1).mean())


# Tokens: outputs are scores [N, S, vocabulary], targets [N, S].


def correct_tokens(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    counts = targets != IGNORED
    return ((outputs.argmax(-1) == targets) & counts).sum(), counts.sum()


def token_losses(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(outputs.flatten(0, 1).double(), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, (targets != IGNORED).sum()


def perplexity(sums: Tensor) -> float:
    """exp of the mean cross-entropy of a token, up to the largest that can be written."""
    mean = ratio(sums)
    return math.exp(min(mean, 700.0)) if math.isfinite(mean) else mean


CLASS, NUMBER, MULTILABEL, TOKEN = ("class",), ("number",), ("multilabel",), ("token",)

METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("accuracy", correct, percent=True, targets=CLASS),
        Metric("top5_accuracy", partial(top, 5), percent=True, targets=CLASS),
        Metric("macro_f1", by_class, percent=True, value=macro_f1, targets=CLASS),
        Metric("per_class_accuracy", by_class, percent=True, value=recall_of_classes, targets=CLASS, several=True),
        Metric("mse", square_errors, higher_is_better=False, targets=NUMBER),
        Metric("rmse", square_errors, higher_is_better=False, value=lambda sums: ratio(sums) ** 0.5, targets=NUMBER),
        Metric("mae", absolute_errors, higher_is_better=False, targets=NUMBER),
        Metric("r2", moments, value=r2, targets=NUMBER),
        Metric("micro_f1", label_counts, percent=True, value=micro_f1, targets=MULTILABEL),
        Metric("map", score_histograms, percent=True, value=mean_average_precision, targets=MULTILABEL),
        Metric("token_accuracy", correct_tokens, percent=True, targets=TOKEN),
        Metric("perplexity", token_losses, higher_is_better=False, value=perplexity, targets=TOKEN),
    )
}


def find_metric(given: Any) -> Metric:
    """A metric of the table by its name, or one of the user's, itself or as package.module:name: a function, a Metric,
    or an object or class with `statistics` and `value`. A metric is called by the name of its function or class, or by
    its `name`."""
    if isinstance(given, str) and ":" not in given:
        if given not in METRICS:
            raise BadExperiment(
                f"metrics: there is no {given!r}; use one of {', '.join(METRICS)}, or package.module:name"
            )
        return METRICS[given]
    metric = import_object(given) if isinstance(given, str) else given
    if isinstance(metric, Metric):
        return metric
    whole = hasattr(metric, "statistics") and hasattr(metric, "value")
    if whole and isinstance(metric, type):
        metric = metric()
    name = str(getattr(metric, "name", None) or getattr(metric, "__name__", type(metric).__name__))
    if not (whole or callable(metric)) or not name.isidentifier() or name == "loss":
        raise BadExperiment(
            f"metrics: {name} is not a metric; give a function of outputs and targets, a Metric, or a class with "
            "statistics and value"
        )
    if not whole:
        return Metric(name, metric)
    shown = {key: getattr(metric, key) for key in ("percent", "higher_is_better", "targets") if hasattr(metric, key)}
    return Metric(name, metric.statistics, value=metric.value, **shown)


def find_metrics(given: Iterable[Any], target: str | None = None) -> list[Metric]:
    """The metrics that are asked for. Those of the table must fit the kind of the targets."""
    metrics = [find_metric(one) for one in given]
    if len({metric.name for metric in metrics}) < len(metrics):
        raise BadExperiment(f"metrics: a name appears twice in {', '.join(metric.name for metric in metrics)}")
    for metric in metrics:
        if target is not None and metric.targets and target not in metric.targets:
            fitting = [name for name, other in METRICS.items() if target in other.targets]
            raise BadExperiment(
                f"metrics: {metric.name} cannot be used, because the targets are {PLURALS[target]}: use "
                f"{', '.join(fitting)}, or one of your own"
            )
    return metrics


def recorded_metrics(line: Mapping[str, Any]) -> list[Metric]:
    """The metrics of a line of metrics.jsonl that have one value, in their order. How one of the user's is shown is not
    on record."""
    names = [key.removeprefix("test_") for key in line if key.startswith("test_") and key != "test_loss"]
    return [METRICS.get(name) or Metric(name, _not_recorded) for name in names if "/" not in name]


def _not_recorded(outputs: Tensor, targets: Tensor) -> Tensor:
    raise NotImplementedError("a recorded metric has values, not its function")
