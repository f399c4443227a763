"""The timetable of a fleet before training: when devices are free, and the time slot or time zones of each cluster.

It needs a fleet file, but no data.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import coo_array

from fedcluster.analysis.fleet_report import clusters_table
from fedcluster.errors import BadExperiment
from fedcluster.experiment import Experiment, sections
from fedcluster.figures import canvas, save, whole_numbers
from fedcluster.fleet.clustering.clusters import Clusters, build, from_assignment
from fedcluster.fleet.clustering.request import Request
from fedcluster.fleet.clustering.slots import find_slots, number_slots
from fedcluster.fleet.clustering.timezone import utc_offset
from fedcluster.fleet.fleet import Fleet, Floats, Ints, device_table
from fedcluster.fleet.timezones import DAY
from fedcluster.rng import stream

BINS = 96  # of 15 minutes each, in the plot
NIGHT = (22.0, 6.0)  # local time; shown where there is no trace of when devices are free


@dataclass(frozen=True, eq=False)
class Plan:
    """The clusters of a fleet and their timetable.

    `free[K, b]` is the share of cluster K's devices that are free in the 15 minutes b of the day (UTC), on average over
    the days of the trace; without a trace, the share for which it is night. `slots[K]` are the hours of cluster K, and
    `coverage[K]` is the share of device days on which a device is free long enough in them; both need a trace.
    """

    fleet: Fleet
    clusters: Clusters
    free: Floats
    slots: Floats | None = None
    coverage: Floats | None = None

    @property
    def inequality(self) -> str | None:
        """A sentence where cluster weights differ. Without a column `samples` all devices weigh the same."""
        return self.clusters.inequality(self.fleet, "devices" if self.fleet.known.samples is None else "samples")

    @property
    def offsets(self) -> list[tuple[float, float] | None]:
        """The first and the last UTC offset of each cluster by time zone."""
        if self.slots is not None:
            return [None] * self.clusters.count
        offset = utc_offset(self.fleet)
        midnights = [np.unique(np.mod(-offset[members], 24)) for members in self.clusters.members]
        return [arc_ends(hours) for hours in midnights]


def arc_ends(midnights: Floats) -> tuple[float, float]:
    """The ends of the shortest arc on the circle of 24 hours that has all these midnights (UTC), as UTC offsets."""
    gap = int(np.diff(midnights, append=midnights[0] + 24).argmax())
    first, last = midnights[(gap + 1) % len(midnights)], midnights[gap]
    return tuple(float(-x if x <= 12 else 24 - x) for x in (first, last))  # type: ignore[return-value]


def plan(
    path: Path,
    availability: Path | None,
    count: int,
    soft: bool = False,
    seed: int = 0,
    date: str = "2026-01-01",
    free_seconds: float = 600.0,
    trace_format: str | None = None,
) -> Plan:
    """Cluster a fleet as `clusters.method` "availability" does, or without a trace as "timezone" does."""
    if soft and availability is None:
        raise BadExperiment("--soft needs --availability, which says in which slots a device is free")
    trace_path = None if availability is None else str(availability)
    fleet_options: sections.Fleet = options_of(
        "fleet", path=str(path), availability=trace_path, trace_format=trace_format, date=date
    )
    known = device_table(fleet_options, seed)
    trace, columns = known.availability, known.columns()
    devices = len(trace) if trace is not None else len(next(iter(columns.values())))
    sizes = known.samples if known.samples is not None else np.ones(devices, np.int64)
    fleet = Fleet(sizes, known.names, known=known)
    if trace is None:
        bands = build(options_of("clusters", method="timezone", count=count), fleet, seed)
        return Plan(fleet, bands, nights(fleet, bands))
    options: sections.Clusters = options_of(
        "clusters", method="availability", count=count, soft=soft, free_seconds=free_seconds
    )
    timetable = find_slots(Request(fleet, count, options.options, stream(seed, "clusters")))
    clusters = from_assignment(number_slots(timetable, soft))
    free = np.zeros((clusters.count, BINS))
    for part, days in trace.windows(BINS, DAY // BINS, DAY // BINS // 2):
        free += by_cluster(clusters.assignment[part], clusters.count, days / trace.rounds(DAY)[part, None])
    fit = by_cluster(clusters.assignment, clusters.count, timetable.share)[np.arange(clusters.count), timetable.used()]
    members = np.array([len(members) for members in clusters.members])
    hours = timetable.used()[:, None] * 24 / count + [0, 24 / count]
    return Plan(fleet, clusters, free / members[:, None], hours, fit / members)


def options_of(section: str, **keys: Any) -> Any:
    """A section of an experiment from options of the command line, validated with the same messages."""
    return getattr(Experiment(**{section: keys}), section)


def by_cluster(assignment: Ints, count: int, values: Floats) -> Floats:
    """The sum of the devices' rows over each cluster."""
    inside = np.flatnonzero(assignment >= 0)
    ones = np.ones(len(inside))
    sums: Floats = coo_array((ones, (assignment[inside], inside)), shape=(count, len(assignment))).tocsr() @ values
    return sums


def nights(fleet: Fleet, clusters: Clusters) -> Floats:
    """The share of each cluster for which it is night, [M, BINS]."""
    ahead = utc_offset(fleet)
    times = (np.arange(BINS) + 0.5) * 24 / BINS
    shares = []
    for members in clusters.members:
        offsets, counts = np.unique(ahead[members], return_counts=True)
        local = np.mod(times[:, None] + offsets, 24)
        shares.append(((local >= NIGHT[0]) | (local < NIGHT[1])) @ counts / len(members))
    return np.array(shares)


def write(plan: Plan, out: Path) -> list[Path]:
    """Write clusters.csv, which clusters.method = "file" reads, and the plot."""
    out.mkdir(parents=True, exist_ok=True)
    names = plan.fleet.names
    devices = list(range(len(plan.fleet))) if names is None else names.tolist()
    clusters_table(out / "clusters.csv", plan.clusters, devices)
    plot(plan, out / "plan.png")
    return [out / "clusters.csv", out / "plan.png"]


def plot(plan: Plan, path: Path) -> None:
    """Plot the share of each cluster that is free over the day, its slot, and its number of devices."""
    clusters = plan.clusters
    figure, (day, sizes) = canvas(2, 11, max(2.6, 0.28 * clusters.count + 1.4), widths=(4, 1))
    image = day.imshow(
        plan.free, aspect="auto", cmap="Blues", vmin=0, vmax=1, extent=(0, 24, clusters.count - 0.5, -0.5)
    )
    figure.colorbar(image, ax=day, label="share of the cluster")
    for cluster, (begin, end) in enumerate(plan.slots if plan.slots is not None else []):
        day.plot(
            [begin, end, end, begin, begin], np.array([-0.5, -0.5, 0.5, 0.5, -0.5]) + cluster, color="#D55E00", lw=1.8
        )
    night = f"devices for which it is night ({NIGHT[0]:.0f} to {NIGHT[1]:.0f} h local time)"
    title = "free devices (orange: the cluster's slot)" if plan.slots is not None else night
    day.set(title=title, xlabel="hour of the day, UTC", ylabel="cluster", xticks=range(0, 25, 3))
    sizes.barh(range(clusters.count), [len(members) for members in clusters.members], color="#0072B2")
    sizes.set(title="devices", ylim=(clusters.count - 0.5, -0.5))
    whole_numbers(sizes.xaxis)
    if clusters.count <= 40:
        day.set_yticks(range(clusters.count))
        sizes.set_yticks([])
    save(figure, path)
