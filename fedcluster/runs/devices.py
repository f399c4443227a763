"""Scores by device: the lines of devices.jsonl, what metrics.jsonl says of them, and devices.parquet.

Of many devices, the unweighted mean of their scores is reported, the mean of the worst tenth and the variance, as in
Li, Sanjabi, Beirami, Smith: Fair Resource Allocation in Federated Learning, 2020; and the mean in each cluster.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcluster.files import write_atomically
from fedcluster.models.metrics import Metric
from fedcluster.runs.metrics import Line

DEVICES, TABLE = "devices.jsonl", "devices.parquet"
WORST = 0.1  # the share of devices whose mean is the worst decile
PLACES = ("round", "device", "cluster", "samples")


def device_line(round: int, device: Any, cluster: Any, samples: Any, scores: Mapping[str, Sequence[float]]) -> Line:
    """A line of devices.jsonl: a list for each column, with an entry for each device. Scores that are not finite, or
    that a device does not have, are None."""
    columns = {name: [value if math.isfinite(value) else None for value in column] for name, column in scores.items()}
    return {"round": round, "device": list(device), "cluster": list(cluster), "samples": list(samples), **columns}


def score_names(line: Line) -> list[str]:
    """The scores with one value; those with several, such as one for each class, are in the table only."""
    return [name for name in line if name not in PLACES and "/" not in name]


def column_names(scores: Iterable[Iterable[str]]) -> list[str]:
    """The names of the scores that any device has. A device may lack some: a class of which it has no samples."""
    names = list(dict.fromkeys(chain.from_iterable(scores)))
    metrics = list(dict.fromkeys(name.partition("/")[0] for name in names))

    def place(name: str) -> tuple[int, int, str]:
        metric, _, part = name.partition("/")
        return metrics.index(metric), len(part), part

    return sorted(names, key=place)


def summarize(line: Line, metrics: Sequence[Metric]) -> dict[str, Any]:
    """What metrics.jsonl has of a line: the number of devices, the distribution of every score over them, and the mean
    scores of each cluster. Devices whose score is not finite are left out of it."""
    higher = {"loss": False} | {metric.name: metric.higher_is_better for metric in metrics}
    columns = {name: np.array(line[name], np.float64) for name in score_names(line)}
    assignment = np.array(line["cluster"])
    clusters = [
        {"cluster": int(K), "devices": int((assignment == K).sum())}
        | {name: distribution(column[assignment == K], True)["mean"] for name, column in columns.items()}
        for K in np.unique(assignment)
    ]
    spread = {name: distribution(column, higher[name]) for name, column in columns.items()}
    return {"devices": len(assignment), **spread, "clusters": clusters}


def distribution(values: NDArray[np.float64], higher_is_better: bool) -> dict[str, float | None]:
    """Mean, mean of the worst tenth (at least one device) and variance over devices."""
    known = np.sort(values[np.isfinite(values)])
    if not len(known):
        return {"mean": None, "worst_decile": None, "variance": None}
    count = math.ceil(WORST * len(known))
    worst = known[:count] if higher_is_better else known[-count:]
    return {"mean": float(known.mean()), "worst_decile": float(worst.mean()), "variance": float(known.var())}


def write_table(lines: Sequence[Line], path: Path, names: Any = None) -> None:
    """devices.parquet: a row for each device of each line. `names` are the names of devices, where they have some."""
    import pyarrow as pa
    from pyarrow import parquet

    rows = [len(line["device"]) for line in lines]
    device = np.fromiter(chain.from_iterable(line["device"] for line in lines), np.int64, sum(rows))
    columns: dict[str, Any] = {"round": pa.array(np.repeat([line["round"] for line in lines], rows).astype(np.int32))}
    columns["device"] = pa.array(device)
    if names is not None:
        columns["name"] = pa.array([str(names[k]) for k in device], pa.string())
    for column, kind in (("cluster", pa.int32()), ("samples", pa.int64())):
        columns[column] = pa.array(list(chain.from_iterable(line[column] for line in lines)), kind)
    for score in column_names([name for name in line if name not in PLACES] for line in lines):
        values = (line.get(score, [None] * count) for line, count in zip(lines, rows, strict=True))
        columns[score] = pa.array(list(chain.from_iterable(values)), pa.float64())
    write_atomically(path, lambda file: parquet.write_table(pa.table(columns), file))
