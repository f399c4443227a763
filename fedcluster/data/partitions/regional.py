"""Partitions in which labels or features depend on where in the world a device is.

Regions are the fleet's time zones. Laid out from west to east, region r takes up the interval [a_r, b_r) of the
devices, as fractions of the fleet.
"""

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedcluster.data.partition import (
    Ints,
    Partition,
    by_class_shares,
    check_memory,
    labels_of_one_distribution,
    rows_by_class,
)
from fedcluster.data.partitions.by_feature import check_features, deviations, like, replaced, rotated
from fedcluster.data.partitions.request import Method, Request
from fedcluster.errors import BadData
from fedcluster.experiment import Section, Share
from fedcluster.rng import stream

Floats = NDArray[np.float64]

MOST_DEGREES = 90.0  # by which pictures are turned in the far east, and back in the far west, at strength 1


class RegionalOptions(Section):
    """`what` depends on the region, with a `strength` from 0 (not at all) to 1."""

    what: Literal["labels", "features"] = "labels"
    strength: Share = 0.5


def regional(request: Request) -> Partition:
    """Labels or features that depend on the region, with strength s.

    Labels: device k of region r draws its classes from (1 - s) U + s Q_r. U is uniform; the classes are laid out over
    the world's devices from west to east, class c over [c/C, (c+1)/C), and Q_r(c) is c's part of region r. So every
    region has its own classes, neighbours are alike, and the fleet as a whole has all classes equally often.

    Features: every region draws from rows of its own. Pictures are turned by 90 s (a_r + b_r - 1) degrees; other
    features are shifted by s standard deviations times N(0, 1), drawn for each region and feature.
    """
    if request.regions is None or np.isnan(request.regions).any():
        raise BadData(
            'fleet.partition = "regional" needs to know where devices are: give timezone or utc_offset of every '
            'device in fleet.path, or use fleet.world = "diurnal"'
        )
    region, ends = regions(request.regions)
    build = by_region_labels if request.options.what == "labels" else by_region_features
    return build(request, region, ends)


def regions(offsets: Floats) -> tuple[Ints, Floats]:
    """The region of every device, by its hours ahead of UTC, and the end b_r of every region."""
    _, region = np.unique(offsets, return_inverse=True)
    return region, np.cumsum(np.bincount(region)) / len(region)


def class_shares(ends: Floats, classes: int, strength: float) -> Floats:
    """The distribution of classes in every region [regions, classes]: (1 - s) U + s Q_r. `ends` are the b_r."""
    left, right = np.concatenate([[0], ends[:-1]])[:, None], ends[:, None]
    low, high = np.arange(classes) / classes, np.arange(1, classes + 1) / classes
    own = np.clip(np.minimum(right, high) - np.maximum(left, low), 0, None)
    own /= own.sum(axis=1, keepdims=True)
    shares: Floats = (1 - strength) / classes + strength * own
    return shares


def degrees(ends: Floats, strength: float) -> Floats:
    """The angle by which the pictures of every region are turned: 90 s (a_r + b_r - 1) degrees."""
    middle = ends - np.diff(ends, prepend=0) / 2
    angles: Floats = strength * MOST_DEGREES * (2 * middle - 1)
    return angles


def by_region_labels(request: Request, region: Ints, ends: Floats) -> Partition:
    sizes = request.given_sizes("regional")
    by_class = rows_by_class(request.dataset, "regional")
    check_memory(request.devices, len(by_class))
    shares = class_shares(ends, len(by_class), request.options.strength).astype(np.float32)
    return by_class_shares(sizes, shares[region], by_class, request.seed)


def by_region_features(request: Request, region: Ints, ends: Floats) -> Partition:
    sizes, strength, dataset, seed = (
        request.given_sizes("regional"),
        request.options.strength,
        request.dataset,
        request.seed,
    )
    check_features(dataset)
    rows = len(dataset.y_train)
    order = stream(seed, "regions").permutation(rows)
    pools = np.split(order, np.floor(ends[:-1] * rows).astype(np.int64))
    if min(map(len, pools)) == 0:
        raise BadData(f"{dataset.name} has fewer training samples than the fleet needs for {len(pools)} regions")
    x, angles = dataset.x_train.clone(), degrees(ends, strength).tolist()
    for r, pool in enumerate(pools):
        own = torch.from_numpy(pool)
        if x.ndim == 4:
            x[own] = rotated(x[own], angles[r])
        else:
            shift = stream(seed, "region_shift", device=r).standard_normal(x.shape[1:], np.float32)
            x[own] = like(x[own] + strength * deviations(dataset) * torch.from_numpy(shift), x)

    def sample_indices(k: int) -> Ints:
        pool, size = pools[region[k]], int(sizes[k])
        rng = stream(seed, "samples", device=k)
        return rng.choice(pool, size, replace=size > len(pool), shuffle=False)

    labels = labels_of_one_distribution(len(sizes), dataset, sample_indices)
    repeats = any(int(sizes[region == r].max()) > len(pool) for r, pool in enumerate(pools))
    partition = Partition(sizes, labels, sample_indices, repeats=repeats)
    return replaced(partition, dataset, x)


REGIONAL = Method(regional, RegionalOptions)
