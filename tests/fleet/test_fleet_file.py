"""Fleet files: what they say of devices, what is refused in them, and clusters by time zone and by availability."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedcluster
from fedcluster.errors import BadData, BadExperiment
from fedcluster.experiment import Clusters, Fleet
from fedcluster.fleet import fleet as fleets
from fedcluster.fleet import fleet_file
from fedcluster.fleet.availability import build
from fedcluster.fleet.clustering import clusters as clusterings
from fedcluster.fleet.clustering import slots
from fedcluster.fleet.schedule import Schedule
from fedcluster.fleet.timezones import DAY, HOUR
from tests.fleet.test_fleet import dataset

FULL = """device,timezone,utc_offset,latitude,longitude,samples,seconds_per_sample,up_mbps,down_mbps
a,Europe/Berlin,,52.5,13.4,30,0.01,5,20
b,,+05:30,,,20,0.02,1,4
c,,-3,,,10,0,2,8
d,,,35.7,139.7,5,0.5,0.1,1e2
"""


def describe(path: Path, content: str, day: str = "2026-01-15") -> fleet_file.DeviceTable:
    path.write_text(content)
    return fleet_file.read(path, day)[0]


def test_every_column(tmp_path: Path) -> None:
    known = describe(tmp_path / "fleet.csv", FULL)
    assert known.names is not None
    assert known.names.tolist() == ["a", "b", "c", "d"]
    found = {name: column.tolist() for name, column in known.columns().items() if name != "names"}
    assert found["samples"] == [30, 20, 10, 5]
    assert found["utc_offset"][:3] == [1, 5.5, -3]
    assert np.isnan(found["utc_offset"][3])
    assert found["longitude"][::3] == [13.4, 139.7]
    assert (found["up_mbps"], found["down_mbps"]) == ([5, 1, 2, 0.1], [20, 4, 8, 100])
    assert describe(tmp_path / "fleet.csv", FULL, "2026-07-15").utc_offset[0] == 2  # type: ignore[index]


def test_the_same_as_parquet(tmp_path: Path) -> None:
    table = pa.table({"device": [3, 1], "timezone": ["Asia/Tokyo", None], "samples": [4, 5], "longitude": [None, 15.0]})
    pq.write_table(table, tmp_path / "fleet.parquet")
    known, read = fleet_file.read(tmp_path / "fleet.parquet", "2026-01-15")
    assert known.names is not None
    assert known.utc_offset is not None
    assert (known.names.tolist(), known.utc_offset.tolist()[0]) == (["3", "1"], 9)
    assert read.where(1).endswith("row 2")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("device\na\nb\na\n", "line 4: device a has two rows"),
        ('device,samples\na,1\n"",2\n', "line 3: the device has no name"),
        ("device,colour\na,red\n", "column 'colour' is not known"),
        ("timezone\nEurope/Berlin\nEurope/Bonn\n", "line 3: timezone 'Europe/Bonn' is not a time zone"),
        ("timezone\nAmerica\n", "line 2: timezone 'America' is not a time zone"),
        ("utc_offset\n1\n25\n", "line 3: utc_offset 25 is not allowed"),
        ("utc_offset\n1\n5:75\n", "line 3: utc_offset '5:75' is not a number of hours"),
        ("latitude,longitude\n1,2\n91,2\n", "line 3: latitude 91 is not allowed: it must be from -90 to 90"),
        ("longitude\n1\neast\n", "line 3: longitude 'east' is not a number"),
        ("samples\n5\n0\n", "line 3: samples 0 is not allowed"),
        ("samples\n5\n2.5\n", "line 3: samples must be a whole number"),
        ("samples,up_mbps\n5,1\n5,\n", "line 3: up_mbps is empty: fill it in"),
        ("seconds_per_sample\n1\n-1\n", "line 3: seconds_per_sample -1 is not allowed"),
        ("down_mbps\n1\n0\n", "line 3: down_mbps 0 is not allowed"),
        ("down_mbps\n1\ninf\n", "line 3: down_mbps inf is not allowed"),
        ("device,samples\na,1\nb\n", "line 3: 1 cells, but the first line names 2 columns"),
        ("device,samples\n", "has no rows"),
    ],
)
def test_bad_rows_are_named_by_line(rows: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(BadData, match=said):
        describe(tmp_path / "fleet.csv", rows)
    with pytest.raises(BadData, match=r"fleet\.path: cannot read"):
        fleet_file.read(tmp_path / "none.csv", "2026-01-15")


@pytest.mark.parametrize("partition", ["major_class", "dirichlet", "iid"])
def test_every_device_has_its_own_number_of_samples(partition: Any, tmp_path: Path) -> None:
    (tmp_path / "fleet.csv").write_text(FULL)
    data = dataset()
    fleet, held = fleets.build(Fleet(path=str(tmp_path / "fleet.csv"), partition=partition), data, 0)
    assert fleet.sizes.tolist() == [30, 20, 10, 5]
    for k in range(4):
        counts = np.bincount(data.y_train.numpy()[held.sample_indices(k)], minlength=10)
        assert (counts == held.label_counts(k)).all()
        assert fleet.label_counts(k).sum() == fleet.sizes[k]
    assert fleet.weights.tolist() == pytest.approx([30 / 65, 20 / 65, 10 / 65, 5 / 65])
    with pytest.raises(BadExperiment, match=r"fleet\.devices = 5, but .* names 4: leave it out"):
        fleets.build(Fleet(path=str(tmp_path / "fleet.csv"), devices=5, partition=partition), data, 0)


def test_natural_devices_are_matched_by_name(tmp_path: Path) -> None:
    owner = np.array(["b", "a", "b", "c", "a", "b"])
    data = fedcluster.Dataset(np.zeros((6, 2)), [0, 1, 0, 1, 0, 1], np.zeros((1, 2)), [0], device_train=owner)
    path = tmp_path / "fleet.csv"
    options = Fleet(partition="natural", path=str(path), availability=str(tmp_path / "trace.yaml"))
    (tmp_path / "trace.yaml").write_text("c: [[0, free], [60, busy]]\na: [[30, free], [60, busy]]\n")
    path.write_text("device,utc_offset,samples\nc,3,1\nb,2,3\na,1,2\n")
    fleet, _ = fleets.build(options, data, 0)
    assert fleet.known.utc_offset is not None
    assert fleet.known.availability is not None
    assert fleet.known.utc_offset.tolist() == [1, 2, 3]
    assert fleet.known.availability.next_free(np.arange(3), 0).tolist()[::2] == [30_000, 0]
    for rows, said in (
        ("device\na\nb\n", "device c of the data has no row"),
        ("device\na\nb\nc\nd\n", "line 5: the data have no device 'd'"),
        ("utc_offset\n1\n2\n3\n", "needs a column device"),
        ("device,samples\na,2\nb,3\nc,9\n", "device c has 9 samples, but in data it has 1"),
    ):
        path.write_text(rows)
        with pytest.raises(BadData, match=said):
            fleets.build(options, data, 0)


def test_a_trace_alone_names_the_fleet(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("device,start,end\nx,0,9\ny,5,9\n")
    fleet, _ = fleets.build(Fleet(availability=str(tmp_path / "trace.csv"), samples=7), dataset(), 0)
    assert fleet.names is not None
    assert (fleet.names.tolist(), fleet.sizes.tolist()) == (["x", "y"], [7, 7])


def zoned(ahead: list[float]) -> fleets.Fleet:
    fleet, _ = fleets.build(Fleet(devices=len(ahead), samples=5), dataset(), 0)
    return replace(fleet, known=fleet_file.DeviceTable(utc_offset=np.array(ahead)))


@settings(max_examples=80, deadline=None)
@given(
    ahead=st.lists(st.sampled_from([-11, -8, -5, -3, 0, 1, 3, 5.5, 8, 9, 12, 13]), min_size=1, max_size=40),
    count=st.integers(1, 8),
    seed=st.integers(0, 9),
)
def test_time_zones_make_contiguous_bands_of_equal_size(ahead: list[float], count: int, seed: int) -> None:
    fleet, options = zoned(ahead), Clusters(method="timezone", count=min(count, len(ahead)))
    found = clusterings.build(options, fleet, seed)
    assert found.assignment.tolist() == clusterings.build(options, fleet, seed).assignment.tolist()
    sizes = [len(members) for members in found.members]
    assert max(sizes) - min(sizes) <= 1
    midnight = np.mod(-np.array(ahead), 24)
    order = np.lexsort((found.assignment, midnight))
    clusters = found.assignment[order]  # walking round the circle, every band is left once
    times = midnight[order]
    start = next(i for i in range(len(order)) if clusters[i] == 0 and (clusters[i - 1] != 0 or len(set(clusters)) == 1))
    walk = [(times[i % len(order)], clusters[i % len(order)]) for i in range(start, start + len(order))]
    by_time: dict[float, list[int]] = {}
    for time, cluster in walk:
        by_time.setdefault(float(time), []).append(int(cluster))
    seen = [cluster for clusters_there in by_time.values() for cluster in sorted(clusters_there)]
    assert seen == sorted(seen)


def test_time_zones_follow_the_night_and_know_summer_time(tmp_path: Path) -> None:
    path = tmp_path / "fleet.csv"
    path.write_text("timezone,longitude\nAmerica/New_York,0\n,139\nEurope/London,0\nAfrica/Abidjan,0\n,-1\n")
    orders = {
        day: {
            tuple(clusterings.build(Clusters(method="timezone", count=5), fleet, seed).assignment) for seed in range(9)
        }
        for day in ("2026-01-15", "2026-07-15")
        for fleet, _ in [fleets.build(Fleet(path=str(path), date=day), dataset(), 0)]
    }
    assert orders["2026-01-15"] == {(4, 0, 1, 2, 3), (4, 0, 2, 1, 3)}  # London and Abidjan share an offset: drawn
    assert orders["2026-07-15"] == {(4, 0, 1, 2, 3)}
    path.write_text("timezone,longitude\nAsia/Tokyo,\n,\n")
    with pytest.raises(BadData, match="neither timezone, utc_offset nor longitude of device 1 is known"):
        clusterings.build(Clusters(method="timezone", count=1), fleets.build(Fleet(path=str(path)), dataset(), 0)[0], 0)


def free_in(patterns: list[list[int]], count: int) -> fleets.Fleet:
    """A fleet whose device k is free in the slots patterns[k] of every day."""
    width = DAY // count
    rows = [(k, slot * width, (slot + 1) * width) for k, mine in enumerate(patterns) for slot in mine]
    device, start, end = np.array(rows, np.int64).reshape(-1, 3).T
    trace = build(device, start, end, np.full(len(patterns), DAY))
    fleet, _ = fleets.build(Fleet(devices=len(patterns), samples=5), dataset(), 0)
    return replace(fleet, known=fleet_file.DeviceTable(availability=trace))


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 5),
    patterns=st.lists(st.sets(st.integers(0, 4), max_size=4), min_size=1, max_size=25),
    seed=st.integers(0, 9),
)
def test_slots_fit_and_are_as_equal_as_can_be(count: int, patterns: list[set[int]], seed: int) -> None:
    mine = [sorted(slot for slot in pattern if slot < count) for pattern in patterns]
    trace = free_in(mine, count).known.availability
    assert trace is not None
    found = slots.timetable(trace, count, 600.0, np.random.default_rng(seed))
    for k, fits in enumerate(mine):
        assert found.slot[k] in fits or (not fits and found.slot[k] == -1)
        assert found.second[k] in fits or (not fits and found.second[k] == -1)
        assert (found.second[k] - found.slot[k]) % count in (0, 1, count - 1)
    sizes = np.bincount(found.slot[found.slot >= 0], minlength=count)
    assert (sizes**2).sum() == least_squares(mine, count)


def least_squares(patterns: list[list[int]], count: int) -> int:
    """The smallest sum of squared sizes: from any assignment, by moving devices along improving paths."""
    slot = [fits[0] if fits else -1 for fits in patterns]
    while True:
        sizes = np.bincount([s for s in slot if s >= 0], minlength=count)
        for source in range(count):
            paths: dict[int, list[tuple[int, int]]] = {source: []}
            frontier = [source]
            while frontier:
                here = frontier.pop(0)
                for k, fits in enumerate(patterns):
                    for there in fits if slot[k] == here else []:
                        if there not in paths:
                            paths[there] = [*paths[here], (k, there)]
                            frontier.append(there)
            target = min(paths, key=lambda s: sizes[s])
            if sizes[target] < sizes[source] - 1:
                for k, there in paths[target]:
                    slot[k] = there
                break
        else:
            return int((sizes**2).sum())


def test_never_free_devices_are_in_no_cluster_and_empty_slots_are_left_out() -> None:
    fleet = free_in([[0], [0, 1], [], [1], [3], [3]], 4)
    options = Clusters(method="availability", count=4, participation=1.0, order="cyclic")
    found = clusterings.build(options, fleet, 0)
    assert (found.count, found.left_out()) == (3, 1)
    assert found.assignment.tolist()[2:] == [-1, 1, 2, 2]
    assert found.weights(fleet).sum() == pytest.approx(5 / 6)
    cycles = Schedule(options, fleet, found, 0).round(0)
    assert sorted(np.concatenate([cycle.cohort for cycle in cycles])) == [0, 1, 3, 4, 5]
    with pytest.raises(BadData, match="no device is ever free for 600 s"):
        clusterings.build(options, free_in([[], [], [], []], 4), 0)
    with pytest.raises(BadExperiment, match=r"free_seconds = 90000 is more than a slot has"):
        clusterings.build(Clusters(method="availability", count=4, free_seconds=90000.0), fleet, 0)
    with pytest.raises(BadExperiment, match="use at most 1440 slots"):
        slots.timetable(fleet.known.availability, 2000, 1.0, np.random.default_rng(0))  # type: ignore[arg-type]
    with pytest.raises(BadData, match="needs to know when devices are free"):
        clusterings.build(options, zoned([1, 2, 3, 4]), 0)


def test_soft_slots_pick_one_of_two_each_round() -> None:
    fleet = free_in([[0, 1]] * 40 + [[1, 2]] * 40, 3)
    options = Clusters(method="availability", count=3, soft=True, participation=1.0)
    found = clusterings.build(options, fleet, 5)
    assert found.second is not None
    schedule = Schedule(options, fleet, found, 5)
    where = np.full((12, 80), -1)
    for j in range(12):
        for cycle in schedule.round(j):
            assert (where[j, cycle.cohort] == -1).all()  # at most once a round
            where[j, cycle.cohort] = cycle.cluster
    assert (where >= 0).all()
    assert ((where == found.assignment) | (where == found.second)).all()
    assert 0.4 < (where == found.assignment).mean() < 0.6
    assert [c.cohort.tolist() for c in schedule.round(3)] == [c.cohort.tolist() for c in schedule.round(3)]


def test_clusters_are_called_unequal_by_what_they_hold_on_average() -> None:
    everyone = fleets.Fleet(np.array([10, 10, 20, 5]))
    groups = clusterings.Clusters
    assert groups(np.array([0, 0, 1, -1]), 2).inequality(everyone) is None  # 20 and 20, one device in none
    assert groups(np.array([0, 1, 1, -1]), 2).inequality(everyone) is not None
    soft = groups(np.array([0, 1, 0, -1]), 2, np.array([1, 0, 1, -1]))  # each half of the rounds in either
    assert soft.inequality(everyone) is None


def test_a_device_must_be_free_long_enough_on_half_of_its_days() -> None:
    rows = [(0, 1, 2), (0, 25, 26), (0, 13, 13.1), (1, 13, 14)]  # hours; two days
    device, start, end = np.array(rows).T
    trace = build(device.astype(int), start * HOUR, end * HOUR, np.full(2, 2 * DAY))
    found = slots.timetable(trace, 2, 1800.0, np.random.default_rng(0))
    assert found.slot.tolist() == [0, 1]
    assert found.share.tolist() == [[1, 0], [0, 0.5]]


def test_files_may_leave_devices_out_and_give_two_clusters(tmp_path: Path) -> None:
    path = tmp_path / "clusters.csv"
    fleet, _ = fleets.build(Fleet(devices=4, samples=5), dataset(), 0)
    path.write_text("device,cluster,second\n0,1,2\n1,2,2\n2,none,none\n3,1,1\n")
    found = clusterings.build(Clusters(method="file", path=str(path)), fleet, 0)
    assert found.second is not None
    assert (found.assignment.tolist(), found.second.tolist()) == ([0, 1, -1, 0], [1, 1, -1, 0])
    path.write_text("device,cluster\n0,none\n1,none\n2,none\n3,none\n")
    with pytest.raises(BadData, match="no device has a cluster"):
        clusterings.build(Clusters(method="file", path=str(path)), fleet, 0)


def test_the_diurnal_world_sleeps_at_night_and_repeats() -> None:
    options = Fleet(world="diurnal", devices=3000, samples=5)
    one, two = (fleets.build(options, dataset(), 4)[0].known for _ in range(2))
    assert one.digest() == two.digest() != fleets.build(options, dataset(), 5)[0].known.digest()
    assert one.availability is not None
    assert one.utc_offset is not None
    everyone = np.arange(3000)
    for local, low, high in ((3, 0.8, 0.95), (14, 0.0, 0.01)):
        at = np.round((local - one.utc_offset) * HOUR).astype(np.int64) + 2 * DAY
        free = (one.availability.free_until(everyone, at) > at).mean()
        assert low <= free <= high


def test_a_world_is_made_up_or_described() -> None:
    with pytest.raises(BadExperiment, match="fleet has world, a generated population, and path"):
        fedcluster.Experiment(fleet={"world": "diurnal", "path": "x.csv"})
    with pytest.raises(BadExperiment, match=r"fleet\.date = 'May' is not allowed: write a day as YYYY-MM-DD"):
        fedcluster.Experiment(fleet={"date": "May"})
    with pytest.raises(BadExperiment, match=r'clusters\.soft is an option of method = "availability"'):
        fedcluster.Experiment(clusters={"soft": True})
