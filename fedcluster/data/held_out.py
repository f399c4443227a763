"""Held-out samples, to score the model on each device: the test rows that the data give to a device, else a share of
the device's samples, which it does not train on."""

from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fedcluster.data.dataset import Dataset
from fedcluster.data.partition import HeldOut, Ints, Partition
from fedcluster.errors import BadData, BadExperiment
from fedcluster.rng import stream


def test_rows(partition: Partition, dataset: Dataset) -> Partition:
    """A natural partition with the test rows of each of its devices. Rows of other devices are left out."""
    assert partition.names is not None
    assert dataset.device_test is not None
    number = {name: k for k, name in enumerate(partition.names)}
    owner = np.array([number.get(str(name), -1) for name in dataset.device_test])
    if (owner < 0).all():
        raise BadData(f"{dataset.name}: no test row is of a device that has training rows: compare their names")
    order, ends = np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner + 1, minlength=len(partition) + 1))

    def samples(k: int) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(order[ends[k] : ends[k + 1]])
        return dataset.x_test[rows], dataset.y_test[rows]

    return replace(partition, held_out=HeldOut(np.diff(ends), samples))


def held_out_sizes(sizes: Ints, share: float) -> Ints:
    """How many samples devices hold out: a share of each one's, to the nearest whole number. At least one sample
    stays."""
    held: Ints = np.minimum(np.floor(share * sizes + 0.5), sizes - 1).astype(np.int64)
    return held


def check_share(sizes: Ints, share: float) -> None:
    """Refuse a share that holds out nothing in a fleet of these sizes."""
    if share and not held_out_sizes(sizes, share).any():
        raise BadExperiment(f"fleet.test_share = {share:g} holds out no sample of any device: raise it")


def hold_out(partition: Partition, share: float, dataset: Dataset, seed: int) -> Partition:
    """Take a share of each device's samples from those that it trains on. Copies of a sample that a device holds more
    than once stay together. A device of a federation, which knows its own samples only, finds the same ones."""
    if share == 0:
        return partition
    sizes, source = held_out_sizes(partition.sizes, share), partition.dataset or dataset

    @lru_cache(maxsize=4096)
    def split(k: int) -> tuple[Ints, Ints]:
        """The rows that device k trains on, and those that it is tested on."""
        rows = partition.sample_indices(k)
        copy_of = different_samples(source, rows)
        place = stream(seed, "test_share", device=k).permutation(copy_of.max() + 1)[copy_of]
        order, count = np.argsort(place, kind="stable"), int(held_out_sizes(np.array(len(rows)), share))
        test, train = np.sort(order[:count]), np.sort(order[count:])
        shared = np.isin(copy_of[train], copy_of[test])  # copies of the one sample at which the order was cut
        if shared.any() and not shared.all():
            train[shared] = np.resize(train[~shared], shared.sum())
        return rows[train], rows[test]

    def samples(k: int) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(split(k)[1])
        return source.x_train[rows], source.y_train[rows]

    return replace(
        partition,
        sizes=partition.sizes - sizes,
        sample_indices=lambda k: split(k)[0],
        held_out=HeldOut(sizes, samples),
    )


def different_samples(dataset: Dataset, rows: Ints) -> Ints:
    """The number of each row's sample, by which copies are alike: 0, 1, ... in the order in which samples appear."""
    at, numbers = torch.from_numpy(rows), dict[bytes, int]()
    pairs = zip(dataset.x_train[at].numpy(), dataset.y_train[at].numpy(), strict=True)
    return np.array([numbers.setdefault(x.tobytes() + y.tobytes(), len(numbers)) for x, y in pairs])
