"""Partitions in which devices hold samples of one distribution, equally or unequally many."""

from typing import Literal

import numpy as np

from fedcluster.data.dataset import Dataset
from fedcluster.data.partition import Ints, Partition, by_owner, labels_of_one_distribution, rounded
from fedcluster.data.partitions.request import Method, Request
from fedcluster.errors import BadExperiment
from fedcluster.experiment import Count, NonNegative, Positive, Section
from fedcluster.rng import stream


def iid(request: Request) -> Partition:
    """Every device draws uniformly from the whole training set; with "all", it is shared out in equal parts."""
    rows = len(request.dataset.y_train)
    if request.sizes is None:
        equal = np.diff(np.arange(request.devices + 1) * rows // request.devices)
        return shared_out(equal, request.dataset, request.seed)
    return drawn(request.sizes, request.dataset, request.seed)


class QuantityOptions(Section):
    """Sizes in proportion to exp(sigma N(0, 1)), or to a Pareto variable with P(size > s) = s^-exponent; every device
    has at least `min_samples`."""

    distribution: Literal["log_normal", "power_law"] = "log_normal"
    sigma: NonNegative = 1.0
    exponent: Positive = 1.5
    min_samples: Count = 1


def quantity(request: Request) -> Partition:
    """Devices hold unequally many samples of one distribution. With `fleet.samples` a number, that is the mean; with
    "all", the training set is shared out."""
    options: QuantityOptions = request.options
    rng, devices = stream(request.seed, "quantity"), request.devices
    total = len(request.dataset.y_train) if request.sizes is None else int(request.sizes.sum())
    spare = total - options.min_samples * devices
    if spare < 0:
        raise BadExperiment(
            f"fleet.min_samples = {options.min_samples} for {devices:,} devices is more than {total:,} samples: "
            "lower it, or use fewer devices"
        )
    if options.distribution == "log_normal":
        logarithms = options.sigma * rng.standard_normal(devices)
    else:
        logarithms = rng.standard_exponential(devices) / options.exponent
    shares = np.exp(logarithms - logarithms.max())
    sizes = options.min_samples + rounded(shares, spare)
    if request.sizes is None:
        return shared_out(sizes, request.dataset, request.seed)
    return drawn(sizes, request.dataset, request.seed)


def shared_out(sizes: Ints, dataset: Dataset, seed: int) -> Partition:
    """Every row to one device, at random."""
    owner = stream(seed, "samples").permutation(np.repeat(np.arange(len(sizes), dtype=np.int32), sizes))
    return by_owner(owner, len(sizes), dataset)


def drawn(sizes: Ints, dataset: Dataset, seed: int) -> Partition:
    """Every device draws its rows from the whole training set."""
    rows = len(dataset.y_train)

    def sample_indices(k: int) -> Ints:
        rng, size = stream(seed, "samples", device=k), int(sizes[k])
        return rng.choice(rows, size, replace=size > rows, shuffle=False)

    labels = labels_of_one_distribution(len(sizes), dataset, sample_indices)
    return Partition(sizes, labels, sample_indices, repeats=bool(sizes.max() > rows))


IID = Method(iid)
QUANTITY = Method(quantity, QuantityOptions)
