"""Each form of a trace, in small files written by hand, and what is refused in them."""

import json
import os
import pickle
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedcluster.errors import BadData, BadExperiment
from fedcluster.experiment import TRACE_FORMATS, Experiment
from fedcluster.fleet import traces
from fedcluster.fleet.availability import build
from fedcluster.fleet.timezones import DAY, HOUR

WINTER = "2026-01-15"


def read(path: Path, content: str | bytes, day: str = WINTER) -> traces.Trace:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return traces.read(path, day)


def hours(trace: traces.Trace) -> list[tuple[str, float, float]]:
    """Every interval of the trace as (device, start, end) in hours."""
    rows = zip(trace.device.tolist(), trace.start.tolist(), trace.end.tolist(), strict=True)
    return [(trace.names[k], start / HOUR, end / HOUR) for k, start, end in rows]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace"  # no suffix: the content tells


def test_intervals_in_seconds(path: Path) -> None:
    trace = read(path, "device,start,end\na,3600,7200.5\nb, 90000 ,93600\na,79200,108000\n")
    assert hours(trace) == [("a", 1, 2 + 0.5 / 3600), ("b", 25, 26), ("a", 22, 30)]
    assert (trace.period == 2 * DAY).all()  # whole days, as far as intervals begin
    fleet = trace.of(["x", "a", "b"])
    assert fleet.counts.tolist() == [0, 2, 1]
    assert fleet.next_free(np.arange(3), -3 * HOUR).tolist()[1:] == [1 * HOUR, 25 * HOUR - 2 * DAY + 2 * DAY]


def test_intervals_by_the_clocks_of_a_zone(path: Path) -> None:
    rows = "device,start,end,timezone\na,0,3600,Asia/Kolkata\nb,36000,39600,Europe/Berlin\nc,0,3600,\n"
    assert hours(read(path, rows)) == [("a", -5.5, -4.5), ("b", 9, 10), ("c", 0, 1)]
    assert hours(read(path, rows, "2026-07-15"))[1] == ("b", 8, 9)  # summer time


def test_intervals_as_moments(path: Path) -> None:
    rows = (
        "device,start,end,timezone\n"
        "a,2026-03-28 23:00:00,2026-03-29 06:00:00,Europe/Berlin\n"  # the night in which the clocks go forward
        "b,2026-03-28 10:00:00,2026-03-28 11:00:00,\n"
    )
    trace = read(path, rows)
    assert hours(trace) == [("a", 22, 28), ("b", 10, 11)]  # six hours, not seven
    assert (trace.period == DAY).all()


def test_intervals_as_parquet(path: Path) -> None:
    seconds = pa.table({"device": [7, 8], "start": [0, 7200], "end": [3600.0, 10800.0]})
    pq.write_table(seconds, path)
    assert hours(traces.read(path, WINTER)) == [("7", 0, 1), ("8", 2, 3)]
    moments = pa.array([datetime(2026, 1, 15, 5), datetime(2026, 1, 16, 0)]).cast(pa.timestamp("us", "UTC"))
    pq.write_table(pa.table({"device": ["a", "b"], "start": moments, "end": [1, 2]}), path)
    with pytest.raises(BadData, match="start"):  # one column of moments, one of numbers
        traces.read(path, WINTER)
    later = pa.array([datetime(2026, 1, 15, 6), datetime(2026, 1, 16, 1, 30)])
    pq.write_table(pa.table({"device": ["a", "b"], "start": moments, "end": later}), path)
    assert hours(traces.read(path, WINTER)) == [("a", 5, 6), ("b", 24, 25.5)]


def test_changes_of_state(path: Path) -> None:
    text = "# a comment\na: [[0, busy], [3600, free], [7200, off]]\nb:\n  - [10800, on]\n  - [14400, false]\n7: []\n"
    trace = read(path, text + "c: [[82800, free], [90000, busy]]\nd: [[5, available]]\n")
    assert hours(trace) == [("a", 1, 2), ("b", 3, 4), ("c", 23, 25), ("d", 5 / 3600, 48 + 5 / 3600)]
    assert trace.names == ["a", "b", "7", "c", "d"]
    assert (trace.period == 2 * DAY).all()
    fleet = trace.of(trace.names)
    assert fleet.counts.tolist() == [1, 1, 0, 1, 1]
    assert (fleet.free_until(np.array([4]), 12345) > 10**15).all()  # d is always free


def messages(*lines: str) -> str:
    return "\n".join(line.replace(" | ", "\t") for line in lines)


FLASH = messages(
    "2020-01-28 22:00:00 | battery_charged_on",
    "2020-01-28 22:10:00 | wifi",
    "2020-01-28 22:20:00 | screen_lock",  # ready
    "2020-01-28 22:30:00 | 87.0%",
    "2020-01-28 23:00:00 | 4G",
    "2020-01-28 23:30:00 | WIFI",  # ready
    "2020-01-29 06:00:00 | screen_on",
    "2020-01-29 06:00:10 | screen_unlock",
    "",
    "2020-01-29 20:00:00 | screen_lock",  # ready, until nothing more is known
    "2020-01-29 21:00:00 | battery_okay",
)


@pytest.mark.parametrize("form", ["object", "list", "lines", "one"])
def test_flash_states(form: str, path: Path) -> None:
    one, two = {"guid": "a", "messages": FLASH}, {"guid": 2, "model": "x", "messages": "2020-01-28 10:00:00\twifi"}
    content = {
        "object": json.dumps({"0": one, "1": two}),
        "list": json.dumps([one, two], indent=1),
        "lines": json.dumps(one) + "\n" + json.dumps(two) + "\n",
        "one": json.dumps(one),
    }[form]
    trace = read(path, content)
    assert trace.names == ["a", "2"][: len(trace.names)]
    assert hours(trace) == [("a", 22 + 1 / 3, 23), ("a", 23.5, 30 + 10 / 3600), ("a", 44, 45)]
    assert (trace.period == 2 * DAY).all()


FEDSCALE = {
    1: {"duration": 9, "active": [3600, 10800], "inactive": [7200, 14400], "finish_time": 20000, "model": "CPH1801"},
    "2": {"duration": 9, "active": [18000], "inactive": [1000], "finish_time": 20000},
    3: {"duration": 0, "active": [], "inactive": [], "finish_time": 86400},
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_fedscale_behaviour(protocol: int, path: Path) -> None:
    trace = read(path, pickle.dumps(FEDSCALE, protocol))
    assert hours(trace) == [("1", 1, 2), ("1", 3, 4), ("2", 5, 21000 / 3600)]
    assert trace.period.tolist() == [20_000_000, 20_000_000, DAY]
    fleet = trace.of(["2", "1", "3"])
    assert fleet.free_until(np.array([0]), 20_000_000 * 7 + 19_000_000).tolist() == [20_000_000 * 8 + 1_000_000]


class Hostile:
    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.victim),)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_hostile_pickle_does_nothing(protocol: int, path: Path, tmp_path: Path) -> None:
    victim = tmp_path / "pwned"
    content = pickle.dumps({1: FEDSCALE[1], 2: Hostile(victim)}, protocol)
    pickle.loads(content)  # noqa: S301  it is hostile indeed
    assert victim.exists()
    victim.rmdir()
    with pytest.raises(BadData, match=r"is refused: a pickle may hold plain .* \(it names posix\.mkdir\)"):
        read(path, content)
    assert not victim.exists()
    for plain_to_others in (np.arange(3), {1, 2}, complex(1, 2), Path("x")):
        with pytest.raises(BadData, match="trace"):
            read(path, pickle.dumps({1: plain_to_others}, protocol))
    with pytest.raises(BadData, match="is refused"):
        read(path, content[: len(content) // 2])
    with pytest.raises(BadData, match="is refused"):
        read(path, b"\x80\x04Ppersistent\n.")


def shared(clients: int, intervals: int) -> bytes:
    mine = {"active": list(range(intervals)), "inactive": [n + 0.5 for n in range(intervals)], "finish_time": 86400}
    return pickle.dumps(dict.fromkeys(range(clients), mine), 4)


def doubling() -> bytes:
    """((a, a), (a, a)) ... as a key: hashing it takes longer than the universe has."""
    return b"\x80\x02}(K\x01K\x01\x86" + b"q\x00h\x00\x86" * 90 + b"K\x02u."


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (doubling(), "it has TUPLE2 at byte 8"),
        (b"\x80\x04]r\xff\xff\xff\x7f.", "must hold a dict of clients"),  # a memo of 2^31 places
        (b"\x80\x04" + b"(" * 50_000 + b".", "nested more than 16 deep"),
        (b"\x80\x04" + b"]" * 50_000 + b"a" * 49_999 + b".", "nested more than 16 deep"),
        (b"\x80\x02}(]]u.", "a key is list"),
        (b"\x80\x02" + b"N" * 9 + b"t.", "is refused"),
        (b"\x80\x02}K\x01\x8a\xff" + b"\x01" * 255 + b"s.", "a number is too long"),
        (b"\x80\x02h\x07.", "it is damaged"),
        (b"\x80\x02}(K\x01u.", "is refused"),
        (b"\x80\x02K\x01K\x02.", "does not end with one value"),
        (shared(20_000, 1000), "clients share lists of more than 5,000,000 intervals"),
        (b"[" * 50_000, "none of the formats"),
        (b"a: " + b"[" * 50_000, "line 1: expected a change"),
        (b"a: " + b"{" * 50_000, "line 1: expected the device's changes"),
        (b'["messages"' + b"[" * 100_000, "is not JSON"),
        (b"a: [[0, free]]\n---\nb: [[0, free]]\n", "none of the formats"),
    ],
)
def test_hostile_traces_cost_no_more_than_their_bytes(content: bytes, said: str, path: Path) -> None:
    with pytest.raises(BadData, match=said):
        read(path, content)


def test_a_trace_is_a_regular_file() -> None:
    with pytest.raises(BadData, match="/dev/zero is not a regular file"):
        traces.read(Path("/dev/zero"), WINTER)


def test_clients_may_share_what_they_have(path: Path) -> None:
    trace = read(path, shared(3, 2))
    assert trace.device.tolist() == [0, 0, 1, 1, 2, 2]


def test_a_slip_of_the_pen_is_not_eighteen_centuries(path: Path) -> None:
    """They would overflow the line on which all devices have their places."""
    rows = "device,start,end\na,2026-01-15 22:00:00,2026-01-16 06:00:00\nb,0202-01-15 22:00:00,2026-01-16 06:00:00\n"
    with pytest.raises(BadData, match="line 3: start is in the year 0202: moments are from 1970 to 2100"):
        read(path, rows)
    with pytest.raises(BadData, match="line 1 of its messages: 0202-01-28 10:00:00, but timestamps are from 1970"):
        read(path, json.dumps({"guid": "a", "messages": "0202-01-28 10:00:00\twifi"}))
    with pytest.raises(BadData, match="a trace of 666,000 days is too long for 200,000 devices"):
        build(np.zeros(1, int), np.zeros(1, int), np.ones(1, int), np.full(200_000, 666_000 * DAY))


def test_old_pickles_are_not_even_recognised(path: Path, tmp_path: Path) -> None:
    with pytest.raises(BadData, match="none of the formats"):
        read(path, pickle.dumps(Hostile(tmp_path / "pwned"), 0))
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("device,start,end\na,0,10\nb,10,10\n", "line 3: it ends before it begins"),
        ("device,start,end\na,0,10\n,10,20\n", "line 3: the device has no name"),
        ("device,start,end\na,0,10\nb,soon,20\n", "line 3: start 'soon' is not a number"),
        ("device,start,end\na,0,10\nb,5,\n", "line 3: end is empty"),
        ("device,start,end\na,0,10\nb,5\n", "line 3: 2 cells, but the first line names 3 columns"),
        ("device,start,end\na,0,10\n\nb,5,9\n", "line 3: the device has no name"),
        ("device,start,end\na,0,nan\n", "line 2: end is empty"),
        ("device,start,end\na,0,1e300\n", r"line 2: end 1e\+300 is not allowed"),
        ("device,start,end,timezone\na,0,9,\nb,0,9,Mars/Base\n", "line 3: 'Mars/Base' is not a time zone"),
        ("device,start,end,timezone\na,0,9,../../etc/passwd\n", "line 2: .* is not a time zone"),
        ("device,start,end,start\na,0,9,1\n", "names the column 'start' twice"),
        ("device,start,end\n", "has no rows"),
        ("a: [[0, free], [5, busy]]\nb: [[0, free], [5, tired]]\n", "line 2: state 'tired' is not known"),
        ("a:\n- [0, free]\n- [0, busy]\n", "line 3: 0 s is not after the change before it"),
        ("a:\n- [0, free]\n- [-1, busy]\n", "line 3: '-1' is not a number of seconds"),
        ("a:\n- [0, free, 3]\n", "line 2: expected a change"),
        ("a:\n  b: 3\n", "line 2: expected the device's changes"),
        ("a: [[0, free]]\na: [[0, free]]\n", "line 2: device a appears twice"),
        ("a: &x [[0, free]]\nb: *x\n", "line 1: expected"),
        ("a: !!python/object/apply:os.system [echo]\n", "line 1: expected a change"),
        ("just a sentence\n", "none of the formats"),
        ("a: [\n", "none of the formats"),
        ("", "none of the formats"),
        ('[{"guid": "a", "messages": 3}]', "record 1 needs a guid"),
        ('["messages"]', "a record must be an object"),
        ('[{"guid": "a", "messages": ""}, {"guid": "b", "messages": ""}, {"guid": "a", "messages": ""}]', "a appears"),
        ('{"guid": "a", "messages": ', "is not JSON"),
        (json.dumps({"guid": "a", "messages": "2020-01-28 10:00:00\twifi\n2020\twifi"}), "device a, line 2 of its"),
        (
            json.dumps({"guid": "a", "messages": "2020-01-28 10:00:00 wifi"}),
            "line 1 .* a timestamp, a tab and an event",
        ),
        (json.dumps({"guid": "a", "messages": "\n2020-01-28 10:00:00\tlost"}), "line 2 .* event 'lost' is not known"),
        (pickle.dumps([1, 2]), "must hold a dict of clients"),
        (pickle.dumps({1: {"active": [1], "inactive": [], "finish_time": 9}}), "client 1: active and inactive"),
        (pickle.dumps({1: {"active": [1], "inactive": ["2"], "finish_time": 9}}), "client 1: active and inactive must"),
        (pickle.dumps({1: {"active": [1], "inactive": [2], "finish_time": float("nan")}}), "client 1: finish_time"),
        (pickle.dumps({1: {"active": [], "inactive": []}}), "client 1: finish_time"),
    ],
)
def test_bad_rows_are_named(content: str | bytes, said: str, path: Path) -> None:
    with pytest.raises(BadData, match=said):
        read(path, content)


def test_a_device_that_the_fleet_does_not_have_is_named_by_line(path: Path) -> None:
    with pytest.raises(BadData, match="line 3: the fleet has no device 'c'"):
        read(path, "device,start,end\na,0,9\nc,0,9\n").of(["a", "b"])
    with pytest.raises(BadData, match="line 2: the fleet has no device 'c'"):
        read(path, "a: [[0, free]]\nc: [[1, free]]\n").of(["a", "b"])


def test_a_format_of_ones_own(path: Path) -> None:
    path.touch()
    rows: list[tuple[Any, Any, Any]] = [("a", 0, 3600.5), (7, "7200", 9000), ("a", DAY / 1000, DAY / 1000 + 60)]
    trace = traces.read(path, WINTER, lambda path: iter(rows))
    assert hours(trace) == [("a", 0, 3600.5 / 3600), ("7", 2, 2.5), ("a", 24, 24 + 1 / 60)]
    assert (trace.period == 2 * DAY).all()
    assert hours(traces.read(path, WINTER, lambda path: [])) == []
    with pytest.raises(BadData, match=r"trace, interval 1: \('a', 0\.0, 3600\.5\): the fleet has no device 'a'"):
        trace.of(["7"])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [("a", 0, 1), ("a", 2)],
            r"<lambda> failed after 1 intervals of .*ValueError.*must yield \(device, start, end\)",
        ),
        ([("a", "x", 1)], "could not convert string to float"),
        (None, "TypeError"),
        ([("a", 5, 5)], r"interval 1: \('a', 5\.0, 5\.0\): start must be before end"),
        ([("a", 0, float("nan"))], "start must be before end"),
        ([("a", 0, 1e300)], "within .* s of midnight"),
    ],
)
def test_mistakes_of_a_format_of_ones_own(rows: Any, said: str, path: Path) -> None:
    path.touch()
    with pytest.raises(BadData, match=said):
        traces.read(path, WINTER, lambda path: rows)


def test_a_format_can_be_named(path: Path) -> None:
    path.write_bytes(b"device,start,end\na,3600,7200\n")
    assert hours(traces.read(path, WINTER, "intervals")) == [("a", 1, 2)]
    with pytest.raises(BadData, match="is not JSON"):
        traces.read(path, WINTER, "flash")
    with pytest.raises(BadExperiment, match="use one of intervals, state_changes, flash, fedscale, or package"):
        Experiment(fleet={"availability": str(path), "trace_format": "csv"})
    with pytest.raises(BadExperiment, match="has trace_format, but no availability"):
        Experiment(fleet={"trace_format": "flash"})
    with pytest.raises(BadExperiment, match="cannot be imported"):
        traces.read(path, WINTER, "no_such_module:read")
    with pytest.raises(BadData, match=r"cannot read .*nosuch"):
        traces.read(path.with_name("nosuch"), WINTER, lambda path: [])
    with pytest.raises(BadData, match="is not a regular file"):
        traces.read(Path("/dev/zero"), WINTER, lambda path: [])
    assert tuple(traces.FORMATS) == TRACE_FORMATS
