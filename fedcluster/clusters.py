"""The clusters: which devices take their turn together.

A clustering is a plain function `(fleet, rng, options) -> assignment`, the cluster of every device from 0.
"""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcluster import anticluster
from fedcluster.errors import BadData, BadExperiment
from fedcluster.experiment import Clusters as Options
from fedcluster.experiment import found
from fedcluster.fleet import Fleet, Floats, Ints
from fedcluster.rng import stream

Clustering = Callable[[Fleet, Generator, Options], NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Clusters:
    """S_1..S_M as an assignment: every device in exactly one cluster, no cluster empty."""

    assignment: Ints
    count: int

    @cached_property
    def members(self) -> list[Ints]:
        """The devices of each cluster, in ascending order."""
        order = np.argsort(self.assignment, kind="stable")
        return np.split(order, np.cumsum(np.bincount(self.assignment, minlength=self.count))[:-1])

    def weights(self, fleet: Fleet) -> Floats:
        """q_K = sum of p_k over the cluster."""
        return np.bincount(self.assignment, weights=fleet.weights, minlength=self.count)


def build(options: Options, fleet: Fleet, seed: int, features: Floats | None = None) -> Clusters:
    """The clusters that the experiment describes, checked. `balanced` and `similar` go by the devices' features, one
    row each; left out, by their label shares."""
    if options.count is not None and options.count > len(fleet):
        raise BadExperiment(
            f"clusters.count = {options.count} is more than the fleet's {len(fleet)} devices: take fewer clusters"
        )
    clustering: Clustering
    match options.method:
        case "random":
            clustering = random
        case "major_class":
            clustering = major_class
        case "balanced":
            clustering = partial(anticluster.balanced, features=features)
        case "similar":
            clustering = partial(anticluster.similar, features=features)
        case "file":
            clustering = file
        case str() as name:
            clustering = found(name)
        case function:
            clustering = function
    assignment = np.asarray(clustering(fleet, stream(seed, "clusters"), options))
    if assignment.shape != (len(fleet),) or assignment.dtype.kind not in "iu" or assignment.min() < 0:
        raise BadExperiment(
            f"the clustering must give each of the {len(fleet)} devices a whole number from 0, "
            f"but gave {assignment.dtype} {list(assignment.shape)}"
        )
    count = options.count or int(assignment.max()) + 1
    if assignment.max() >= count:
        raise BadExperiment(
            f"clusters.count = {count}, but a device is in cluster {assignment.max()} (they start at 0)"
        )
    sizes = np.bincount(assignment, minlength=count)
    if not sizes.all():
        raise BadExperiment(
            f"cluster {sizes.argmin()} of {count} is empty: give it a device, renumber the clusters, "
            "or lower clusters.count"
        )
    return Clusters(assignment.astype(np.int32), count)


def random(fleet: Fleet, rng: Generator, options: Options) -> Ints:
    """Chance, in equal parts."""
    return rng.permutation(np.arange(len(fleet)) % number(options))


def major_class(fleet: Fleet, rng: Generator, options: Options) -> Ints:
    """Equal parts in which a share rho_cluster of cluster K's devices have class K as their major class.

    Cluster K takes that many devices of its class at random. The others fill the rest at random; where one
    lands in a cluster of its own class, it changes places with one for which both then fit. Such a partner
    exists exactly as long as the shares asked for are possible.
    """
    count = number(options)
    slots = np.arange(len(fleet)) % count
    classes = int(fleet.major_class.max()) + 1
    own_class = np.arange(count) % classes  # the class of each cluster
    wanted = np.floor(options.rho_cluster * np.bincount(slots) + 0.5).astype(int)

    assignment = np.full(len(fleet), -1)
    for c in range(classes):
        devices = rng.permutation(np.flatnonzero(fleet.major_class == c))
        takers = np.repeat(np.flatnonzero(own_class == c), wanted[own_class == c])
        if len(takers) > len(devices):
            raise BadExperiment(
                f"clusters.rho_cluster = {options.rho_cluster} with clusters.count = {count} asks for {len(takers)} "
                f"devices of major class {c}, but the fleet has {len(devices)}: lower rho_cluster or raise count"
            )
        assignment[devices[: len(takers)]] = takers

    rest = np.flatnonzero(assignment < 0)
    places = rng.permutation(np.repeat(np.arange(count), np.bincount(slots) - wanted))
    major = fleet.major_class[rest]
    for i in np.flatnonzero(own_class[places] == major):
        if own_class[places[i]] != major[i]:
            continue  # an earlier exchange has moved it already
        j = partner(rng, int(i), places, major, own_class)
        if j is None:
            raise BadExperiment(
                f"clusters.rho_cluster = {options.rho_cluster} leaves devices of major class {major[i]} that only fit "
                "clusters of that class: raise rho_cluster"
            )
        places[i], places[j] = places[j], places[i]
    assignment[rest] = places
    return assignment


def partner(rng: Generator, i: int, places: Ints, major: Ints, own_class: Ints) -> int | None:
    """A device to change places with, so that neither is in a cluster of its own class: tries, then a search."""
    for j in rng.integers(len(places), size=64):
        if own_class[places[j]] != major[i] and own_class[places[i]] != major[j]:
            return int(j)
    fits = np.flatnonzero((own_class[places] != major[i]) & (own_class[places[i]] != major))
    return int(rng.choice(fits)) if len(fits) else None


def file(fleet: Fleet, rng: Generator, options: Options) -> Ints:
    """Columns device,cluster of a CSV file: every device once, clusters numbered from 0 or from 1."""
    path = Path(str(options.path)).expanduser()
    index = {str(name): k for k, name in enumerate(fleet.names if fleet.names is not None else range(len(fleet)))}
    assignment = np.full(len(fleet), -1)
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            rows = csv.DictReader(lines)
            if not {"device", "cluster"} <= set(rows.fieldnames or ()):
                raise BadData(f"{path}: the first line must name the columns device,cluster")
            for row in rows:
                where = f"{path}, line {rows.line_num}"
                device, cluster = (row["device"] or "").strip(), (row["cluster"] or "").strip()
                if device not in index:
                    raise BadData(f"{where}: the fleet has no device {device!r}")
                if not (cluster.isdecimal() and cluster.isascii()) or int(cluster) > len(fleet):
                    raise BadData(f"{where}: cluster {cluster!r} is not a whole number from 0 to {len(fleet)}")
                if assignment[index[device]] >= 0:
                    raise BadData(f"{where}: device {device} has a cluster already")
                assignment[index[device]] = int(cluster)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadData(f"clusters.path: cannot read {path} ({error})") from None
    if (assignment < 0).any():
        missing = next(name for name, k in index.items() if assignment[k] < 0)
        raise BadData(f"{path}: device {missing} has no cluster; every device needs one row")
    numbered_from_one = assignment.min() == 1 and assignment.max() != (options.count or 0) - 1
    return assignment - 1 if numbered_from_one else assignment


def number(options: Options) -> int:
    assert options.count is not None  # the experiment fills it in
    return options.count
