"""Evaluation of the global model: on a fixed sample of the pooled training data and on the test set."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from fedcluster.data.dataset import Dataset
from fedcluster.data.partition import Ints
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.kernels import EVALUATION_BATCH
from fedcluster.models.metrics import METRICS, Metric, find_metrics, ratio
from fedcluster.models.tasks import Classification, Task

SAMPLE = 2000  # rows of the pooled training data; all of them when there are fewer
CHUNK = 250  # rows at a time, so that activations stay small,
MAX_OUTPUTS = 2**26  # and no more numbers of output than this
ACCURACY = METRICS["accuracy"]
BACKDOOR = "backdoor_success"  # the share of triggered samples that are answered as the attackers want

Sums = dict[str, Tensor]
"""What the loss and the metrics are made from, by name, in float64. Sums of different samples can be added."""


class Evaluator:
    """The loss on `rows` of the training data, and the loss and the metrics on the test data.

    The rows are the same for every method and every round, so that curves are comparable. A federation's server has no
    training data (`rows` is None), perhaps no test data either (`dataset` is None), and then no scores. Where targets
    are standardised, the loss is of these, and metrics are in the targets' own units.
    """

    def __init__(
        self,
        flat_model: FlatModel,
        dataset: Dataset | None,
        rows: Ints | None,
        task: Task | None = None,
        metrics: Sequence[Metric] | None = None,
    ) -> None:
        self.flat_model, self.dataset, self.task, self.threads = flat_model, dataset, task or Classification(), 1
        self.metrics = find_metrics(self.task.metrics) if metrics is None else metrics
        at = None if dataset is None or rows is None else torch.from_numpy(rows)
        self.triggered: tuple[Tensor, Tensor] | None = None  # samples with a backdoor's trigger, and what it asks for
        self.sample = None if dataset is None or at is None else (dataset.x_train[at], dataset.y_train[at])

    def __call__(self, w: Tensor) -> dict[str, float]:
        if self.dataset is None:
            return {}
        train = {} if self.sample is None else {"train_loss": self.measure(w, *self.sample, ())["loss"]}
        test = self.measure(w, self.dataset.x_test, self.dataset.y_test, self.metrics)
        scores = train | {f"test_{name}": value for name, value in test.items()}
        if self.triggered is not None:
            scores[BACKDOOR] = self.measure(w, *self.triggered, (ACCURACY,))[ACCURACY.name]
        return scores

    def directions(self) -> dict[str, bool]:
        """The names of the scores with one value, and whether a higher one is better."""
        train = {} if self.sample is None else {"train_loss": False}
        metrics = {f"test_{metric.name}": metric.higher_is_better for metric in self.metrics if not metric.several}
        backdoor = {} if self.triggered is None else {BACKDOOR: False}
        return {} if self.dataset is None else train | {"test_loss": False} | metrics | backdoor

    @cached_property
    def pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.threads, initializer=torch.set_num_threads, initargs=(1,))

    def measure(self, w: Tensor, x: Tensor, y: Tensor, metrics: Sequence[Metric]) -> dict[str, float]:
        """The mean loss and the metrics at w on these samples, as they are stored."""
        self.load(w)
        return values(self.sums(self.shared, x, y, metrics), metrics)

    def load(self, w: Tensor) -> None:
        """Make w the model that `score` and `sums` are about."""
        self.flat_model.load(w)
        self.flat_model.module.eval()

    @property
    def shared(self) -> Any:
        """`map` by all threads."""
        return map if self.threads == 1 else self.pool.map

    def score(self, x: Tensor, y: Tensor) -> dict[str, float]:
        """The loss and the metrics on these samples, computed by this thread alone."""
        return values(self.sums(map, x, y, self.metrics), self.metrics)

    def sums(self, shared: Any, x: Tensor, y: Tensor, metrics: Sequence[Metric]) -> Sums:
        """What `values` makes the loss and the metrics from. Threads share the chunks, whose sums are added in order.
        The compiled engine has the loss and the accuracy; other metrics are taken from the module's outputs."""
        sums: Sums = {}
        if self.flat_model.network is not None:
            sums = self.compiled(shared, x, y)
        others = [metric for metric in metrics if metric.name != ACCURACY.name or metric.name not in sums]
        if others or not sums:
            size = self.chunk()
            chunks = shared(partial(self.part, others), torch.split(x, size), torch.split(y, size))
            sums = add(chunks) | sums
        return sums

    def compiled(self, shared: Any, x: Tensor, y: Tensor) -> Sums:
        """Loss and accuracy by the compiled engine."""
        network = self.flat_model.network
        assert network is not None
        assert self.dataset is not None
        rows = -(-len(y) // (self.threads * EVALUATION_BATCH)) * EVALUATION_BATCH
        several = shared(partial(network.evaluate, x, y, self.dataset), torch.split(torch.arange(len(y)), rows))
        parts = [part for one in several for part in one]
        totals = {"loss": sum(loss for loss, _ in parts), "accuracy": sum(right for _, right in parts)}
        return {name: torch.tensor([total, len(y)], dtype=torch.float64) for name, total in totals.items()}

    def chunk(self) -> int:
        """Rows at a time."""
        assert self.dataset is not None
        shape = self.task.output_shape(self.dataset.spec) or ()
        return max(1, min(CHUNK, MAX_OUTPUTS // prod(shape)))

    @torch.no_grad()
    def part(self, metrics: Sequence[Metric], rows: Tensor, targets: Tensor) -> Sums:
        """The sums of a chunk."""
        assert self.dataset is not None
        device = self.flat_model.device
        x, y = self.dataset.inputs(rows).to(device), targets.to(device)
        outputs, targets = self.task.predict(self.flat_model.module, x, y)
        count = self.task.count(targets)
        loss = torch.tensor([float(self.task.loss(outputs, targets)) * count, count], dtype=torch.float64)
        outputs, targets = self.dataset.in_units(outputs), self.dataset.in_units(targets)
        return {"loss": loss} | {metric.name: metric.sums(outputs, targets) for metric in metrics}


def add(parts: Iterable[Mapping[str, Tensor]]) -> Sums:
    """The sums of all parts together."""
    total: Sums = {}
    for part in parts:
        for name, sums in part.items():
            total[name] = total[name] + sums if name in total else sums
    return total


def values(sums: Mapping[str, Tensor], metrics: Sequence[Metric]) -> dict[str, float]:
    """The mean loss, then every metric by name."""
    scores = {"loss": ratio(sums["loss"])}
    for metric in metrics:
        scores |= metric.values(sums[metric.name])
    return scores
