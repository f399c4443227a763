"""The fleet: who holds which samples.

Columnar: arrays over devices, no object per device. A device's samples D(k) are a pure function of
(seed, device), drawn when that device is trained, so a fleet of a million costs megabytes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcluster.dataset import Dataset
from fedcluster.errors import BadData, BadExperiment
from fedcluster.experiment import Fleet as Options
from fedcluster.rng import stream

Ints = NDArray[Any]  # of any width
Floats = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Fleet:
    """All devices: |D(k)|, the class each holds most of, and functions that tell the rest of one device.

    `draw(k)` gives the rows of the training set that device k holds, `mix(k)` how many of each class.
    `names` are the devices' own names where the data gave them, else they are numbered from 0.
    `repeats` says that some class was too small, so that devices hold some of its samples more than once.
    """

    sizes: Ints
    major_class: Ints
    draw: Callable[[int], Ints]
    mix: Callable[[int], Ints]
    names: NDArray[np.str_] | None = None
    repeats: bool = False

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def weights(self) -> Floats:
        """p_k = |D(k)| / |D|."""
        return np.asarray(self.sizes / self.sizes.sum())

    def pooled(self, limit: int, seed: int) -> Ints:
        """D as rows of the training set, or `limit` of them drawn uniformly when there are more."""
        total = int(self.sizes.sum())
        if total <= limit:
            return np.concatenate([self.draw(k) for k in range(len(self))])
        places = np.sort(stream(seed, "pooled").choice(total, limit, replace=False))
        ends = np.cumsum(self.sizes)
        devices = np.searchsorted(ends, places, side="right")
        rows = np.empty(limit, np.int64)
        for k in np.unique(devices):
            mine = devices == k
            rows[mine] = self.draw(int(k))[places[mine] - (ends[k] - self.sizes[k])]
        return rows


def build(options: Options, dataset: Dataset, seed: int) -> Fleet:
    """The fleet that the experiment describes."""
    if options.partition == "natural":
        return natural(options, dataset)
    devices, samples = options.devices, options.samples
    assert devices is not None, "the experiment fills it in"
    assert samples is not None, "the experiment fills it in"
    y = dataset.y_train.numpy()
    if options.partition == "iid":
        return iid(devices, samples, y, dataset.classes, seed)
    by_class = [np.flatnonzero(y == c) for c in range(dataset.classes)]
    empty = [c for c, rows in enumerate(by_class) if len(rows) == 0]
    if empty:
        raise BadData(
            f"class {empty[0]} of {dataset.name} has no training samples, and fleet.partition = "
            f'"{options.partition}" needs some of every class: renumber the labels or use "iid"'
        )
    if options.partition == "dirichlet":
        return dirichlet(devices, samples, by_class, options.alpha, seed)
    return major_class(devices, samples, by_class, options.rho_device, seed)


def major_class(devices: int, samples: int, by_class: list[Ints], rho: float, seed: int) -> Fleet:
    """Every device has a major class with a share rho of its samples; the others share the rest equally.

    Major classes are dealt out evenly over the fleet. Shares are exact to one sample; which classes get
    the odd samples is drawn per device, so that no class is favoured.
    """
    classes = len(by_class)
    major = stream(seed, "major_class").permutation(np.arange(devices) % classes).astype(np.int32)
    most = samples if classes == 1 else int(np.floor(rho * samples + 0.5))
    each, odd = divmod(samples - most, max(classes - 1, 1))

    def mix(k: int) -> Ints:
        counts = np.full(classes, each)
        counts[major[k]] = most
        others = np.delete(np.arange(classes), major[k])
        counts[stream(seed, "odd_samples", device=k).permutation(others)[:odd]] += 1
        return counts

    largest = np.array([max(most, each + (odd > 0))] * classes)
    return from_mix(np.full(devices, samples), major, mix, by_class, seed, largest)


def dirichlet(devices: int, samples: int, by_class: list[Ints], alpha: float, seed: int) -> Fleet:
    """Every device's class shares are drawn from Dirichlet(alpha, ..., alpha), exact to one sample."""
    shares = stream(seed, "dirichlet").dirichlet(np.full(len(by_class), alpha), devices).astype(np.float32)

    def mix(k: int) -> Ints:
        exact = shares[k].astype(np.float64) / shares[k].sum(dtype=np.float64) * samples
        counts: Ints = np.floor(exact).astype(np.int64)
        counts[np.argsort(counts - exact, kind="stable")[: samples - counts.sum()]] += 1
        return counts

    largest = np.ceil(shares.max(axis=0) * samples).astype(np.int64)
    return from_mix(np.full(devices, samples), shares.argmax(axis=1).astype(np.int32), mix, by_class, seed, largest)


def from_mix(
    sizes: Ints, major: Ints, mix: Callable[[int], Ints], by_class: list[Ints], seed: int, largest: Ints
) -> Fleet:
    """Draw each class's share without replacement where the class is large enough, else with replacement."""

    def draw(k: int) -> Ints:
        rng = stream(seed, "samples", device=k)
        return np.concatenate(
            [
                rows[rng.choice(len(rows), count, replace=count > len(rows), shuffle=False)]
                for rows, count in zip(by_class, mix(k), strict=True)
            ]
        )

    repeats = any(count > len(rows) for rows, count in zip(by_class, largest, strict=True))
    return Fleet(sizes, major, draw, mix, repeats=repeats)


def iid(devices: int, samples: int, y: Ints, classes: int, seed: int) -> Fleet:
    """Every device draws uniformly from the whole training set."""
    repeats = samples > len(y)

    def draw(k: int) -> Ints:
        return stream(seed, "samples", device=k).choice(len(y), samples, replace=repeats, shuffle=False)

    def mix(k: int) -> Ints:
        return np.bincount(y[draw(k)], minlength=classes)

    commonest = int(np.bincount(y).argmax())
    return Fleet(np.full(devices, samples), np.full(devices, commonest, np.int32), draw, mix, repeats=repeats)


def natural(options: Options, dataset: Dataset) -> Fleet:
    """The devices that the data names, each with its own rows."""
    if dataset.device_train is None:
        raise BadData(
            f'fleet.partition = "natural" needs to know whose each row of {dataset.name} is: '
            "give device_train in the .npz, or a column named device"
        )
    names, owner = np.unique(dataset.device_train, return_inverse=True)
    if options.devices not in (None, len(names)):
        raise BadExperiment(f"fleet.devices = {options.devices}, but {dataset.name} names {len(names)}: leave it out")
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner))
    y = dataset.y_train.numpy()

    def draw(k: int) -> Ints:
        return order[ends[k - 1] if k else 0 : ends[k]]

    def mix(k: int) -> Ints:
        return np.bincount(y[draw(k)], minlength=dataset.classes)

    counts = np.zeros((len(names), dataset.classes), np.int32)
    np.add.at(counts, (owner, y), 1)
    return Fleet(np.bincount(owner), counts.argmax(axis=1).astype(np.int32), draw, mix, names=names.astype(str))
