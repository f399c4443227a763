"""Clusters that are as alike as possible, and for contrast as different as possible.

For devices of weight p_k with features x_k (label shares, or sketches of their gradients), and u_k = p_k (x_k - mean),

    J = sum_K ||s_K||^2 / q_K,      s_K = sum of u_k over the cluster

is H_cluster, measured on the features. Equal-sized clusters with the least J are anticlusters: each is a small copy of
the fleet. The search starts from a good assignment and swaps pairs of devices where that lowers J. The effect of a swap
of a in A and b in B follows from the sums of the two clusters alone:

    s_A - u_a + u_b,  q_A - p_a + p_b;      s_B + u_a - u_b,  q_B + p_a - p_b
"""

import math
from typing import Literal

import numpy as np
from numpy.random import Generator

from fedcluster.experiment import Section
from fedcluster.fleet.clustering.request import Method, Request
from fedcluster.fleet.fleet import Fleet, Floats, Ints

TRIES = 64  # pairs of devices that are tried for a pair of clusters; the best of them is swapped
PATIENCE = 200  # steps without any gain after which the search ends
VISITS = 40  # the search ends after about as many tries of every device
MAX_NUMBERS = 2_000_000  # in memory for the candidates of one step


class AnticlusteringOptions(Section):
    """What devices are compared by: their label shares, or sketches of their gradients at W_0."""

    features: Literal["labels", "gradients"] = "labels"


def balanced(request: Request) -> Ints:
    """Equal-sized clusters that differ as little as possible: the least H_cluster on the features."""
    fleet, count = request.fleet, request.clusters
    u = contributions(fleet, request.sketches)
    return improve(deal(u, count), u, fleet.weights, count, request.rng, sign=1)


def similar(request: Request) -> Ints:
    """The opposite, equal-sized clusters of devices that are alike: the largest H_cluster."""
    fleet, count = request.fleet, request.clusters
    u = contributions(fleet, request.sketches)
    return improve(cut(u, count), u, fleet.weights, count, request.rng, sign=-1)


def contributions(fleet: Fleet, features: Floats | None) -> Floats:
    """u_k = p_k (x_k - mean), with label shares for features where none are given."""
    x = label_shares(fleet) if features is None else np.asarray(features, np.float64)
    p = fleet.weights
    return np.asarray(p[:, None] * (x - p @ x))


def label_shares(fleet: Fleet) -> Floats:
    """The share of each class in each device's samples."""
    counts = np.stack([fleet.label_counts(k) for k in range(len(fleet))]).astype(np.float64)
    return np.asarray(counts / counts.sum(axis=1, keepdims=True))


def objective(assignment: Ints, u: Floats, p: Floats, count: int) -> float:
    """J."""
    sums, shares = totals(assignment, u, p, count)
    return float((sums**2).sum(axis=1) @ (1 / shares))


def totals(assignment: Ints, u: Floats, p: Floats, count: int) -> tuple[Floats, Floats]:
    """s_K and q_K."""
    order = np.argsort(assignment, kind="stable")
    starts = np.searchsorted(assignment[order], np.arange(count))
    return np.add.reduceat(u[order], starts), np.bincount(assignment, weights=p, minlength=count)


def deal(u: Floats, count: int) -> Ints:
    """An initial assignment for balanced clusters: devices in order of their distance from the mean, M at a time, one
    for each cluster, matched so that they cancel what the clusters have so far."""
    from scipy.optimize import linear_sum_assignment  # half a second, which few experiments need

    order = np.argsort(-(u**2).sum(axis=1), kind="stable")
    assignment = np.empty(len(u), np.int64)
    sums = np.zeros((count, u.shape[1]))
    for start in range(0, len(u), count):
        devices = order[start : start + count]
        rows, clusters = linear_sum_assignment(u[devices] @ sums.T)
        assignment[devices[rows]] = clusters
        sums[clusters] += u[devices[rows]]
    return assignment


def cut(u: Floats, count: int) -> Ints:
    """An initial assignment for similar clusters: the fleet is cut in two across its first principal direction, then
    each half, and so on."""
    assignment = np.empty(len(u), np.int64)
    sizes = np.bincount(np.arange(len(u)) % count, minlength=count)
    pieces = [(np.arange(len(u)), 0, count)]
    while pieces:
        devices, first, clusters = pieces.pop()
        if clusters == 1:
            assignment[devices] = first
            continue
        half = clusters // 2
        sorted_devices = np.argsort(principal_positions(u[devices]), kind="stable")
        size = sizes[first : first + half].sum()
        pieces += [
            (devices[sorted_devices[:size]], first, half),
            (devices[sorted_devices[size:]], first + half, clusters - half),
        ]
    return assignment


def principal_positions(u: Floats) -> Floats:
    """Positions along the first principal direction, by a few steps of power iteration."""
    centred = u - u.mean(axis=0)
    direction = centred[(centred**2).sum(axis=1).argmax()]
    for _ in range(20):
        direction = (centred @ direction) @ centred
        direction = direction / (np.linalg.norm(direction) or 1.0)
    return np.asarray(centred @ direction)


def improve(start: Ints, u: Floats, p: Floats, count: int, rng: Generator, sign: int) -> Ints:
    """The assignment after swaps that lower sign * J, until no more are found. Never worse than the start.

    A step pairs up the clusters at random, tries some pairs of devices for every pair of clusters and makes the best
    swap of each if it is a gain. Swaps between different pairs of clusters do not affect each other.
    """
    if count == 1:
        return start
    assignment, (sums, shares) = start.copy(), totals(start, u, p, count)
    least = 1e-12 * float((u**2 / p[:, None]).sum())  # of H_device: less is rounding
    order = np.argsort(assignment, kind="stable")
    ends = np.cumsum(np.bincount(assignment, minlength=count))
    begins = ends - np.bincount(assignment, minlength=count)
    pairs = count // 2
    most = min(TRIES, math.ceil(len(u) / count) ** 2)  # small clusters have fewer pairs of devices than that
    tries = int(np.clip(MAX_NUMBERS // (pairs * u.shape[1]), 1, most))
    idle = 0
    for _ in range(PATIENCE + VISITS * len(u) // (pairs * tries)):
        shuffled = rng.permutation(count)
        A, B = shuffled[:pairs], shuffled[pairs : 2 * pairs]
        place_a = begins[A] + rng.integers(ends[A] - begins[A], size=(tries, pairs))
        place_b = begins[B] + rng.integers(ends[B] - begins[B], size=(tries, pairs))
        a, b = order[place_a], order[place_b]
        move, shift = u[b] - u[a], p[b] - p[a]
        before = norms(sums[A]) / shares[A] + norms(sums[B]) / shares[B]
        after = norms(sums[A] + move) / (shares[A] + shift) + norms(sums[B] - move) / (shares[B] - shift)
        gain = sign * (before - after)
        best = gain.argmax(axis=0)
        column = np.flatnonzero(gain[best, np.arange(pairs)] > least)
        idle = 0 if len(column) else idle + 1
        if idle == PATIENCE:
            break
        row = best[column]
        sums[A[column]] += move[row, column]
        sums[B[column]] -= move[row, column]
        shares[A[column]] += shift[row, column]
        shares[B[column]] -= shift[row, column]
        order[place_a[row, column]], order[place_b[row, column]] = b[row, column], a[row, column]
    assignment[order] = np.repeat(np.arange(count), ends - begins)
    worse = sign * objective(assignment, u, p, count) > sign * objective(start, u, p, count)
    return start if worse else assignment


def norms(vectors: Floats) -> Floats:
    return np.asarray(np.einsum("...i,...i->...", vectors, vectors))


BALANCED = Method(balanced, AnticlusteringOptions, lambda options: options.features, slow=True)
SIMILAR = Method(similar, AnticlusteringOptions, lambda options: options.features, slow=True)
