"""What all robust rules share: they collect the updates of a cohort, and may put them into buckets first.

A rule needs all updates at once, so a server keeps c x P floats for c updates of P numbers; under torchrun every rank
does. Rows are in the order of the cohort, whatever the order in which updates come, so that the number of workers, of
ranks and the speed of devices change nothing.

Bucketing. Karimireddy, He, Jaggi: Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing, ICLR 2022. The
rows are shuffled, and each `bucketing` of them are replaced by their mean: buckets differ less than honest devices do,
and f malicious devices spoil at most f buckets.

An update keeps its weight p_k wherever a rule takes a mean. What a rule cuts or selects is counted in updates.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from numpy.random import Generator
from torch import Tensor

from fedcluster.algorithms.aggregation.mean import Mean
from fedcluster.experiment import Count, Section
from fedcluster.state import Aggregate, Tensors


class TooFewUpdates(Exception):
    """A cycle has `count` updates, and its aggregator needs `least`."""

    def __init__(self, count: int, least: int) -> None:
        super().__init__(f"{count} updates, and the aggregator needs {least}")
        self.count, self.least = count, least


@dataclass(frozen=True, eq=False)
class Cohort:
    """What an aggregator is told before the updates come: the devices whose updates may come, the model that they
    received, and the median norms of recent cohorts by part of the message (`State.norms`)."""

    devices: list[int]
    model: Tensor
    norms: dict[str, tuple[float, ...]]


@dataclass(frozen=True, eq=False)
class Updates:
    """Updates, or means of buckets of them: `rows` [c, P] in float32, each a whole message, their weights p_k, and the
    devices behind each."""

    rows: Tensor
    weights: list[float]
    devices: list[list[int]]

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, chosen: list[int]) -> "Updates":
        return Updates(self.rows[chosen], [self.weights[row] for row in chosen], [self.devices[row] for row in chosen])

    def mean(self) -> Tensor:
        """The weighted mean, with the bits of the aggregator `mean`."""
        total = Mean({"row": self.rows[0]})
        for row, weight in zip(self.rows, self.weights, strict=True):
            total.accumulate({"row": row}, weight)
        found = total.finish()
        assert found is not None, "there is a row"
        return found.message["row"]


Notes = dict[int, str]
"""What a rule did to an update that it discarded or changed, by row."""


class Robust:
    """A rule has `combine`, and in `least_rows` the number of updates, or of buckets, without which it keeps no
    promise."""

    least_rows: ClassVar[int] = 3

    class Options(Section):
        bucketing: Count = 1

    def __init__(self, spec: Tensors, options: Any = None, rng: Generator | None = None) -> None:
        self.spec, self.rng = spec, rng
        self.options: Any = options or self.Options()
        self.sizes = [tensor.numel() for tensor in spec.values()]
        self.place = next(iter(spec.values())).device

    @classmethod
    def rows_needed(cls, options: Any) -> int:
        return cls.least_rows

    @classmethod
    def least(cls, options: Any) -> int:
        """The number of updates that a cycle needs."""
        needed: int = (cls.rows_needed(options) - 1) * options.bucketing + 1
        return needed

    def start(self, cohort: Cohort) -> None:
        self.cohort, count = cohort, len(cohort.devices)
        self.position = {device: row for row, device in enumerate(cohort.devices)}
        self.rows = torch.zeros(count, sum(self.sizes), device=self.place)
        self.present = torch.zeros(count, 2, dtype=torch.float64, device=self.place)  # 1 and the weight of an update

    def accumulate(self, message: Tensors, weight: float, device: int) -> None:
        row = self.position[device]
        for name, part in zip(self.spec, torch.split(self.rows[row], self.sizes), strict=True):
            part.copy_(message[name])
        self.present[row] = torch.tensor([1.0, weight], dtype=torch.float64)

    def reduce(self, all_reduce: Callable[[Tensor], None]) -> None:
        """Every rank gets all rows. One rank has each, so sums are exact; as whole numbers they keep -0, too."""
        all_reduce(self.rows.view(torch.int32))
        all_reduce(self.present)

    def finish(self) -> Aggregate | None:
        came = [row for row, (one, _) in enumerate(self.present.tolist()) if one]
        if not came:
            return None
        if len(came) < (least := self.least(self.options)):
            raise TooFewUpdates(len(came), least)
        weights, devices = self.present[:, 1].tolist(), [[device] for device in self.cohort.devices]
        updates = Updates(self.rows, weights, devices)
        if len(came) < len(updates):
            updates = updates.select(came)
        total = sum(updates.weights)
        updates = self.buckets(updates)
        found, notes = self.combine(updates)
        message = dict(zip(self.spec, torch.split(found, self.sizes), strict=True))
        discarded = tuple((device, note) for row, note in sorted(notes.items()) for device in updates.devices[row])
        return Aggregate(message, total, discarded)

    def buckets(self, updates: Updates) -> Updates:
        """Means of `bucketing` updates each, in a random order; the last bucket may be smaller."""
        size = self.options.bucketing
        if size == 1:
            return updates
        assert self.rng is not None, "a run has one"
        order = self.rng.permutation(len(updates)).tolist()
        parts = [updates.select(order[start : start + size]) for start in range(0, len(order), size)]
        return Updates(
            torch.stack([part.mean() for part in parts]),
            [sum(part.weights) for part in parts],
            [sorted(device for devices in part.devices for device in devices) for part in parts],
        )

    def combine(self, updates: Updates) -> tuple[Tensor, Notes]:
        """The aggregate [P], and what was discarded or changed."""
        raise NotImplementedError
