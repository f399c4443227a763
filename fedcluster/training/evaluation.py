"""Evaluation of the global model: on a fixed sample of the pooled training data and on the test set."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcluster.data.dataset import Dataset
from fedcluster.data.partition import Ints
from fedcluster.errors import BadExperiment
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.kernels import EVALUATION_BATCH
from fedcluster.models.tasks import METRICS, Metric

SAMPLE = 2000  # rows of the pooled training data; all of them when there are fewer
CHUNK = 250  # rows at a time, so that activations stay small
ACCURACY = METRICS["accuracy"]


class Evaluator:
    """The loss on `rows` of the training data, and the loss and the metrics on the test data.

    The rows are the same for every method and every round, so that curves are comparable. A federation's server has no
    training data (`rows` is None), perhaps no test data either (`dataset` is None), and then no scores.
    """

    def __init__(
        self, flat_model: FlatModel, dataset: Dataset | None, rows: Ints | None, metrics: Sequence[Metric] = (ACCURACY,)
    ) -> None:
        self.flat_model, self.dataset, self.metrics, self.threads = flat_model, dataset, metrics, 1
        at = None if dataset is None or rows is None else torch.from_numpy(rows)
        self.sample = None if dataset is None or at is None else (dataset.x_train[at], dataset.y_train[at])

    def __call__(self, w: Tensor) -> dict[str, float]:
        if self.dataset is None:
            return {}
        train = {} if self.sample is None else {"train_loss": self.measure(w, *self.sample, ())["loss"]}
        test = self.measure(w, self.dataset.x_test, self.dataset.y_test, self.metrics)
        return train | {f"test_{name}": value for name, value in test.items()}

    def directions(self) -> dict[str, bool]:
        """The names of the scores, and whether a higher value is better."""
        train = {} if self.sample is None else {"train_loss": False}
        metrics = {f"test_{metric.name}": metric.higher_is_better for metric in self.metrics}
        return {} if self.dataset is None else train | {"test_loss": False} | metrics

    @cached_property
    def pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.threads, initializer=torch.set_num_threads, initargs=(1,))

    def measure(self, w: Tensor, x: Tensor, y: Tensor, metrics: Sequence[Metric]) -> dict[str, float]:
        """Mean cross-entropy and metrics at w. Threads share the chunks, whose results are added in order. The compiled
        engine has the loss and the accuracy; other metrics are taken from the module's outputs."""
        self.load(w)
        return self.scores(self.shared, x, y, metrics)

    def load(self, w: Tensor) -> None:
        """Make w the model that `score` is about."""
        self.flat_model.load(w)
        self.flat_model.module.eval()

    @property
    def shared(self) -> Any:
        """`map` by all threads."""
        return map if self.threads == 1 else self.pool.map

    def score(self, x: Tensor, y: Tensor) -> dict[str, float]:
        """The loss and the metrics on these samples, computed by this thread alone."""
        return self.scores(map, x, y, self.metrics)

    def scores(self, shared: Any, x: Tensor, y: Tensor, metrics: Sequence[Metric]) -> dict[str, float]:
        assert self.dataset is not None
        values: dict[str, float] = {}
        if (network := self.flat_model.network) is not None:
            rows = -(-len(y) // (self.threads * EVALUATION_BATCH)) * EVALUATION_BATCH
            found = shared(partial(network.evaluate, x, y, self.dataset), torch.split(torch.arange(len(y)), rows))
            parts = [part for several in found for part in several]
            values["loss"] = sum(loss for loss, _ in parts) / len(y)
            values["accuracy"] = sum(right for _, right in parts) / len(y)
        if any(metric is not ACCURACY for metric in metrics) or not values:
            others = [metric for metric in metrics if metric.name not in values]
            chunks = list(shared(partial(self.part, others), torch.split(x, CHUNK), torch.split(y, CHUNK)))
            values.setdefault("loss", sum(loss for loss, _ in chunks) / len(y))
            for number, metric in enumerate(others):
                total, count = (sum(scores[number][i] for _, scores in chunks) for i in (0, 1))
                values[metric.name] = total / count if count else 0.0
        return {"loss": values["loss"]} | {metric.name: values[metric.name] for metric in metrics}

    @torch.no_grad()
    def part(self, metrics: Sequence[Metric], rows: Tensor, targets: Tensor) -> tuple[float, list[tuple[float, float]]]:
        """The summed loss of a chunk, and the sum and the count of every metric."""
        assert self.dataset is not None
        outputs = self.flat_model.module(self.dataset.inputs(rows).to(self.flat_model.device))
        targets = targets.to(self.flat_model.device)
        loss = F.cross_entropy(outputs, targets, reduction="sum")
        return float(loss), [score(metric, outputs, targets) for metric in metrics]


def score(metric: Metric, outputs: Tensor, targets: Tensor) -> tuple[float, float]:
    try:
        total, count = metric.function(outputs, targets)
        return float(total), float(count)
    except Exception as error:
        raise BadExperiment(f"the metric {metric.name} failed ({type(error).__name__}: {error})") from error
