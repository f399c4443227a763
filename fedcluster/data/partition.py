"""A partition: which samples of the training set each device holds.

A device's samples D(k) are a pure function of (seed, device). They are drawn when the device is trained, so a partition
over a million devices takes megabytes. Where a partition shares out the training set, every row has one owner and D(k)
is a slice of the rows sorted by owner.

The partitions that an experiment can name are in `fedcluster.data.partitions`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedcluster.data.dataset import Dataset
from fedcluster.errors import BadData, BadExperiment
from fedcluster.inputs import total_memory
from fedcluster.rng import stream

Ints = NDArray[Any]  # of any width


@dataclass(frozen=True, eq=False)
class Labels:
    """The labels of each device: `counts(k)` is the number of samples of each class, and `major_class[k]` is the class
    of which device k holds the most samples."""

    major_class: Ints
    counts: Callable[[int], Ints]


@dataclass(frozen=True, eq=False)
class HeldOut:
    """The samples of each device that it does not train on: device k has `sizes[k]` of them, and `samples(k)` returns
    their inputs and targets, as they are stored."""

    sizes: Ints
    samples: Callable[[int], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Partition:
    """The samples of each device. `sample_indices(k)` is D(k) as rows of the training set, and `sizes[k]` is |D(k)|.

    `names` are the names of the devices where the data give them. `repeats` is true where a class is smaller than a
    device's share of it, so that the device holds some samples more than once. `dataset` is the data set whose rows
    these are, where it is not the one that was partitioned: features may depend on the device. Where samples are held
    out for testing, they are in `held_out` and no longer among the device's samples; `labels` counts both.
    """

    sizes: Ints
    labels: Labels | None  # None where targets are not classes
    sample_indices: Callable[[int], Ints]
    names: NDArray[np.str_] | None = None
    repeats: bool = False
    dataset: Dataset | None = None
    held_out: HeldOut | None = None

    def __len__(self) -> int:
        return len(self.sizes)

    def label_counts(self, k: int) -> Ints:
        """The number of samples of each class that device k holds."""
        if self.labels is None:
            raise BadData("the label counts of devices are asked for, but targets are not classes")
        return self.labels.counts(k)

    def pooled(self, limit: int, seed: int) -> Ints:
        """D, the samples of all devices, as rows of the training set; `limit` of them, drawn uniformly, if there are
        more."""
        total = int(self.sizes.sum())
        if total <= limit:
            return np.concatenate([self.sample_indices(k) for k in range(len(self))])
        places = np.sort(stream(seed, "pooled").choice(total, limit, replace=False))
        ends = np.cumsum(self.sizes)
        devices = np.searchsorted(ends, places, side="right")
        rows = np.empty(limit, np.int64)
        for k in np.unique(devices):
            mine = devices == k
            rows[mine] = self.sample_indices(int(k))[places[mine] - (ends[k] - self.sizes[k])]
        return rows


def by_owner(owner: Ints, devices: int, dataset: Dataset, names: Any = None) -> Partition:
    """The partition in which row i is on device `owner[i]`, or on none where that is -1."""
    sizes = np.bincount(owner + 1, minlength=devices + 1)[1:]
    if not sizes.all():
        raise BadExperiment(
            f"{int((sizes == 0).sum()):,} of {devices:,} devices would hold no samples of {dataset.name}, "
            f"device {int(sizes.argmin())} for one: use fewer devices"
        )
    order = np.argsort(owner, kind="stable")[len(owner) - int(sizes.sum()) :]
    ends = np.cumsum(sizes)

    def sample_indices(k: int) -> Ints:
        return order[ends[k] - sizes[k] : ends[k]]

    labels = None
    if dataset.target == "class":
        y = dataset.labels("label counts")
        major = most_frequent(owner[order], y[order], devices, dataset.classes)
        labels = Labels(major, counts_of(dataset, sample_indices))
    return Partition(sizes, labels, sample_indices, names)


def most_frequent(owner: Ints, y: Ints, devices: int, classes: int) -> Ints:
    """The most frequent class of every device, the lowest of several. No table of devices by classes is made."""
    pairs, counts = np.unique(owner.astype(np.int64) * classes + y, return_counts=True)
    order = np.lexsort((pairs, -counts, pairs // classes))
    device, first = np.unique(pairs[order] // classes, return_index=True)
    major = np.zeros(devices, np.int32)
    major[device] = pairs[order][first] % classes
    return major


def one_device(rows: Ints, dataset: Dataset) -> Partition:
    """One device that holds these rows of the training set, whatever its number in the fleet that it is of."""
    return replace(of_rows([rows], dataset), sample_indices=lambda k: rows)


def from_rows(given: Sequence[Any], dataset: Dataset, devices: int) -> Partition:
    """The partition that a user's function returned, checked."""
    total = len(dataset.y_train)
    rows = [np.asarray(mine) for mine in given]
    if len(rows) != devices:
        raise BadExperiment(f"fleet.partition: the function returned rows of {len(rows)} devices, not of {devices}")
    for k, mine in enumerate(rows):
        if mine.ndim != 1 or mine.dtype.kind not in "iu" or not len(mine) or mine.min() < 0 or mine.max() >= total:
            raise BadExperiment(
                f"fleet.partition: the function must return, for each device, at least one row number from 0 to "
                f"{total - 1}; for device {k} it returned {mine.dtype} {list(mine.shape)}"
            )
    return of_rows(rows, dataset)


def of_rows(rows: list[Ints], dataset: Dataset) -> Partition:
    """The partition in which each device holds these rows."""
    labels = None
    if dataset.target == "class":
        counts = counts_of(dataset, rows.__getitem__)
        labels = Labels(np.array([counts(k).argmax() for k in range(len(rows))], np.int32), counts)
    return Partition(np.array([len(mine) for mine in rows]), labels, rows.__getitem__)


def counts_of(dataset: Dataset, sample_indices: Callable[[int], Ints]) -> Callable[[int], Ints]:
    """The function from a device to its number of samples of each class."""
    y = dataset.labels("label counts")
    return lambda k: np.bincount(y[sample_indices(k)], minlength=dataset.classes)


def labels_of_one_distribution(devices: int, dataset: Dataset, sample_indices: Callable[[int], Ints]) -> Labels | None:
    """The labels of devices that all draw from the same rows, where targets are classes."""
    if dataset.target != "class":
        return None
    most_common = int(np.bincount(dataset.labels("label counts")).argmax())
    return Labels(np.full(devices, most_common, np.int32), counts_of(dataset, sample_indices))


def by_class_counts(sizes: Ints, labels: Labels, by_class: list[Ints], seed: int, largest: Ints) -> Partition:
    """Draw each device's samples of each class: without replacement if the class is large enough, else with it.
    `largest[c]` is an upper bound of the samples of class c on any device."""

    def sample_indices(k: int) -> Ints:
        rng = stream(seed, "samples", device=k)
        return np.concatenate(
            [
                rows[rng.choice(len(rows), count, replace=count > len(rows), shuffle=False)]
                for rows, count in zip(by_class, labels.counts(k), strict=True)
            ]
        )

    repeats = any(count > len(rows) for rows, count in zip(by_class, largest, strict=True))
    return Partition(sizes, labels, sample_indices, repeats=repeats)


def by_class_shares(sizes: Ints, shares: Ints, by_class: list[Ints], seed: int) -> Partition:
    """Draw each device's samples by its class shares, one row of `shares` a device. Counts are exact to one sample."""

    def label_counts(k: int) -> Ints:
        return rounded(shares[k].astype(np.float64), int(sizes[k]))

    largest = np.ceil((shares * sizes[:, None]).max(axis=0)).astype(np.int64)
    labels = Labels(shares.argmax(axis=1).astype(np.int32), label_counts)
    return by_class_counts(sizes, labels, by_class, seed, largest)


def rounded(shares: NDArray[np.float64], total: int) -> Ints:
    """Whole numbers in these proportions that add up to `total` (largest remainders)."""
    exact = shares / shares.sum(dtype=np.float64) * total
    counts: Ints = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: total - counts.sum()]] += 1
    return counts


def rows_by_class(dataset: Dataset, partition: str) -> list[Ints]:
    """The rows of each class. Every class must have some."""
    y = dataset.labels(f'fleet.partition = "{partition}"')
    order = np.argsort(y, kind="stable")
    by_class = np.split(order, np.cumsum(np.bincount(y, minlength=dataset.classes))[:-1])
    empty = [c for c, rows in enumerate(by_class) if len(rows) == 0]
    if empty:
        raise BadData(
            f"class {empty[0]} of {dataset.name} has no training samples, and fleet.partition = "
            f'"{partition}" needs some of every class: renumber the labels or use "iid"'
        )
    return by_class


def check_memory(devices: int, classes: int) -> None:
    """Refuse a table of devices by classes that does not fit into memory."""
    if 8 * devices * classes > total_memory() / 4:
        raise BadExperiment(f"{devices:,} devices with {classes:,} classes do not fit into memory: use fewer")
