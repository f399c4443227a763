"""Partitions by label: which classes a device holds, and how much of each."""

from typing import Annotated

import numpy as np
from pydantic import Field

from fedcluster.data.partition import (
    Ints,
    Labels,
    Partition,
    by_class_counts,
    by_class_shares,
    by_owner,
    check_memory,
    rows_by_class,
)
from fedcluster.data.partitions.request import Method, Request
from fedcluster.errors import BadExperiment
from fedcluster.experiment import Count, Section, Share
from fedcluster.rng import stream

MOST_DRAWS = 100  # of a Dirichlet partition whose smallest device is too small
CHUNK = 100_000  # devices whose classes are drawn at once
MIN_SAMPLES = 10  # of a device, where a Dirichlet partition shares out the training set


class MajorClassOptions(Section):
    """`rho_device`: the share of a device's samples that are of its major class."""

    rho_device: Share = 0.5


def major_class(request: Request) -> Partition:
    """Every device has a major class with a share `rho_device` of its samples. Other classes share the rest equally.

    The major classes are spread evenly over the fleet. Shares are exact to one sample. The classes that get the odd
    samples are drawn per device, so that no class is favoured.
    """
    sizes, seed, rho = request.given_sizes("major_class"), request.seed, request.options.rho_device
    by_class = rows_by_class(request.dataset, "major_class")
    classes = len(by_class)
    major = stream(seed, "major_class").permutation(np.arange(len(sizes)) % classes).astype(np.int32)

    def split(samples: int) -> tuple[int, int, int]:
        """The number of samples of the major class, of each other class, and of odd samples."""
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
    return by_class_counts(sizes, Labels(major, label_counts), by_class, seed, largest)


class DirichletOptions(Section):
    """`alpha`: concentration. Where the training set is shared out, `min_samples` is the least that a device gets, and
    with `balance` a device that has its equal part gets no more classes, as in NIID-Bench."""

    alpha: Annotated[float, Field(ge=1e-4, le=1e6)] = 0.3
    min_samples: Count | None = None
    balance: bool = False


def dirichlet(request: Request) -> Partition:
    """With `fleet.samples` a number, each device's class shares are drawn from Dirichlet(alpha, ..., alpha).

    With "all" (Hsu et al. 2019, Li et al. 2022), the samples of each class are shared out over the devices in
    proportions drawn from Dirichlet(alpha, ..., alpha), and all are drawn again until every device has `min_samples`.
    """
    options: DirichletOptions = request.options
    by_class = rows_by_class(request.dataset, "dirichlet")
    check_memory(request.devices, len(by_class))
    if request.sizes is None:
        return by_owner(dirichlet_owners(request, by_class, options), request.devices, request.dataset)
    if options.min_samples is not None or options.balance:
        key = "balance" if options.min_samples is None else "min_samples"
        raise BadExperiment(f'fleet.{key} is for fleet.samples = "all": with a number, every device has that many')
    alpha = np.full(len(by_class), options.alpha)
    shares = stream(request.seed, "dirichlet").dirichlet(alpha, request.devices).astype(np.float32)
    return by_class_shares(request.sizes, shares, by_class, request.seed)


def dirichlet_owners(request: Request, by_class: list[Ints], options: DirichletOptions) -> Ints:
    rng, devices = stream(request.seed, "dirichlet"), request.devices
    rows = sum(map(len, by_class))
    least = MIN_SAMPLES if options.min_samples is None else options.min_samples
    if least * devices > rows:
        raise BadExperiment(
            f"fleet.min_samples = {least} for {devices:,} devices is more than the {rows:,} training samples of "
            f"{request.dataset.name}: lower it, or use fewer devices"
        )
    alpha = np.full(devices, options.alpha)
    for _ in range(MOST_DRAWS):
        owner = np.full(rows, -1, np.int32)
        held = np.zeros(devices, np.int64)
        for own in by_class:
            shares = rng.dirichlet(alpha)
            if options.balance:
                shares = shares * (held < rows / devices)
            shares = shares / shares.sum() if shares.sum() > 0 else np.full(devices, 1 / devices)
            ends = np.floor(np.cumsum(shares) * len(own)).astype(np.int64)
            ends[-1] = len(own)
            counts = np.diff(ends, prepend=0)
            owner[rng.permutation(own)] = np.repeat(np.arange(devices, dtype=np.int32), counts)
            held += counts
        if held.min() >= least:
            return owner
    raise BadExperiment(
        f"fleet.alpha = {options.alpha:g} left a device with fewer than min_samples = {least} in {MOST_DRAWS} draws: "
        "raise alpha, lower min_samples, or use fewer devices"
    )


class PathologicalOptions(Section):
    """`classes`: how many classes a device holds samples of."""

    classes: Count = 2


def pathological(request: Request) -> Partition:
    """Every device holds samples of c classes only: class k mod C, and c - 1 others drawn at random.

    With "all" (Li et al. 2022, "#C = c") the samples of each class are shared out equally among the devices that hold
    it. With `fleet.samples` a number, a device holds equally many samples of each of its classes.
    """
    by_class = rows_by_class(request.dataset, "pathological")
    classes, own, devices = len(by_class), request.options.classes, request.devices
    if own > classes:
        raise BadExperiment(f"fleet.classes = {own}, but {request.dataset.name} has {classes} classes: lower it")
    check_memory(devices, own)
    rng = stream(request.seed, "pathological")
    first = np.arange(devices) % classes
    held = np.empty((devices, own), np.int32)  # the classes of every device
    held[:, 0] = first
    for part in np.split(np.arange(devices), range(CHUNK, devices, CHUNK)) if own > 1 else []:
        others = rng.random((len(part), classes - 1)).argsort(axis=1)[:, : own - 1]
        held[part, 1:] = others + (others >= first[part, None])
    if request.sizes is not None:
        largest = np.full(classes, -(-int(request.sizes.max()) // own))
        return by_class_counts(
            request.sizes, equal_parts(request.sizes, held, classes), by_class, request.seed, largest
        )
    owner = np.full(len(request.dataset.y_train), -1, np.int32)
    flat, holder = held.ravel(), np.repeat(np.arange(devices, dtype=np.int32), own)
    order = np.argsort(flat, kind="stable")
    holders = np.split(holder[order], np.cumsum(np.bincount(flat, minlength=classes))[:-1])
    for rows, devices_with in zip(by_class, holders, strict=True):
        if len(devices_with):  # with fewer devices than classes, some may be nobody's
            owner[rng.permutation(rows)] = devices_with[np.arange(len(rows)) * len(devices_with) // len(rows)]
    return by_owner(owner, devices, request.dataset)


def equal_parts(sizes: Ints, held: Ints, classes: int) -> Labels:
    """Equally many samples of each class that a device holds; the first ones get the odd samples."""

    def label_counts(k: int) -> Ints:
        each, odd = divmod(int(sizes[k]), held.shape[1])
        counts = np.zeros(classes, np.int64)
        counts[held[k]] = each + (np.arange(held.shape[1]) < odd)
        return counts

    return Labels(held[:, 0], label_counts)


class ShardsOptions(Section):
    """`shards`: how many shards a device holds."""

    shards: Count = 2


def shards(request: Request) -> Partition:
    """The training set, sorted by label, is cut into equal shards, which are dealt out at random (McMahan et al.
    2017)."""
    request.refuse_sizes("shards")
    rng, devices, each = stream(request.seed, "shards"), request.devices, request.options.shards
    rows = np.concatenate([rng.permutation(own) for own in rows_by_class(request.dataset, "shards")])
    count = devices * each
    if count > len(rows):
        raise BadExperiment(
            f"fleet.shards = {each} for {devices:,} devices is more than the {len(rows):,} training samples of "
            f"{request.dataset.name}: lower it, or use fewer devices"
        )
    dealt = rng.permutation(np.repeat(np.arange(devices, dtype=np.int32), each))
    owner = np.empty(len(rows), np.int32)
    owner[rows] = dealt[np.arange(len(rows)) * count // len(rows)]
    return by_owner(owner, devices, request.dataset)


MAJOR_CLASS = Method(major_class, MajorClassOptions)
DIRICHLET = Method(dirichlet, DirichletOptions)
PATHOLOGICAL = Method(pathological, PathologicalOptions, samples="all")
SHARDS = Method(shards, ShardsOptions, samples="all")
