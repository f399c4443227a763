"""The theorem's constants for a clustering, from a survey of the fleet, with standard errors.

Of fleets with more than MAX_SURVEYED devices a stratified sample is surveyed. The devices are sorted by cluster, major
class and size, cut into MAX_SURVEYED strata of equal size, and one device of each is drawn, all with the same
probability. The means over sampled clusters are further apart than the clusters' own means. Let m of the n devices of
cluster K be sampled, a_k = p_k / sum of p_k over them, g_K their mean gradient and h_k = 1 - 2 a_k + sum of a_k^2. Then
the variance of g_K is estimated by

    v_K = (1 - m/n) sum_k a_k^2 ||g_k - g_K||^2 / h_k

and sum_K q_K (1 - q_K) v_K is subtracted from the H_cluster of the sample. Standard errors are those of a simple random
sample, by a jackknife over JACKKNIFE_GROUPS groups; stratification only makes them smaller.
"""

from dataclasses import dataclass

import numpy as np

from fedcluster.analysis.bound import Range
from fedcluster.analysis.heterogeneity import cohort_variance, estimated, sampling_term, squares
from fedcluster.fleet.clustering.clusters import Clusters
from fedcluster.fleet.fleet import Fleet, Floats, Ints
from fedcluster.rng import stream
from fedcluster.training.survey import Survey

MAX_SURVEYED = 2000
JACKKNIFE_GROUPS = 20
SMALL_COHORT = 50  # in larger cohorts the variation of the total weight does not matter
ERRORS = 3  # half the width of a range, in standard errors


@dataclass(frozen=True)
class Measures:
    """The constants of one clustering at one model. Errors are standard errors, 0 where a value is exact."""

    gradient: float  # ||grad f||^2
    H_device: float
    H_cluster: float
    error: float
    sketched: float  # H_cluster from the sketches alone
    sketched_error: float
    sampling: float  # what sampled cohorts add to H_cluster
    V: float
    V_error: float


def error_range(value: float, error: float) -> Range:
    """ERRORS standard errors on either side of an estimate that is not negative."""
    return Range(max(0.0, value - ERRORS * error), value + ERRORS * error)


def device_sample(fleet: Fleet, seed: int, clusters: Clusters | None = None) -> Ints:
    """The devices to survey, in ascending order: all of them, or one of each stratum."""
    n = len(fleet)
    if n <= MAX_SURVEYED:
        return np.arange(n)
    cluster = clusters.assignment if clusters is not None else np.zeros(n, np.int32)
    major = fleet.major_class if fleet.labels is not None else np.zeros(n, np.int32)
    order = np.lexsort((fleet.sizes, major, cluster))
    edges = np.arange(MAX_SURVEYED + 1) * n // MAX_SURVEYED
    drawn = edges[:-1] + np.floor(stream(seed, "device_sample").random(MAX_SURVEYED) * np.diff(edges)).astype(int)
    return np.sort(order[drawn])


def mean_loss(survey: Survey, fleet: Fleet) -> float:
    """f(w), estimated by the surveyed devices."""
    weights = fleet.weights[survey.devices]
    return float(weights @ survey.losses / weights.sum())


def largest_square(survey: Survey) -> Range:
    """G^2: the largest mean square of a batch gradient, ||grad f_k||^2 + s_k^2, over the surveyed devices."""
    square = survey.norms + survey.variances
    return Range(float((square - ERRORS * survey.errors).max()), float((square + ERRORS * survey.errors).max()))


def measures(survey: Survey, fleet: Fleet, clusters: Clusters, cohorts: Floats, seed: int) -> Measures:
    """The constants for these clusters. `cohorts`: the mean number of devices of each that take part in a cycle."""
    if len(survey.devices) < len(fleet):
        return from_sample(survey, fleet, clusters, cohorts, seed)
    weights = fleet.weights
    sketched, errors = estimated(survey.sketches, survey.copies, weights, clusters)
    if clusters.count == 1:
        H_cluster, error = 0.0, 0.0
    elif survey.between is not None:
        H_cluster, error = survey.between, 0.0
    else:
        H_cluster, error = sketched.cluster, errors["cluster"].error
    V, V_error = batch_variance(survey, fleet, clusters)
    return Measures(
        gradient=survey.gradient,
        H_device=max(0.0, float(weights @ survey.norms) - survey.gradient),  # exact: needs norms only
        H_cluster=H_cluster,
        error=error,
        sketched=sketched.cluster,
        sketched_error=errors["cluster"].error,
        sampling=sampling_term(survey.sketches, weights, clusters, cohorts, seed),
        V=V,
        V_error=V_error,
    )


def batch_variance(survey: Survey, fleet: Fleet, clusters: Clusters) -> tuple[float, float]:
    """V = sum_K q_K^-1 sum_{k in S_K} p_k^2 s_k^2 and its standard error, from samples of devices and of their rows."""
    n, m, sampled = len(fleet), len(survey.devices), survey.devices
    factors = n / m * fleet.weights[sampled] ** 2 / clusters.weights(fleet)[clusters.assignment[sampled]]
    device_error = float((factors * survey.variances).std()) * (m * (1 - m / n)) ** 0.5
    row_error = float(np.sqrt(((factors * survey.errors) ** 2).sum()))
    return float(factors @ survey.variances), float(np.hypot(device_error, row_error))


@dataclass(frozen=True)
class SampleEstimate:
    """Heterogeneity from a sample of devices, corrected for the sampling."""

    noise: float  # the variance of the mean gradient
    device: float
    cluster: float
    sampling: float  # by the delta method


def from_sample(survey: Survey, fleet: Fleet, clusters: Clusters, cohorts: Floats, seed: int) -> Measures:
    """`measures` of a survey that has only a sample of the devices."""
    sampled, m = survey.devices, len(survey.devices)
    weights, shares = fleet.weights[sampled], clusters.weights(fleet)
    sizes = np.bincount(clusters.assignment, minlength=clusters.count)
    least, share = np.floor(cohorts), cohorts % 1
    reciprocal = (1 - share) / least + share / (least + 1)  # E 1 / c

    def estimate(vectors: Floats, chosen: Ints) -> SampleEstimate:
        p, v = weights[chosen], vectors[chosen]
        labels, own, counts = np.unique(clusters.assignment[sampled[chosen]], return_inverse=True, return_counts=True)
        apart = v - p @ v / p.sum()
        order = np.argsort(own, kind="stable")
        starts = np.cumsum(counts) - counts
        totals = np.bincount(own, weights=p)
        means = np.add.reduceat((p[:, None] * apart)[order], starts) / totals[:, None]
        a = p / totals[own]
        h = 1 - 2 * a + np.bincount(own, weights=a**2)[own]
        around_mean = squares(apart - means[own]) / np.where(h > 1e-9, h, np.inf)
        variance = (1 - counts / sizes[labels]) * np.bincount(own, weights=a**2 * around_mean)  # v_K
        spread = np.bincount(own, weights=p**2 * around_mean) / counts * (sizes[labels] / shares[labels]) ** 2
        q = shares[labels] * ((counts > 1) | (counts == sizes[labels]))  # one of several devices has no variance
        q = q / max(float(q.sum()), 1e-300)
        noise = float(q**2 @ variance)
        return SampleEstimate(
            noise=noise,
            device=float(p @ squares(apart) / p.sum()) + noise,
            cluster=float(q @ (squares(means) - variance)) + noise if clusters.count > 1 else 0.0,
            sampling=float(q @ ((reciprocal[labels] - 1 / sizes[labels]) * spread)),
        )

    all_rows, rows = np.arange(m), survey.sketches.astype(np.float64)
    whole = estimate(rows, all_rows)
    groups = range(JACKKNIFE_GROUPS)
    left_out = [estimate(rows, all_rows[all_rows % JACKKNIFE_GROUPS != group]).cluster for group in groups]
    sampling_error = float(np.std(left_out)) * (JACKKNIFE_GROUPS - 1) ** 0.5
    copies = [part * survey.copies**0.5 for part in np.split(rows, survey.copies, axis=1)]
    by_copy = [estimate(part, all_rows).cluster for part in copies]
    sketching_error = float(np.std(by_copy, ddof=1)) / survey.copies**0.5 if survey.copies > 1 else 0.0
    V, V_error = batch_variance(survey, fleet, clusters)
    H_cluster = max(0.0, whole.cluster)
    return Measures(
        gradient=max(0.0, survey.gradient - whole.noise),
        H_device=max(whole.device, H_cluster),
        H_cluster=H_cluster,
        error=float(np.hypot(sampling_error, sketching_error)),
        sketched=H_cluster,
        sketched_error=sketching_error,
        sampling=whole.sampling * small_cohort_factor(rows, weights, int(np.mean(cohorts)), seed),
        V=V,
        V_error=V_error,
    )


def small_cohort_factor(vectors: Floats, weights: Floats, c: int, seed: int) -> float:
    """The variance of cohorts of c devices over the delta method's value, for devices of unequal weight."""
    n = len(weights)
    if np.ptp(weights) == 0 or c > SMALL_COHORT or c >= n:
        return 1.0
    p = weights / weights.mean()
    linear = (1 - c / n) / c * float((p**2 * squares(vectors - p @ vectors / n)).sum()) / (n - 1)
    exact = cohort_variance(vectors.astype(np.float32), weights, c, stream(seed, "cohort_variance", cycle=-1))
    return exact / linear if linear else 1.0
