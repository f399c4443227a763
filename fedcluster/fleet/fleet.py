"""The fleet: who holds which samples, and what else is known of them.

Columnar: arrays over devices, no object per device. A device's samples D(k) are a pure function of
(seed, device), drawn when that device is trained, so a fleet of a million costs megabytes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcluster.data.dataset import Dataset
from fedcluster.errors import BadData, BadExperiment
from fedcluster.experiment import Fleet as Options
from fedcluster.fleet import fleet_file, synthetic, traces
from fedcluster.fleet.fleet_file import DeviceTable
from fedcluster.inputs import located, memory
from fedcluster.rng import stream

Ints = NDArray[Any]  # of any width
Floats = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Fleet:
    """All devices: |D(k)|, the class each holds most of, and functions that tell the rest of one device.

    `draw(k)` gives the rows of the training set that device k holds, `mix(k)` how many of each class.
    `names` are the devices' own names where the data or a file gave them, else they are numbered from 0.
    `known` has what a fleet file, a trace or a generated world says of them.
    A device counts for its samples, or for `cap` times those of the median device if that is less.
    `repeats` says that some class was too small, so that devices hold some of its samples more than once.
    """

    sizes: Ints
    major_class: Ints
    sample_indices: Callable[[int], Ints]
    label_counts: Callable[[int], Ints]
    names: NDArray[np.str_] | None = None
    repeats: bool = False
    known: DeviceTable = field(default_factory=DeviceTable)
    cap: float = np.inf

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def weights(self) -> Floats:
        """p_k = |D(k)| / |D|, as far as |D(k)| counts."""
        counted = capped(self.sizes, self.cap)
        return np.asarray(counted / counted.sum())

    def pooled(self, limit: int, seed: int) -> Ints:
        """D as rows of the training set, or `limit` of them drawn uniformly when there are more."""
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


def capped(sizes: Ints, cap: float) -> Ints:
    """What sizes count for, if none may be more than `cap` times the median."""
    return sizes if np.isinf(cap) else np.minimum(sizes, int(np.median(sizes) * cap))


def build(options: Options, dataset: Dataset, seed: int, cap: float = np.inf) -> Fleet:
    """The fleet that the experiment describes, in which a device counts for `cap` times the median at most."""
    if options.partition == "natural":
        everyone = natural(dataset)
        known = described(options, seed, everyone.names)
        check_count(options, len(everyone), dataset.name)
        if known.samples is not None and (known.samples != everyone.sizes).any():
            k = int(np.flatnonzero(known.samples != everyone.sizes)[0])
            raise BadData(
                f"{options.path}: device {name_of(everyone.names, k)} has {known.samples[k]} samples, but in "
                f"{dataset.name} it has {everyone.sizes[k]}: leave out the column"
            )
        return replace(everyone, known=known, cap=cap)
    known = described(options, seed)
    devices = next((len(column) for column in known.columns().values()), options.devices)
    if known.availability is not None:
        devices = len(known.availability)
    assert devices is not None, "the experiment fills it in"
    assert options.samples is not None, "the experiment fills it in"
    check_count(options, devices, options.path or options.availability)
    sizes = np.full(devices, options.samples) if known.samples is None else known.samples
    return replace(partitioned(options, sizes, dataset, seed), names=known.names, known=known, cap=cap)


def described(options: Options, seed: int, names: Any = None) -> DeviceTable:
    """What is known of the devices; in the order of `names`, where the data name them."""
    day = options.date
    if options.world == "diurnal":
        count = options.devices if names is None else len(names)
        assert count is not None, "the experiment fills it in"
        return synthetic.diurnal(count, seed, day)
    known = DeviceTable()
    if options.path is not None:
        known, table = fleet_file.read(located(options.path, "fleet.path"), day)
        if names is not None:
            known = known.rows(matched(known, table, names))
        names = known.names if known.names is not None else np.arange(len(table)).astype(str)
    if options.availability is not None:
        trace = traces.read(located(options.availability, "fleet.availability"), day)
        if names is None:
            known = DeviceTable(names=np.array(trace.names))
            names = trace.names
        known = replace(known, availability=trace.of(map(str, names)))
    return known


def matched(known: DeviceTable, table: Any, names: Any) -> Ints:
    """The row of the fleet file for each device that the data name. All must be there, and no others."""
    if known.names is None:
        raise BadData(f'{table.path} needs a column device: with fleet.partition = "natural" the data name them')
    place = {str(name): k for k, name in enumerate(names)}
    order = np.full(len(place), -1)
    for row, name in enumerate(known.names.tolist()):
        if name not in place:
            table.refuse(row, f"the data have no device {name!r}")
        order[place[name]] = row
    if (order < 0).any():
        raise BadData(f"{table.path}: device {names[int(np.argmin(order))]} of the data has no row")
    return order


def check_count(options: Options, devices: int, source: Any) -> None:
    if options.devices not in (None, devices):
        raise BadExperiment(f"fleet.devices = {options.devices}, but {source} names {devices}: leave it out")


def check_room(devices: int, classes: int) -> None:
    """For a number for every class of every device."""
    if 8 * devices * classes > memory() / 4:
        raise BadExperiment(f"{devices:,} devices with {classes:,} classes are more than fits into memory: take fewer")


def name_of(names: Any, k: int) -> str:
    return str(names[k]) if names is not None and k < len(names) else str(k)


def partitioned(options: Options, sizes: Ints, dataset: Dataset, seed: int) -> Fleet:
    """Devices of these sizes, with samples of the data dealt out to them."""
    y = dataset.y_train.numpy()
    if options.partition == "iid":
        return iid(sizes, y, dataset.classes, seed)
    by_class = [np.flatnonzero(y == c) for c in range(dataset.classes)]
    empty = [c for c, rows in enumerate(by_class) if len(rows) == 0]
    if empty:
        raise BadData(
            f"class {empty[0]} of {dataset.name} has no training samples, and fleet.partition = "
            f'"{options.partition}" needs some of every class: renumber the labels or use "iid"'
        )
    if options.partition == "dirichlet":
        return dirichlet(sizes, by_class, options.alpha, seed)
    return major_class(sizes, by_class, options.rho_device, seed)


def major_class(sizes: Ints, by_class: list[Ints], rho: float, seed: int) -> Fleet:
    """Every device has a major class with a share rho of its samples; the others share the rest equally.

    Major classes are dealt out evenly over the fleet. Shares are exact to one sample; which classes get
    the odd samples is drawn per device, so that no class is favoured.
    """
    classes = len(by_class)
    major = stream(seed, "major_class").permutation(np.arange(len(sizes)) % classes).astype(np.int32)

    def split(samples: int) -> tuple[int, int, int]:
        """Samples of the major class, of each other class, and odd ones."""
        most = samples if classes == 1 else int(np.floor(rho * samples + 0.5))
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
    return from_label_counts(sizes, major, label_counts, by_class, seed, largest)


def dirichlet(sizes: Ints, by_class: list[Ints], alpha: float, seed: int) -> Fleet:
    """Every device's class shares are drawn from Dirichlet(alpha, ..., alpha), exact to one sample."""
    check_room(len(sizes), len(by_class))
    shares = stream(seed, "dirichlet").dirichlet(np.full(len(by_class), alpha), len(sizes)).astype(np.float32)

    def label_counts(k: int) -> Ints:
        exact = shares[k].astype(np.float64) / shares[k].sum(dtype=np.float64) * sizes[k]
        counts: Ints = np.floor(exact).astype(np.int64)
        counts[np.argsort(counts - exact, kind="stable")[: sizes[k] - counts.sum()]] += 1
        return counts

    largest = np.ceil((shares * sizes[:, None]).max(axis=0)).astype(np.int64)
    return from_label_counts(sizes, shares.argmax(axis=1).astype(np.int32), label_counts, by_class, seed, largest)


def from_label_counts(
    sizes: Ints, major: Ints, label_counts: Callable[[int], Ints], by_class: list[Ints], seed: int, largest: Ints
) -> Fleet:
    """Draw each class's share without replacement where the class is large enough, else with replacement."""

    def sample_indices(k: int) -> Ints:
        rng = stream(seed, "samples", device=k)
        return np.concatenate(
            [
                rows[rng.choice(len(rows), count, replace=count > len(rows), shuffle=False)]
                for rows, count in zip(by_class, label_counts(k), strict=True)
            ]
        )

    repeats = any(count > len(rows) for rows, count in zip(by_class, largest, strict=True))
    return Fleet(sizes, major, sample_indices, label_counts, repeats=repeats)


def iid(sizes: Ints, y: Ints, classes: int, seed: int) -> Fleet:
    """Every device draws uniformly from the whole training set."""

    def sample_indices(k: int) -> Ints:
        rng, size = stream(seed, "samples", device=k), int(sizes[k])
        return rng.choice(len(y), size, replace=size > len(y), shuffle=False)

    def label_counts(k: int) -> Ints:
        return np.bincount(y[sample_indices(k)], minlength=classes)

    commonest = int(np.bincount(y).argmax())
    repeats = bool(sizes.max() > len(y))
    return Fleet(sizes, np.full(len(sizes), commonest, np.int32), sample_indices, label_counts, repeats=repeats)


def natural(dataset: Dataset) -> Fleet:
    """The devices that the data names, each with its own rows."""
    if dataset.device_train is None:
        raise BadData(
            f'fleet.partition = "natural" needs to know whose each row of {dataset.name} is: '
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

    check_room(len(names), dataset.classes)
    counts = np.zeros((len(names), dataset.classes), np.int32)
    np.add.at(counts, (owner, y), 1)
    return Fleet(
        np.bincount(owner),
        counts.argmax(axis=1).astype(np.int32),
        sample_indices,
        label_counts,
        names=names.astype(str),
    )
