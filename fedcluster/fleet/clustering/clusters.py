"""The clusters: which devices take their turn together.

A clustering is a function `(fleet, rng, options) -> assignment`: the cluster of every device, numbered from 0, or -1
for a device that takes no part. With two columns a device is in two clusters, one of which is drawn each round.
"""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import sha256
from io import StringIO
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcluster.errors import BadData, BadExperiment
from fedcluster.experiment import import_object, sections
from fedcluster.fleet.clustering import anticlustering
from fedcluster.fleet.clustering.slots import Timetable, timetable
from fedcluster.fleet.fleet import Fleet, Floats, Ints
from fedcluster.inputs import located, read_bytes
from fedcluster.rng import stream

UNEQUAL = 0.1  # relative difference between q_K and 1/M that is reported
UNASSIGNED = -2  # a device that a cluster file has not named yet
Clustering = Callable[[Fleet, Generator, sections.Clusters], NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Clusters:
    """S_1..S_M as an assignment: every device in one cluster, or in none (-1), and no cluster empty. Where there is a
    `second` assignment, a device is in one of the two in every round."""

    assignment: Ints
    count: int
    second: Ints | None = None

    @cached_property
    def members(self) -> list[Ints]:
        """The devices of each cluster, in ascending order."""
        return self.split(self.assignment)

    def members_in(self, round: int, seed: int) -> list[Ints]:
        """The same in this round, where devices may sit in two clusters."""
        if self.second is None:
            return self.members
        heads = stream(seed, "soft", round).random(len(self.assignment)) < 0.5
        return self.split(np.where(heads, self.assignment, self.second))

    def split(self, assignment: Ints) -> list[Ints]:
        order = np.argsort(assignment, kind="stable")
        ends = np.cumsum(np.bincount(assignment + 1, minlength=self.count + 1))
        return np.split(order, ends[:-1])[1:]

    def left_out(self) -> int:
        """How many devices are in no cluster."""
        return int((self.assignment < 0).sum())

    def digest(self) -> str:
        """A fingerprint, so that a resumed run can tell that its clusters are the same."""
        second = b"" if self.second is None else self.second.tobytes()
        return sha256(self.assignment.tobytes() + second).hexdigest()

    def weights(self, fleet: Fleet) -> Floats:
        """q_K = sum of p_k over the cluster."""
        return np.bincount(self.assignment + 1, weights=fleet.weights, minlength=self.count + 1)[1:]

    def inequality(self, fleet: Fleet, counted: str = "samples") -> str | None:
        """One sentence on unequal clusters, where a q_K differs from 1/M by more than a tenth of it. `counted` names
        what the fleet's weights count. A device in two clusters counts half in each."""
        share = self.weights(fleet)
        if self.second is not None:
            share = (share + Clusters(self.second, self.count).weights(fleet)) / 2
        share /= share.sum()  # devices may be in no cluster
        if np.abs(share * self.count - 1).max() <= UNEQUAL:
            return None
        return (
            f"Clusters hold from {share.min():.2%} to {share.max():.2%} of the {counted}, but every cycle takes a full "
            "step whatever the size of its cluster: training minimises the mean loss over clusters, not over samples. "
            f"The theorem needs clusters of equal weight, q_K = 1/M = {1 / self.count:.2%}. "
            'clusters.weighting = "sample" scales the learning rate by M q_K, which minimises the mean over samples.'
        )


def build(
    options: sections.Clusters, fleet: Fleet, seed: int, features: Floats | None = None, round: int = 0
) -> Clusters:
    """The clusters that the experiment describes, checked. `balanced` and `similar` go by the devices' features, one
    row each; left out, by their label shares. Only "redrawn" ones depend on the round."""
    if options.count is not None and options.count > len(fleet):
        raise BadExperiment(
            f"clusters.count = {options.count} is more than the fleet's {len(fleet)} devices: use fewer clusters"
        )
    clustering: Clustering
    match options.method:
        case "random" | "redrawn":
            clustering = random
        case "major_class":
            clustering = major_class
        case "timezone":
            clustering = timezone
        case "availability":
            clustering = availability
        case "balanced":
            clustering = partial(anticlustering.balanced, features=features)
        case "similar":
            clustering = partial(anticlustering.similar, features=features)
        case "file":
            clustering = file
        case str() as name:
            clustering = import_object(name, "fleet", "rng", "options")
        case function:
            clustering = function
    given = np.asarray(clustering(fleet, stream(seed, "clusters", round), options))
    if given.shape not in ((len(fleet),), (len(fleet), 2)) or given.dtype.kind not in "iu" or given.min() < -1:
        raise BadExperiment(
            f"the clustering must give each of the {len(fleet)} devices a whole number from 0 (or -1: in no cluster), "
            f"but gave {given.dtype} {list(given.shape)}"
        )
    assignment, second = (given, None) if given.ndim == 1 else (given[:, 0], given[:, 1])
    if second is not None and (second.max() > assignment.max() or ((assignment < 0) != (second < 0)).any()):
        raise BadExperiment("the clustering gives a device a second cluster that is nobody's first, or only one of two")
    count = options.count or int(assignment.max()) + 1
    if options.method == "availability":
        count = int(assignment.max()) + 1  # slots in which nobody is free have no cluster
    if assignment.max() >= count:
        raise BadExperiment(
            f"clusters.count = {count}, but a device is in cluster {assignment.max()} (they start at 0)"
        )
    sizes = np.bincount(assignment + 1, minlength=count + 1)[1:]
    if not sizes.all():
        raise BadExperiment(
            f"cluster {sizes.argmin()} of {count} is empty: give it a device, renumber the clusters, "
            "or lower clusters.count"
        )
    return from_assignment(given, count)


def from_assignment(given: Ints, count: int | None = None) -> Clusters:
    """Clusters from an assignment of one column or two."""
    columns = given.astype(np.int32)
    first, second = (columns, None) if given.ndim == 1 else (columns[:, 0].copy(), columns[:, 1].copy())
    return Clusters(first, int(first.max()) + 1 if count is None else count, second)


def random(fleet: Fleet, rng: Generator, options: sections.Clusters) -> Ints:
    """Random clusters of equal size."""
    return rng.permutation(np.arange(len(fleet)) % cluster_count(options))


def major_class(fleet: Fleet, rng: Generator, options: sections.Clusters) -> Ints:
    """Clusters of equal size in which a share rho_cluster of cluster K's devices have class K as their major class.

    Cluster K gets that many devices of its class at random. The other devices fill the remaining places at random; one
    that lands in a cluster of its own class is swapped with a device such that both fit. Such a partner exists exactly
    as long as the requested shares are possible.
    """
    count = cluster_count(options)
    slots = np.arange(len(fleet)) % count
    classes = int(fleet.major_class.max()) + 1
    own_class = np.arange(count) % classes  # the class of each cluster
    wanted = np.floor(options.rho_cluster * np.bincount(slots) + 0.5).astype(int)

    assignment = np.full(len(fleet), -1)
    for c in range(classes):
        devices = rng.permutation(np.flatnonzero(fleet.major_class == c))
        takers = np.repeat(np.flatnonzero(own_class == c), wanted[own_class == c])
        if len(takers) > len(devices):
            raise BadExperiment(
                f"clusters.rho_cluster = {options.rho_cluster} with clusters.count = {count} asks for {len(takers)} "
                f"devices of major class {c}, but the fleet has {len(devices)}: lower rho_cluster or raise count"
            )
        assignment[devices[: len(takers)]] = takers

    rest = np.flatnonzero(assignment < 0)
    places = rng.permutation(np.repeat(np.arange(count), np.bincount(slots) - wanted))
    major = fleet.major_class[rest]
    for i in np.flatnonzero(own_class[places] == major):
        if own_class[places[i]] != major[i]:
            continue  # an earlier swap has moved it already
        j = partner(rng, int(i), places, major, own_class)
        if j is None:
            raise BadExperiment(
                f"clusters.rho_cluster = {options.rho_cluster} leaves devices of major class {major[i]} that only fit "
                "clusters of that class: raise rho_cluster"
            )
        places[i], places[j] = places[j], places[i]
    assignment[rest] = places
    return assignment


def partner(rng: Generator, i: int, places: Ints, major: Ints, own_class: Ints) -> int | None:
    """A device to swap with, so that neither is in a cluster of its own class: random tries, then a search."""
    for j in rng.integers(len(places), size=64):
        if own_class[places[j]] != major[i] and own_class[places[i]] != major[j]:
            return int(j)
    fits = np.flatnonzero((own_class[places] != major[i]) & (own_class[places[i]] != major))
    return int(rng.choice(fits)) if len(fits) else None


def timezone(fleet: Fleet, rng: Generator, options: sections.Clusters) -> Ints:
    """Clusters of equal size that are contiguous in the UTC offset, in the order in which night comes to them.

    Midnight comes to offset o at -o UTC, on a circle of 24 hours, which is cut at its widest gap. Devices of an offset
    that is divided between two clusters are assigned at random.
    """
    midnight = np.mod(-utc_offset(fleet), 24)
    there = np.unique(midnight)
    gaps = np.diff(there, append=there[0] + 24)
    since_gap = np.mod(midnight - there[(int(gaps.argmax()) + 1) % len(there)], 24)
    assignment = np.empty(len(fleet), np.int64)
    order = np.lexsort((rng.random(len(fleet)), since_gap))
    assignment[order] = np.arange(len(fleet)) * cluster_count(options) // len(fleet)
    return assignment


def utc_offset(fleet: Fleet) -> Floats:
    """Hours ahead of UTC: by time zone, else by utc_offset, else by longitude (15 degrees are an hour)."""
    known = fleet.known
    ahead = np.full(len(fleet), np.nan) if known.utc_offset is None else known.utc_offset
    if known.longitude is not None:
        ahead = np.where(np.isnan(ahead), known.longitude / 15, ahead)
    nowhere = np.flatnonzero(np.isnan(ahead))
    if len(nowhere):
        name = fleet.names[nowhere[0]] if fleet.names is not None else nowhere[0]
        raise BadData(
            f'clusters.method = "timezone": of device {name} neither timezone, utc_offset nor longitude is known; '
            "give one of them in fleet.path, or use fleet.world"
        )
    return ahead


def availability(fleet: Fleet, rng: Generator, options: sections.Clusters) -> Ints:
    """Clusters by a slot of the day in which a device is free long enough; with `soft`, by two. Devices that are never
    free are in no cluster; slots without devices are left out."""
    return number_slots(find_slots(fleet, rng, options), options.soft)


def find_slots(fleet: Fleet, rng: Generator, options: sections.Clusters) -> Timetable:
    trace = fleet.known.availability
    if trace is None:
        raise BadData(
            'clusters.method = "availability" needs to know when devices are free: give fleet.availability, a trace, '
            "or use fleet.world"
        )
    found = timetable(trace, cluster_count(options), options.free_seconds, rng)
    if found.slot.max() < 0:
        raise BadData(f"no device is ever free for {options.free_seconds:g} s: lower clusters.free_seconds")
    return found


def number_slots(found: Timetable, soft: bool) -> Ints:
    """The assignment to slots, numbered without those that have no device."""
    used = found.used()
    place = np.full(found.share.shape[1] + 1, -1)  # the last, at -1, stays so
    place[used] = np.arange(len(used))
    first, second = place[found.slot], place[found.second]
    return np.column_stack([first, np.where(second < 0, first, second)]) if soft else first


def file(fleet: Fleet, rng: Generator, options: sections.Clusters) -> Ints:
    """The assignment in a CSV file with the columns device,cluster: every device once, clusters numbered from 0 or
    from 1, `none` for a device that takes no part. With a column second, a device is in two clusters."""
    path = located(str(options.path), "clusters.path")
    index = {str(name): k for k, name in enumerate(fleet.names if fleet.names is not None else range(len(fleet)))}
    clusters = np.full((len(fleet), 2), UNASSIGNED)
    try:
        with StringIO(read_bytes(path, "clusters.path").decode("utf-8-sig"), newline="") as lines:
            rows = csv.DictReader(lines)
            if not {"device", "cluster"} <= set(rows.fieldnames or ()):
                raise BadData(f"{path}: the first line must name the columns device,cluster")
            for row in rows:
                where = f"{path}, line {rows.line_num}"
                device = (row["device"] or "").strip()
                if device not in index:
                    raise BadData(f"{where}: the fleet has no device {device!r}")
                if clusters[index[device], 0] != UNASSIGNED:
                    raise BadData(f"{where}: device {device} has a cluster already")
                for column, name in enumerate(("cluster", "second" if "second" in row else "cluster")):
                    cluster = (row[name] or "").strip()
                    if cluster != "none" and (
                        not (cluster.isdecimal() and cluster.isascii()) or int(cluster) > len(fleet)
                    ):
                        raise BadData(
                            f"{where}: {name} {cluster!r} is not a whole number from 0 to {len(fleet)}, nor none"
                        )
                    clusters[index[device], column] = -1 if cluster == "none" else int(cluster)
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadData(f"clusters.path: cannot read {path} ({error})") from None
    missing_rows = np.flatnonzero(clusters[:, 0] == UNASSIGNED)
    if len(missing_rows):
        missing = next(name for name, k in index.items() if k == missing_rows[0])
        raise BadData(f"{path}: device {missing} has no cluster; every device needs one row")
    assigned = clusters[clusters >= 0]
    if not len(assigned):
        raise BadData(f"{path}: no device has a cluster")
    if assigned.min() == 1 and assigned.max() != (options.count or 0) - 1:
        clusters[clusters >= 0] -= 1
    return clusters if (clusters[:, 0] != clusters[:, 1]).any() else clusters[:, 0]


def cluster_count(options: sections.Clusters) -> int:
    assert options.count is not None  # the experiment fills it in
    return options.count
