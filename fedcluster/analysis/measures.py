"""What a survey says of a clustering, each number with its standard error.

Fleets of more than MANY devices are surveyed by a stratified sample. The devices are put in order by cluster, major
class and size, the order is cut into MANY equal strata, and one device of each is drawn, all with the same probability.
Means over a sampled cluster are further apart than the clusters' own. With a_k = p_k / sum of p_k over the m devices of
cluster K that are sampled of its n, g_K their mean gradient and h_k = 1 - 2 a_k + sum of a_k^2, it has the variance

    v_K = (1 - m/n) sum_k a_k^2 ||g_k - g_K||^2 / h_k

so that sum_K q_K (1 - q_K) v_K is taken off the H_cluster of the sample. Errors are those of a simple random sample,
by a jackknife over GROUPS groups, and stratification only makes them smaller.
"""

from dataclasses import dataclass

import numpy as np

from fedcluster.analysis.bound import Range
from fedcluster.analysis.heterogeneity import cohort_variance, estimated, sampling_term, squares
from fedcluster.fleet.clustering.clusters import Clusters
from fedcluster.fleet.fleet import Fleet, Floats, Ints
from fedcluster.rng import stream
from fedcluster.training.survey import Survey

MANY = 2000  # devices that are surveyed one and all
GROUPS = 20
SMALL = 50  # devices of a cohort, up to which it matters that their total weight varies
ERRORS = 3  # standard errors on either side of an estimate make a range


@dataclass(frozen=True)
class Measures:
    """Of one clustering, at one model. Errors are standard errors, 0 where a value is exact."""

    gradient: float  # ||grad f||^2
    H_device: float
    H_cluster: float
    error: float
    sketched: float  # H_cluster from the sketches alone
    sketched_error: float
    sampling: float  # what cohorts of part of a cluster add to H_cluster
    V: float
    V_error: float

    @property
    def H_range(self) -> Range:
        return around(self.H_cluster, self.error)

    @property
    def V_range(self) -> Range:
        return around(self.V, self.V_error)


def around(value: float, error: float) -> Range:
    return Range(max(0.0, value - ERRORS * error), value + ERRORS * error)


def device_sample(fleet: Fleet, seed: int, clusters: Clusters | None = None) -> Ints:
    """The devices to survey, in ascending order: all of them, or one of each of MANY strata."""
    n = len(fleet)
    if n <= MANY:
        return np.arange(n)
    cluster = clusters.assignment if clusters is not None else np.zeros(n, np.int32)
    order = np.lexsort((fleet.sizes, fleet.major_class, cluster))
    edges = np.arange(MANY + 1) * n // MANY
    places = edges[:-1] + np.floor(stream(seed, "device_sample").random(MANY) * np.diff(edges)).astype(int)
    return np.sort(order[places])


def mean_loss(found: Survey, fleet: Fleet) -> float:
    weights = fleet.weights[found.devices]
    return float(weights @ found.losses / weights.sum())


def largest_square(found: Survey) -> Range:
    """G^2: the largest mean square of a device's batch gradient, ||grad f_k||^2 + s_k^2, of the devices surveyed."""
    square = found.norms + found.variances
    return Range(float((square - ERRORS * found.errors).max()), float((square + ERRORS * found.errors).max()))


def measures(found: Survey, fleet: Fleet, clusters: Clusters, cohorts: Ints, seed: int) -> Measures:
    """What was found, for these clusters, of whose devices `cohorts` take part in a cycle."""
    if len(found.devices) < len(fleet):
        return from_sample(found, fleet, clusters, cohorts, seed)
    weights = fleet.weights
    cut, errors = estimated(found.sketches, found.copies, weights, clusters)
    between, error = (found.between, 0.0) if found.between is not None else (cut.cluster, errors["cluster"].error)
    if clusters.count == 1:
        between, error = 0.0, 0.0
    V, V_error = batch_noise(found, fleet, clusters)
    return Measures(
        gradient=found.gradient,
        H_device=max(0.0, float(weights @ found.norms) - found.gradient),  # exactly, from norms alone
        H_cluster=between,
        error=error,
        sketched=cut.cluster,
        sketched_error=errors["cluster"].error,
        sampling=sampling_term(found.sketches, weights, clusters, cohorts, seed),
        V=V,
        V_error=V_error,
    )


def batch_noise(found: Survey, fleet: Fleet, clusters: Clusters) -> tuple[float, float]:
    """V = sum_K q_K^-1 sum_{k in S_K} p_k^2 s_k^2 and its standard error, from samples of devices and of their rows."""
    n, m, sampled = len(fleet), len(found.devices), found.devices
    serve_options = n / m * fleet.weights[sampled] ** 2 / clusters.weights(fleet)[clusters.assignment[sampled]]
    of_devices = float((serve_options * found.variances).std()) * (m * (1 - m / n)) ** 0.5
    of_rows = float(np.sqrt(((serve_options * found.errors) ** 2).sum()))
    return float(serve_options @ found.variances), float(np.hypot(of_devices, of_rows))


@dataclass(frozen=True)
class Estimate:
    """From a sample of devices, corrected for that."""

    noise: float  # the variance of the mean gradient
    device: float
    cluster: float
    sampling: float  # by the delta method


def from_sample(found: Survey, fleet: Fleet, clusters: Clusters, cohorts: Ints, seed: int) -> Measures:
    sampled, m = found.devices, len(found.devices)
    weights, shares = fleet.weights[sampled], clusters.weights(fleet)
    sizes = np.bincount(clusters.assignment, minlength=clusters.count)

    def estimate(vectors: Floats, chosen: Ints) -> Estimate:
        p, v = weights[chosen], vectors[chosen]
        labels, own, counts = np.unique(clusters.assignment[sampled[chosen]], return_inverse=True, return_counts=True)
        apart = v - p @ v / p.sum()
        order = np.argsort(own, kind="stable")
        starts = np.cumsum(counts) - counts
        totals = np.bincount(own, weights=p)
        means = np.add.reduceat((p[:, None] * apart)[order], starts) / totals[:, None]
        a = p / totals[own]
        kept = 1 - 2 * a + np.bincount(own, weights=a**2)[own]  # of a device's variance in its distance to the mean
        around_mean = squares(apart - means[own]) / np.where(kept > 1e-9, kept, np.inf)
        variance = (1 - counts / sizes[labels]) * np.bincount(own, weights=a**2 * around_mean)  # v_K
        spread = np.bincount(own, weights=p**2 * around_mean) / counts * (sizes[labels] / shares[labels]) ** 2
        q = shares[labels] * ((counts > 1) | (counts == sizes[labels]))  # of one device alone nothing can be told
        q = q / max(float(q.sum()), 1e-300)
        noise = float(q**2 @ variance)
        c = cohorts[labels]
        return Estimate(
            noise=noise,
            device=float(p @ squares(apart) / p.sum()) + noise,
            cluster=float(q @ (squares(means) - variance)) + noise if clusters.count > 1 else 0.0,
            sampling=float(q @ ((1 - c / sizes[labels]) / c * spread)),
        )

    everyone, rows = np.arange(m), found.sketches.astype(np.float64)
    whole = estimate(rows, everyone)
    left = [estimate(rows, everyone[everyone % GROUPS != group]).cluster for group in range(GROUPS)]
    copies = [part * found.copies**0.5 for part in np.split(rows, found.copies, axis=1)]
    one_by_one = [estimate(part, everyone).cluster for part in copies]
    sketching = float(np.std(one_by_one, ddof=1)) / found.copies**0.5 if found.copies > 1 else 0.0
    jackknife = float(np.std(left)) * (GROUPS - 1) ** 0.5
    error = float(np.hypot(jackknife, sketching))
    V, V_error = batch_noise(found, fleet, clusters)
    between = max(0.0, whole.cluster)
    return Measures(
        gradient=max(0.0, found.gradient - whole.noise),
        H_device=max(whole.device, between),
        H_cluster=between,
        error=error,
        sketched=between,
        sketched_error=sketching,
        sampling=whole.sampling * small_cohorts(rows, weights, int(np.mean(cohorts)), seed),
        V=V,
        V_error=V_error,
    )


def small_cohorts(vectors: Floats, weights: Floats, c: int, seed: int) -> float:
    """By what factor cohorts of c devices are further off than the delta method says, for devices of unequal weight."""
    n = len(weights)
    if np.ptp(weights) == 0 or c > SMALL or c >= n:
        return 1.0
    p = weights / weights.mean()
    linear = (1 - c / n) / c * float((p**2 * squares(vectors - p @ vectors / n)).sum()) / (n - 1)
    exact = cohort_variance(vectors.astype(np.float32), weights, c, stream(seed, "cohort_variance", cycle=-1))
    return exact / linear if linear else 1.0
