"""What a run notes of its fleet and clusters, for reports: fleet.json.

Sizes are those of all devices and clusters. Class mixes and free hours are measured on at most `SAMPLED` devices,
evenly spaced, so that a fleet of a million devices costs little more than one of a thousand.
"""

from typing import Any

import numpy as np

from fedcluster.fleet.clustering.clusters import Clusters
from fedcluster.fleet.fleet import Fleet, Ints
from fedcluster.fleet.timezones import DAY
from fedcluster.training.setup import Setup

SAMPLED, SHOWN, NAMED = 1000, 200, 5000  # devices measured, devices shown one by one, names written
CLASSES, CLUSTERS = 100, 1000  # the most that are written
BINS = 48  # half hours of the day
DAYS = 7  # of a trace, over which free hours are averaged
NIGHT = (22.0, 6.0)  # local time; shown where there is no trace of when devices are free


def summarize(setup: Setup) -> dict[str, Any]:
    """The contents of fleet.json."""
    fleet, clusters = setup.fleet, setup.clusters
    devices, sizes = len(fleet), np.asarray(fleet.sizes)
    sample = np.unique(np.linspace(0, devices - 1, min(SAMPLED, devices)).astype(np.int64))
    counts, edges = np.histogram(sizes, bins=min(20, len(np.unique(sizes[:100_000]))))
    summary: dict[str, Any] = {
        "devices": devices,
        "sampled": len(sample),
        "left_out": clusters.left_out(),
        "samples": {"least": int(sizes.min()), "mean": float(sizes.mean()), "most": int(sizes.max())},
        "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
        "clusters": cluster_sizes(fleet, clusters),
        **({"names": [str(name) for name in fleet.names]} if fleet.names is not None and devices <= NAMED else {}),
    }
    return summary | class_mixes(fleet, clusters, sample) | free_hours(fleet, clusters, sample)


def cluster_sizes(fleet: Fleet, clusters: Clusters) -> list[dict[str, Any]]:
    """Devices, samples and weight q_K of every cluster."""
    weights = clusters.weights(fleet)
    return [
        {"devices": len(members), "samples": int(fleet.sizes[members].sum()), "weight": float(weights[K])}
        for K, members in enumerate(clusters.members[:CLUSTERS])
    ]


def class_mixes(fleet: Fleet, clusters: Clusters, sample: Ints) -> dict[str, Any]:
    """The share of each class in the samples of the clusters, and of some devices in the order of their clusters;
    nothing where targets are not classes or are not known."""
    if fleet.labels is None:
        return {}
    counts = np.array([fleet.label_counts(int(k)) for k in sample], np.float64)
    if not 1 < counts.shape[1] <= CLASSES:
        return {}
    inside = clusters.assignment[sample]
    mixes = np.zeros((clusters.count, counts.shape[1]))
    np.add.at(mixes, inside[inside >= 0], counts[inside >= 0])
    order = np.lexsort((counts.argmax(axis=1), inside))
    shown = order[np.unique(np.linspace(0, len(order) - 1, min(SHOWN, len(order))).astype(int))]
    devices = [
        {"device": int(sample[row]), "cluster": int(inside[row]), "shares": shares(counts[row])} for row in shown
    ]
    return {"class_shares": [shares(mix) for mix in mixes[:CLUSTERS]], "shown": devices}


def shares(counts: Any) -> list[float]:
    return [round(float(share), 4) for share in counts / max(counts.sum(), 1)]


def free_hours(fleet: Fleet, clusters: Clusters, sample: Ints) -> dict[str, Any]:
    """The share of each cluster that is free in each half hour of the day (UTC) or, without a trace, for which it is
    night; nothing where neither availability nor time zones are known."""
    trace, offset = fleet.known.availability, fleet.known.utc_offset
    inside = clusters.assignment[sample]
    if trace is not None:
        days = max(1, min(DAYS, int(trace.period[sample].max()) // DAY))
        times = (np.arange(BINS)[:, None] + 0.5) * DAY / BINS + np.arange(days) * DAY
        at = [[trace.find(sample, int(t))[2] for t in row] for row in times]
        free = np.array(at).mean(axis=1).T  # [devices, BINS]
    elif offset is not None and np.isfinite(offset[sample]).all():
        local = np.mod((np.arange(BINS) + 0.5) * 24 / BINS + offset[sample, None], 24)
        free = ((local >= NIGHT[0]) | (local < NIGHT[1])).astype(float)
    else:
        return {}
    rows = [free[inside == K].mean(axis=0) if (inside == K).any() else np.zeros(BINS) for K in range(clusters.count)]
    hours = [[round(float(value), 3) for value in row] for row in rows[:CLUSTERS]]
    return {"free": hours, "free_is": "free" if trace is not None else "night"}
