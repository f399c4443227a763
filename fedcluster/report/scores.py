"""Scores by device for a report: how they are distributed, the mean of each cluster, and the worst devices by name."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from fedcluster.models.metrics import METRICS
from fedcluster.report.events import name_of
from fedcluster.runs.devices import DEVICES, score_names
from fedcluster.runs.metrics import Line, read_lines

WORST = 25  # devices named
BINS = 24


def device_scores(folder: Path, names: Any) -> dict[str, Any]:
    """The first and the last evaluation of the devices; nothing where they were not evaluated."""
    lines = [line for line in read_lines(folder / DEVICES) if usable(line)]
    if not lines:
        return {}
    first, last = lines[0], lines[-1]
    found = [score(name, first, last, names) for name in score_names(last) if name in first]
    return {"round": last["round"], "first": first["round"], "devices": len(last["device"]), "scores": found}


def usable(line: Line) -> bool:
    """Whether all columns are lists of one length, and those of scores hold numbers."""
    columns: list[Any] = [line.get(key) for key in ("device", "cluster", "samples")]
    columns += [line[name] for name in score_names(line)]
    if not all(isinstance(column, list) and len(column) == len(columns[0]) > 0 for column in columns):
        return False
    return all(value is None or isinstance(value, int | float) for column in columns for value in column)


def score(name: str, first: Line, last: Line, names: Any) -> dict[str, Any]:
    """One score over all devices. The worst devices are in `worst`, the worst first."""
    metric = METRICS.get(name)
    higher = metric.higher_is_better if metric else name != "loss"
    before, values = column(first[name]), column(last[name])
    known = np.flatnonzero(np.isfinite(values))
    order = known[np.argsort(values[known] if higher else -values[known], kind="stable")]
    clusters = np.array([-1 if K is None else K for K in last["cluster"]])
    inside = np.concatenate([before[np.isfinite(before)], values[known]])
    edges = np.histogram_bin_edges(inside, bins=BINS) if len(inside) else np.array([0.0, 1.0])
    return {
        "name": name[:100].replace("_", " "),
        "percent": bool(metric and metric.percent),
        "higher": higher,
        "edges": edges.tolist(),
        "before": np.histogram(before[np.isfinite(before)], edges)[0].tolist(),
        "after": np.histogram(values[known], edges)[0].tolist(),
        "mean": mean(values[known]),
        "clusters": [
            {
                "cluster": int(K),
                "devices": int((clusters == K).sum()),
                "mean": mean(values[known[clusters[known] == K]]),
            }
            for K in np.unique(clusters)[:200]
        ],
        "worst": [
            [name_of(last["device"][k], names), int(clusters[k]), last["samples"][k], float(values[k])]
            for k in order[:WORST]
        ],
    }


def column(values: list[Any]) -> Any:
    return np.array([math.nan if value is None else value for value in values], np.float64)


def mean(values: Any) -> float | None:
    return float(values.mean()) if len(values) else None
