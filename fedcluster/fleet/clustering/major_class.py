"""Clusters in which a given share of the devices have the same major class, as in the paper."""

import numpy as np
from numpy.random import Generator

from fedcluster.errors import BadExperiment
from fedcluster.experiment import Section, Share
from fedcluster.fleet.clustering.request import Method, Request
from fedcluster.fleet.fleet import Ints


class MajorClassOptions(Section):
    """The share of each cluster's devices that have the cluster's class as their major class."""

    rho_cluster: Share = 0.1


def major_class(request: Request) -> Ints:
    """Clusters of equal size in which a share rho_cluster of cluster K's devices have class K as their major class.

    Cluster K gets that many devices of its class at random. The other devices fill the remaining places at random; one
    that lands in a cluster of its own class is swapped with a device such that both fit. Such a device exists exactly
    as long as the requested shares are possible.
    """
    fleet, count, rng, rho_cluster = request.fleet, request.clusters, request.rng, request.options.rho_cluster
    clusters = np.arange(len(fleet)) % count
    classes = int(fleet.major_class.max()) + 1
    own_class = np.arange(count) % classes  # the class of each cluster
    wanted = np.floor(rho_cluster * np.bincount(clusters) + 0.5).astype(int)

    assignment = np.full(len(fleet), -1)
    for c in range(classes):
        devices = rng.permutation(np.flatnonzero(fleet.major_class == c))
        takers = np.repeat(np.flatnonzero(own_class == c), wanted[own_class == c])
        if len(takers) > len(devices):
            raise BadExperiment(
                f"clusters.rho_cluster = {rho_cluster} with clusters.count = {count} asks for {len(takers)} "
                f"devices of major class {c}, but the fleet has {len(devices)}: lower rho_cluster or raise count"
            )
        assignment[devices[: len(takers)]] = takers

    rest = np.flatnonzero(assignment < 0)
    places = rng.permutation(np.repeat(np.arange(count), np.bincount(clusters) - wanted))
    major = fleet.major_class[rest]
    for i in np.flatnonzero(own_class[places] == major):
        if own_class[places[i]] != major[i]:
            continue  # an earlier swap has moved it already
        j = partner(rng, int(i), places, major, own_class)
        if j is None:
            raise BadExperiment(
                f"clusters.rho_cluster = {rho_cluster} leaves devices of major class {major[i]} that only fit "
                "clusters of that class: raise rho_cluster"
            )
        places[i], places[j] = places[j], places[i]
    assignment[rest] = places
    return assignment


def partner(rng: Generator, i: int, places: Ints, major: Ints, own_class: Ints) -> int | None:
    """A device to swap with, so that neither is in a cluster of its own class: random tries, then a search."""
    for j in rng.integers(len(places), size=64):
        if own_class[places[j]] != major[i] and own_class[places[i]] != major[j]:
            return int(j)
    fits = np.flatnonzero((own_class[places] != major[i]) & (own_class[places[i]] != major))
    return int(rng.choice(fits)) if len(fits) else None


MAJOR_CLASS = Method(major_class, MajorClassOptions, needs=lambda options: "labels")
