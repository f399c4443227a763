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


def hold_out(partition: Partition, share: float, dataset: Dataset, seed: int) -> Partition:
    """Take a share of each device's samples, to the nearest whole number, from those that it trains on. At least one
    sample stays. Copies of a sample that a device holds more than once stay together."""
    if share == 0:
        return partition
    sizes = np.minimum(np.floor(share * partition.sizes + 0.5), partition.sizes - 1).astype(np.int64)
    if not sizes.any():
        raise BadExperiment(f"fleet.test_share = {share:g} holds out no sample of any device: raise it")
    source = partition.dataset or dataset

    @lru_cache(maxsize=4096)
    def split(k: int) -> tuple[Ints, Ints]:
        """The rows that device k trains on, and those that it is tested on."""
        rows, count = partition.sample_indices(k), int(sizes[k])
        different, copy_of = np.unique(rows, return_inverse=True)
        place = stream(seed, "test_share", device=k).permutation(len(different))[copy_of]
        order = np.argsort(place, kind="stable")
        test, train = rows[np.sort(order[:count])], rows[np.sort(order[count:])]
        shared = np.isin(train, test)  # copies of the one sample at which the order was cut
        if shared.any() and not shared.all():
            train[shared] = np.resize(train[~shared], shared.sum())
        return train, test

    def samples(k: int) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(split(k)[1])
        return source.x_train[rows], source.y_train[rows]

    return replace(
        partition,
        sizes=partition.sizes - sizes,
        sample_indices=lambda k: split(k)[0],
        held_out=HeldOut(sizes, samples),
    )
