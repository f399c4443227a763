"""Look-ups in periodic traces agree with a brute-force search, whatever the trace and wherever time jumps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcluster.fleet import availability
from fedcluster.fleet.availability import FOREVER, build
from fedcluster.fleet.timezones import DAY, HOUR

quickly = settings(max_examples=150, deadline=None)
Interval = tuple[int, int, int]


@st.composite
def traces(draw: st.DrawFn) -> tuple[list[int], list[Interval]]:
    """A few devices with short periods, and intervals that may overlap, touch, wrap and be longer than a period."""
    periods = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    device = st.integers(0, len(periods) - 1)
    rows = draw(st.lists(st.tuples(device, st.integers(-20, 30), st.integers(1, 15)), max_size=8))
    return periods, [(k, start, start + length) for k, start, length in rows]


def is_free(k: int, t: int, periods: list[int], rows: list[Interval]) -> bool:
    """By looking at every interval in every period that could reach t."""
    shifts = [n * periods[k] for n in range(-130, 131)]
    return any(start + shift <= t < end + shift for owner, start, end in rows if owner == k for shift in shifts)


@quickly
@given(trace=traces(), times=st.lists(st.integers(-60, 60), min_size=1, max_size=6))
def test_look_ups_are_those_of_a_brute_force_search(trace: tuple[list[int], list[Interval]], times: list[int]) -> None:
    periods, rows = trace
    device, start, end = np.array(rows, np.int64).reshape(-1, 3).T
    found = build(device, start, end, np.array(periods))
    everyone = np.arange(len(periods))
    for t in times:  # in any order: time jumps in both directions
        until, following = found.free_until(everyone, t), found.next_free(everyone, t)
        for k in range(len(periods)):
            horizon = range(t, t + 2 * periods[k])
            busy = next((u for u in horizon if not is_free(k, u, periods, rows)), FOREVER)
            free = next((u for u in horizon if is_free(k, u, periods, rows)), FOREVER)
            assert until[k] == busy
            assert following[k] == free


@quickly
@given(trace=traces(), count=st.integers(1, 4), width=st.integers(1, 5), data=st.data())
def test_windows_are_those_of_a_brute_force_search(
    trace: tuple[list[int], list[Interval]], count: int, width: int, data: st.DataObject
) -> None:
    _, rows = trace
    periods = [count * width * data.draw(st.integers(1, 3)) for _ in trace[0]]
    least = data.draw(st.integers(1, width))
    device, start, end = np.array(rows, np.int64).reshape(-1, 3).T
    found = build(device, start, end, np.array(periods))
    days = np.concatenate([part for _, part in found.windows(count, width, least)])
    for k, period in enumerate(periods):
        expected = np.zeros(count, int)
        for window in range(period // width):
            free = "".join("x" if is_free(k, window * width + i, periods, rows) else "." for i in range(width))
            expected[window % count] += "x" * least in free
        assert days[k].tolist() == expected.tolist()
    assert found.rounds(count * width).tolist() == [period // (count * width) for period in periods]


def test_intervals_are_joined_round_the_period() -> None:
    found = build(np.array([0, 0, 1]), np.array([20, 0, 5]), np.array([24, 4, 40]), np.array([24, 24, 24]))
    assert found.counts.tolist() == [2, 1, 0]
    everyone = np.arange(3)
    assert found.free_until(everyone, 22).tolist() == [28, FOREVER, 22]  # over midnight; always; never
    assert found.free_until(everyone, -2).tolist() == [4, FOREVER, -2]
    assert found.next_free(everyone, 10).tolist() == [20, 10, FOREVER]
    assert found.next_free(np.array([0, 0]), np.array([10, 2404])).tolist() == [20, 2420]


def test_long_traces_are_looked_at_a_few_devices_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A year in which all devices are free has very many windows."""
    trace = build(np.arange(5), np.zeros(5, int), np.arange(5) * 30 * DAY, np.full(5, 365 * DAY))
    whole = np.concatenate([days for _, days in trace.windows(24, HOUR, 1)])
    monkeypatch.setattr(availability, "MOST_WINDOWS", 2 * 365 * 24)
    parts = list(trace.windows(24, HOUR, 1))
    assert len(parts) == 5
    assert (np.concatenate([days for _, days in parts]) == whole).all()
    assert whole[:, 0].tolist() == [0, 30, 60, 90, 120]
