"""Clusters from a CSV file."""

import csv
from io import StringIO
from typing import Any

import numpy as np
from pydantic import Field, field_validator

from fedcluster.errors import BadData
from fedcluster.experiment import FilePath, Section
from fedcluster.fleet.clustering.request import Method, Request
from fedcluster.fleet.fleet import Fleet, Ints
from fedcluster.inputs import located, read_bytes

UNASSIGNED = -2  # a device that the file has not named yet


class FileOptions(Section):
    """The file: a CSV with the columns device,cluster, and perhaps second."""

    path: FilePath | None = Field(None, validate_default=True)

    @field_validator("path")
    @classmethod
    def path_is_given(cls, path: Any) -> Any:
        if path is None:
            raise ValueError('is missing: method = "file" needs a CSV file with the columns device,cluster')
        return path


def from_file(request: Request) -> Ints:
    """The assignment in a CSV file with the columns device,cluster: every device once, clusters numbered from 0 or
    from 1, `none` for a device that takes no part. With a column second, a device is in two clusters."""
    fleet, path = request.fleet, located(str(request.options.path), "clusters.path")
    index = {str(name): k for k, name in enumerate(fleet.names if fleet.names is not None else range(len(fleet)))}
    clusters = np.full((len(fleet), 2), UNASSIGNED)
    try:
        with StringIO(read_bytes(path, "clusters.path").decode("utf-8-sig"), newline="") as lines:
            rows = csv.DictReader(lines)
            if not {"device", "cluster"} <= set(rows.fieldnames or ()):
                raise BadData(f"{path}: the first line must name the columns device,cluster")
            for row in rows:
                read_row(row, f"{path}, line {rows.line_num}", index, fleet, clusters)
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadData(f"clusters.path: cannot read {path} ({error})") from None
    missing_rows = np.flatnonzero(clusters[:, 0] == UNASSIGNED)
    if len(missing_rows):
        missing = next(name for name, k in index.items() if k == missing_rows[0])
        raise BadData(f"{path}: device {missing} has no cluster; every device needs one row")
    assigned = clusters[clusters >= 0]
    if not len(assigned):
        raise BadData(f"{path}: no device has a cluster")
    if assigned.min() == 1 and assigned.max() != (request.count or 0) - 1:
        clusters[clusters >= 0] -= 1
    return clusters if (clusters[:, 0] != clusters[:, 1]).any() else clusters[:, 0]


def read_row(row: dict[str, str | None], where: str, index: dict[str, int], fleet: Fleet, clusters: Ints) -> None:
    """Enter a row of the file into `clusters`."""
    device = (row["device"] or "").strip()
    if device not in index:
        raise BadData(f"{where}: the fleet has no device {device!r}")
    if clusters[index[device], 0] != UNASSIGNED:
        raise BadData(f"{where}: device {device} has a cluster already")
    for column, name in enumerate(("cluster", "second" if "second" in row else "cluster")):
        cluster = (row[name] or "").strip()
        if cluster != "none" and (not (cluster.isdecimal() and cluster.isascii()) or int(cluster) > len(fleet)):
            raise BadData(f"{where}: {name} {cluster!r} is neither a whole number from 0 to {len(fleet)} nor none")
        clusters[index[device], column] = -1 if cluster == "none" else int(cluster)


FILE = Method(from_file, FileOptions, default_count=None)
