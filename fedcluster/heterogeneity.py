"""How much devices differ, and how much of it is left between clusters.

With g_k = grad f_k(w), g_S = sum of (p_k / q_K) g_k over a cluster and g = grad f(w) = sum of p_k g_k:

    H_device  = sum_k p_k ||g_k - g||^2
    H_within  = sum_k p_k ||g_k - g_{S_K(k)}||^2
    H_cluster = sum_K q_K ||g_{S_K} - g||^2,        H_within + H_cluster = H_device

The last line is why clusters differ less than devices. The same sums over label shares in place of gradients say how
much the label mixes of clusters differ.
"""

from dataclasses import dataclass

import numpy as np

from fedcluster.clusters import Clusters
from fedcluster.errors import BadExperiment
from fedcluster.fleet import Floats


@dataclass(frozen=True)
class Split:
    """H_device and its two parts; `by_cluster` is the part of H_within that each cluster has."""

    device: float
    within: float
    cluster: float
    by_cluster: Floats


def check_whole(clusters: Clusters) -> None:
    """The theorem is about fleets of which every device is in a cluster."""
    if left := clusters.left_out():
        raise BadExperiment(
            f"{left:,} of {len(clusters.assignment):,} devices are in no cluster, and the theorem is about fleets "
            "whose devices all take part: leave them out of the fleet file"
        )


def split(vectors: Floats, weights: Floats, clusters: Clusters) -> Split:
    """The heterogeneity of one vector for every device, of weight p_k each."""
    centred = np.asarray(vectors, np.float64) - weights @ np.asarray(vectors, np.float64)
    means = cluster_means(centred, weights, clusters)
    shares = np.bincount(clusters.assignment, weights=weights, minlength=clusters.count)
    apart = weights * squares(centred - means[clusters.assignment])
    by_cluster = np.bincount(clusters.assignment, weights=apart, minlength=clusters.count)
    return Split(
        device=float(weights @ squares(centred)),
        within=float(by_cluster.sum()),
        cluster=float(shares @ squares(means)),
        by_cluster=by_cluster,
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


def sampling_term(by_cluster: Floats, clusters: Clusters, cohorts: Floats) -> float:
    """What it adds to H_cluster that only c_K of a cluster's n_K devices take part in a cycle:

    sum_K q_K E ||g_cohort - g_{S_K}||^2 = sum_K (n_K - c_K) / (c_K (n_K - 1)) * (cluster K's part of H_within)

    exactly for devices of one weight, drawn uniformly without replacement; nearly so for others. The theorem has no
    such term: it lets all devices of a cluster take part.
    """
    sizes = np.bincount(clusters.assignment, minlength=clusters.count)
    return float((by_cluster * (sizes - cohorts) / (cohorts * np.maximum(sizes - 1, 1))).sum())
