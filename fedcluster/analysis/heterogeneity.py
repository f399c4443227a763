"""The heterogeneity of devices, and its parts within and between clusters.

With g_k = grad f_k(w), g_S = sum of (p_k / q_K) g_k over a cluster and g = grad f(w) = sum of p_k g_k:

    H_device  = sum_k p_k ||g_k - g||^2
    H_within  = sum_k p_k ||g_k - g_{S_K(k)}||^2
    H_cluster = sum_K q_K ||g_{S_K} - g||^2,        H_within + H_cluster = H_device

So clusters differ less than devices. With label shares in place of gradients, the same sums measure how much label
distributions differ.
"""

from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np
from numpy.random import Generator

from fedcluster.errors import BadExperiment
from fedcluster.fleet.clustering.clusters import Clusters
from fedcluster.fleet.fleet import Floats
from fedcluster.fleet.schedule import Schedule, cohort_sizes
from fedcluster.rng import stream

MAX_COHORTS = 2000  # of a cluster: all of them are enumerated, or so many are drawn


@dataclass(frozen=True)
class Split:
    """H_device and its two parts."""

    device: float
    within: float
    cluster: float


def check_whole(clusters: Clusters) -> None:
    """Refuse a clustering that leaves devices out: in the theorem every device is in a cluster."""
    if left := clusters.left_out():
        raise BadExperiment(
            f"{left:,} of {len(clusters.assignment):,} devices are in no cluster, and in the theorem every device is "
            "in one: leave them out of the fleet file"
        )


def split(vectors: Floats, weights: Floats, clusters: Clusters) -> Split:
    """Split the heterogeneity of vectors [devices, size] with weights p_k."""
    centred = np.asarray(vectors, np.float64) - weights @ np.asarray(vectors, np.float64)
    means = cluster_means(centred, weights, clusters)
    shares = np.bincount(clusters.assignment, weights=weights, minlength=clusters.count)
    return Split(
        device=float(weights @ squares(centred)),
        within=float(weights @ squares(centred - means[clusters.assignment])),
        cluster=float(shares @ squares(means)),
    )


def cluster_means(vectors: Floats, weights: Floats, clusters: Clusters) -> Floats:
    """sum of (p_k / q_K) v_k over the devices of each cluster."""
    return np.stack([weights[mine] @ vectors[mine] / weights[mine].sum() for mine in clusters.members])


def squares(vectors: Floats) -> Floats:
    """||v||^2 of each row."""
    return np.asarray(np.einsum("ij,ij->i", vectors, vectors))


def variance_term(variances: Floats, weights: Floats, clusters: Clusters) -> float:
    """sum_K q_K^-1 sum_{k in S_K} p_k^2 s_k^2: the variance of a cluster's averaged batch gradient, by q_K."""
    shares = np.bincount(clusters.assignment, weights=weights, minlength=clusters.count)
    return float((weights**2 * variances / shares[clusters.assignment]).sum())


def mean_cohort_sizes(schedule: Schedule) -> Floats:
    """The number of devices in a cycle of each cluster, on average over rounds.

    Where clusters tie for one more device, the first in the round's order gets it. If the order changes from round to
    round, each of them gets it equally often: the mean cohort is then between two whole numbers.
    """
    participation, order = schedule.options.participation, schedule.options.order
    sizes = np.bincount(schedule.clusters.assignment, minlength=schedule.clusters.count)
    first = np.arange(len(sizes)) if order == "random" else schedule.order(0)
    cohorts = np.empty(len(sizes))
    cohorts[first] = cohort_sizes(participation, sizes[first])
    if order not in ("reshuffle", "balanced"):
        return cohorts
    least = np.maximum(1, np.floor(participation * sizes))
    _, tied = np.unique(participation * sizes - least, return_inverse=True)
    extra = np.bincount(tied, weights=cohorts - least) / np.bincount(tied)
    return np.asarray(least + extra[tied])


def sampling_term(vectors: Floats, weights: Floats, clusters: Clusters, cohorts: Floats, seed: int) -> float:
    """What is added to H_cluster when only c_K of a cluster's n_K devices take part in a cycle:

    sum_K q_K E ||g_cohort - g_{S_K}||^2,    g_cohort = sum of p_k g_k / sum of p_k, over the cohort

    A mean cohort between two whole numbers stands for cohorts of these two sizes. The theorem has no such term: all
    devices of a cluster take part.
    """
    total = 0.0
    for K, mine in enumerate(clusters.members):
        rng = stream(seed, "cohort_variance", cycle=K)
        least, share = int(cohorts[K]), float(cohorts[K] % 1)
        variance = (1 - share) * cohort_variance(vectors[mine], weights[mine], least, rng)
        if share:
            variance += share * cohort_variance(vectors[mine], weights[mine], least + 1, rng)
        total += float(weights[mine].sum()) * variance
    return total


def cohort_variance(vectors: Floats, weights: Floats, c: int, rng: Generator) -> float:
    """E ||g_cohort - g_S||^2 over the cohorts of c of the n devices of a cluster S, all equally likely.

    With u_k = p_k (g_k - g_S), whose sum over S is 0, the difference is U / P, where U and P are the cohort's sums of
    u_k and p_k. Were P the same for all cohorts, c mean(p), the expectation would be the delta method's

        D = (1 - c/n) / c * sum_k ||u_k||^2 / (n - 1) / mean(p)^2

    P varies, so E ||U / P||^2 is the mean over all cohorts if there are at most MAX_COHORTS, else over so many drawn
    at random, with ||U / (c mean(p))||^2, whose expectation D is known, as control variate.
    """
    n = len(weights)
    if c >= n:
        return 0.0
    p = np.asarray(weights, np.float64) / weights.mean()
    u = (p[:, None] * (vectors - p @ vectors / n)).astype(vectors.dtype)
    delta = (1 - c / n) / c * float(squares(u).sum()) / (n - 1)
    if np.ptp(p) < 1e-12 or delta == 0.0:
        return delta
    if comb(n, c) <= MAX_COHORTS:
        drawn = np.array(list(combinations(range(n), c)))
    else:
        drawn = rng.random((MAX_COHORTS, n)).argpartition(c, axis=1)[:, :c]
    inside = np.zeros((len(drawn), n), u.dtype)
    np.put_along_axis(inside, drawn, 1, axis=1)
    linear, weight = squares(inside @ u / c).astype(np.float64), inside @ p / c
    ratio = linear / weight**2
    spread = linear - linear.mean()
    slope = float(spread @ ratio / max(float(spread @ spread), 1e-300))
    return max(0.0, float(ratio.mean()) + slope * (delta - float(linear.mean())))


@dataclass(frozen=True)
class Estimate:
    """A value and its standard error; 0 where it is exact."""

    value: float
    error: float


def estimated(sketches: Floats, copies: int, weights: Floats, clusters: Clusters) -> tuple[Split, dict[str, Estimate]]:
    """H_device, H_within and H_cluster from the sketches of all devices, and each with its standard error, from the
    spread of the copies."""
    by_copy = [split(part * copies**0.5, weights, clusters) for part in np.split(sketches, copies, axis=1)]
    estimates = {}
    for name in ("device", "within", "cluster"):
        values = np.array([getattr(one, name) for one in by_copy])
        error = values.std(ddof=1) / copies**0.5 if copies > 1 else 0.0
        estimates[name] = Estimate(float(values.mean()), float(error))
    return Split(**{name: estimate.value for name, estimate in estimates.items()}), estimates
