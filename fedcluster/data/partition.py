"""Partitions: which samples of the training set each device holds.

A device's samples D(k) are a pure function of (seed, device). They are drawn when the device is trained, so a partition
over a million devices takes megabytes.

A partition of your own is a function `(dataset, sizes, rng, options) -> rows`: the rows of the training set that each
device holds, one array per device. `sizes` is the number of samples that each device should hold.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcluster.data.dataset import Dataset
from fedcluster.errors import BadData, BadExperiment
from fedcluster.experiment import Fleet as Options
from fedcluster.experiment import import_object
from fedcluster.inputs import memory
from fedcluster.rng import stream

Ints = NDArray[Any]  # of any width


@dataclass(frozen=True, eq=False)
class Labels:
    """The labels of each device: `counts(k)` is the number of samples of each class, and `major_class[k]` is the class
    of which device k holds the most samples."""

    major_class: Ints
    counts: Callable[[int], Ints]


@dataclass(frozen=True, eq=False)
class Partition:
    """The samples of each device. `sample_indices(k)` is D(k) as rows of the training set, and `sizes[k]` is |D(k)|.

    `names` are the names of the devices where the data give them. `repeats` is true where a class is smaller than a
    device's share of it, so that the device holds some samples more than once.
    """

    sizes: Ints
    labels: Labels
    sample_indices: Callable[[int], Ints]
    names: NDArray[np.str_] | None = None
    repeats: bool = False

    def __len__(self) -> int:
        return len(self.sizes)

    def label_counts(self, k: int) -> Ints:
        """The number of samples of each class that device k holds."""
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


def build(options: Options, dataset: Dataset, seed: int, sizes: Ints | None = None) -> Partition:
    """The partition that `fleet.partition` names, for devices of these sizes. With "natural", the data give the
    sizes."""
    method: Any = options.partition
    if isinstance(method, str) and method in PARTITIONS:
        return PARTITIONS[method](dataset, sizes, options, seed)
    function = import_object(method, "dataset", "sizes", "rng", "options") if isinstance(method, str) else method
    assert sizes is not None
    return from_rows(function(dataset, sizes, stream(seed, "partition"), options), dataset, len(sizes))


def major_class(dataset: Dataset, sizes: Ints, options: Options, seed: int) -> Partition:
    """Every device has a major class with a share `rho_device` of its samples. Other classes share the rest equally.

    The major classes are spread evenly over the fleet. Shares are exact to one sample. The classes that get the odd
    samples are drawn per device, so that no class is favoured.
    """
    by_class = rows_by_class(dataset, options)
    classes = len(by_class)
    major = stream(seed, "major_class").permutation(np.arange(len(sizes)) % classes).astype(np.int32)

    def split(samples: int) -> tuple[int, int, int]:
        """The number of samples of the major class, of each other class, and of odd samples."""
        most = samples if classes == 1 else int(np.floor(options.rho_device * samples + 0.5))
        return most, *divmod(samples - most, max(classes - 1, 1))

    def label_counts(k: int) -> Ints:
        most, each, odd = split(int(sizes[k]))
        counts = np.full(classes, each)
        counts[major[k]] = most
        others = np.delete(np.arange(classes), major[k])
        counts[stream(seed, "odd_samples", device=k).permutation(others)[:odd]] += 1
        return counts

    most, each, odd = split(int(sizes.max()))
    largest = np.array([max(most, each + (odd > 0))] * classes)
    return from_labels(sizes, Labels(major, label_counts), by_class, seed, largest)


def dirichlet(dataset: Dataset, sizes: Ints, options: Options, seed: int) -> Partition:
    """The class shares of every device are drawn from Dirichlet(alpha, ..., alpha), and are exact to one sample."""
    by_class = rows_by_class(dataset, options)
    check_memory(len(sizes), len(by_class))
    alpha = np.full(len(by_class), options.alpha)
    shares = stream(seed, "dirichlet").dirichlet(alpha, len(sizes)).astype(np.float32)

    def label_counts(k: int) -> Ints:
        exact = shares[k].astype(np.float64) / shares[k].sum(dtype=np.float64) * sizes[k]
        counts: Ints = np.floor(exact).astype(np.int64)
        counts[np.argsort(counts - exact, kind="stable")[: sizes[k] - counts.sum()]] += 1
        return counts

    largest = np.ceil((shares * sizes[:, None]).max(axis=0)).astype(np.int64)
    labels = Labels(shares.argmax(axis=1).astype(np.int32), label_counts)
    return from_labels(sizes, labels, by_class, seed, largest)


def iid(dataset: Dataset, sizes: Ints, options: Options, seed: int) -> Partition:
    """Every device draws uniformly from the whole training set."""
    y = dataset.y_train.numpy()

    def sample_indices(k: int) -> Ints:
        rng, size = stream(seed, "samples", device=k), int(sizes[k])
        return rng.choice(len(y), size, replace=size > len(y), shuffle=False)

    def label_counts(k: int) -> Ints:
        return np.bincount(y[sample_indices(k)], minlength=dataset.classes)

    most_common = np.full(len(sizes), int(np.bincount(y).argmax()), np.int32)
    return Partition(sizes, Labels(most_common, label_counts), sample_indices, repeats=bool(sizes.max() > len(y)))


def natural(dataset: Dataset, sizes: Ints | None, options: Options, seed: int) -> Partition:
    """The devices that the data name, each with its own rows."""
    if dataset.device_train is None:
        raise BadData(
            f'fleet.partition = "natural" needs to know which device holds each row of {dataset.name}: '
            "give device_train in the .npz, or a column named device"
        )
    names, owner = np.unique(dataset.device_train, return_inverse=True)
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner))
    y = dataset.y_train.numpy()

    def sample_indices(k: int) -> Ints:
        return order[ends[k - 1] if k else 0 : ends[k]]

    def label_counts(k: int) -> Ints:
        return np.bincount(y[sample_indices(k)], minlength=dataset.classes)

    check_memory(len(names), dataset.classes)
    counts = np.zeros((len(names), dataset.classes), np.int32)
    np.add.at(counts, (owner, y), 1)
    labels = Labels(counts.argmax(axis=1).astype(np.int32), label_counts)
    return Partition(np.bincount(owner), labels, sample_indices, names=names.astype(str))


PARTITIONS: dict[str, Callable[[Dataset, Any, Options, int], Partition]] = {
    "major_class": major_class,
    "dirichlet": dirichlet,
    "iid": iid,
    "natural": natural,
}


def names_devices(partition: Any) -> bool:
    """Whether the partition comes from the data, which then name the devices."""
    return isinstance(partition, str) and PARTITIONS.get(partition) is natural


def one_device(rows: Ints, dataset: Dataset) -> Partition:
    """One device that holds these rows of the training set."""

    def label_counts(k: int) -> Ints:
        return np.bincount(dataset.y_train.numpy()[rows], minlength=dataset.classes)

    major = np.array([label_counts(0).argmax()], np.int32)
    return Partition(np.array([len(rows)]), Labels(major, label_counts), lambda k: rows)


def from_rows(given: Sequence[Any], dataset: Dataset, devices: int) -> Partition:
    """The partition that a user's function returned, checked."""
    y = dataset.y_train.numpy()
    rows = [np.asarray(mine) for mine in given]
    if len(rows) != devices:
        raise BadExperiment(f"fleet.partition: the function returned rows of {len(rows)} devices, not of {devices}")
    for k, mine in enumerate(rows):
        if mine.ndim != 1 or mine.dtype.kind not in "iu" or not len(mine) or mine.min() < 0 or mine.max() >= len(y):
            raise BadExperiment(
                f"fleet.partition: the function must return, for each device, at least one row number from 0 to "
                f"{len(y) - 1}; for device {k} it returned {mine.dtype} {list(mine.shape)}"
            )

    def label_counts(k: int) -> Ints:
        return np.bincount(y[rows[k]], minlength=dataset.classes)

    major = np.array([label_counts(k).argmax() for k in range(devices)], np.int32)
    return Partition(np.array([len(mine) for mine in rows]), Labels(major, label_counts), rows.__getitem__)


def from_labels(sizes: Ints, labels: Labels, by_class: list[Ints], seed: int, largest: Ints) -> Partition:
    """Draw each device's samples of each class: without replacement if the class is large enough, else with it."""

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


def rows_by_class(dataset: Dataset, options: Options) -> list[Ints]:
    """The rows of each class. Every class must have some."""
    y = dataset.y_train.numpy()
    by_class = [np.flatnonzero(y == c) for c in range(dataset.classes)]
    empty = [c for c, rows in enumerate(by_class) if len(rows) == 0]
    if empty:
        raise BadData(
            f"class {empty[0]} of {dataset.name} has no training samples, and fleet.partition = "
            f'"{options.partition}" needs some of every class: renumber the labels or use "iid"'
        )
    return by_class


def check_memory(devices: int, classes: int) -> None:
    """Refuse a table of devices by classes that does not fit into memory."""
    if 8 * devices * classes > memory() / 4:
        raise BadExperiment(f"{devices:,} devices with {classes:,} classes do not fit into memory: use fewer")
