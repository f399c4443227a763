"""Clusters by time zone: the devices of a cluster have their night at about the same time."""

import numpy as np

from fedcluster.errors import BadData
from fedcluster.fleet.clustering.request import Method, Request
from fedcluster.fleet.fleet import Fleet, Floats, Ints, name_of


def timezone(request: Request) -> Ints:
    """Clusters of equal size that are contiguous in the UTC offset, in the order in which night comes to them.

    Midnight comes to offset o at -o UTC, on a circle of 24 hours, which is cut at its widest gap. Devices of an offset
    that is divided between two clusters are assigned at random.
    """
    fleet = request.fleet
    midnight = np.mod(-utc_offset(fleet), 24)
    distinct = np.unique(midnight)
    gaps = np.diff(distinct, append=distinct[0] + 24)
    since_gap = np.mod(midnight - distinct[(int(gaps.argmax()) + 1) % len(distinct)], 24)
    assignment = np.empty(len(fleet), np.int64)
    order = np.lexsort((request.rng.random(len(fleet)), since_gap))
    assignment[order] = np.arange(len(fleet)) * request.clusters // len(fleet)
    return assignment


def utc_offset(fleet: Fleet) -> Floats:
    """Hours ahead of UTC: by time zone, else by utc_offset, else by longitude (15 degrees are an hour)."""
    known = fleet.known
    ahead = np.full(len(fleet), np.nan) if known.utc_offset is None else known.utc_offset
    if known.longitude is not None:
        ahead = np.where(np.isnan(ahead), known.longitude / 15, ahead)
    unknown = np.flatnonzero(np.isnan(ahead))
    if len(unknown):
        raise BadData(
            f'clusters.method = "timezone": neither timezone, utc_offset nor longitude of device '
            f"{name_of(fleet.names, int(unknown[0]))} is known; give one of them in fleet.path, or use fleet.world"
        )
    return ahead


TIMEZONE = Method(timezone, needs=lambda options: "timezone")
