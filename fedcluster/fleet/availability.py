"""Availability: when each device is free, as a trace that repeats.

Columnar: one sorted array holds the free intervals of all devices, those of device k from `first[k]` to
`first[k + 1]`. Its trace has a period P_k: it is free at time t if it is free at t mod P_k. Look-ups bisect and keep no
state, so time may jump in both directions. Times are whole milliseconds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcluster.errors import BadData
from fedcluster.fleet.timezones import DAY, HOUR

Ints = NDArray[Any]
Floats = NDArray[np.float64]
FOREVER = 2**62  # the end of being always free, and when a device is free that never is
MOST_WINDOWS = 2**25  # at a time, in which devices may be free
CHUNK = 65_536  # devices at a time, where there is a number for each of their hours


@dataclass(frozen=True, eq=False)
class Availability:
    """Device k is free in [starts[i], ends[i]) for i in first[k]..first[k + 1]: sorted, disjoint, in [0, period[k]]."""

    first: Ints
    starts: Ints
    ends: Ints
    period: Ints

    def __len__(self) -> int:
        return len(self.period)

    @property
    def counts(self) -> Ints:
        """Free intervals of each device in its period; 0: it is never free."""
        return np.diff(self.first)

    @cached_property
    def span(self) -> int:
        return int(self.period.max()) + 1

    @cached_property
    def keys(self) -> Ints:
        """All starts in one ascending array: device k's begin at k * span."""
        return np.repeat(np.arange(len(self)), self.counts) * self.span + self.starts

    def find(self, devices: Ints, t: Ints | int) -> tuple[Ints, Ints, Ints]:
        """The time within the period, the last interval that begins by then, and whether the device is in it."""
        now = np.mod(t, self.period[devices])
        i = np.searchsorted(self.keys, devices * self.span + now, side="right") - 1
        free = i >= self.first[devices]
        free[free] = now[free] < self.ends[i[free]]
        return now, i, free

    def free_until(self, devices: Ints, t: Ints | int) -> Ints:
        """When the free interval that holds t ends; t itself where the device is not free."""
        now, i, free = self.find(devices, t)
        i = np.where(free, i, 0)
        if not len(self.ends):
            return now * 0 + t
        period, begin = self.period[devices], np.minimum(self.first[devices], len(self.starts) - 1)
        until = self.ends[i]
        round_again = (until == period) & (self.starts[begin] == 0)
        until = np.where(round_again, period + self.ends[begin], until)
        always = round_again & (i == begin)
        return np.where(free, np.where(always, FOREVER, t + until - now), t)

    def next_free(self, devices: Ints, t: Ints | int) -> Ints:
        """The first moment from t on at which the device is free; FOREVER when it never is."""
        now, i, free = self.find(devices, t)
        if not len(self.starts):
            return np.full(now.shape, FOREVER)
        begin, end = self.first[devices], self.first[devices + 1]
        later = i + 1 < end
        following = self.starts[np.where(later, i + 1, np.minimum(begin, len(self.starts) - 1))]
        wait = following - now + np.where(later, 0, self.period[devices])
        return np.where(free, t, np.where(begin == end, FOREVER, t + wait))

    def windows(self, count: int, width: int, least: int) -> Iterator[tuple[slice, NDArray[np.int64]]]:
        """Time is divided into windows of `width`, `count` of which make a round. By chunk of devices: in how many
        rounds of its trace a device is free in each window for at least `least` without a break."""
        chunk = max(1, min(CHUNK, MOST_WINDOWS // (self.span // width + 2)))
        for a in range(0, len(self), chunk):
            b = min(a + chunk, len(self))
            mine = slice(self.first[a], self.first[b])
            owner = np.repeat(np.arange(b - a), np.diff(self.first[a : b + 1]))
            starts, ends = self.starts[mine], self.ends[mine]
            low, high = -(-(starts + least) // width) - 1, (ends - least) // width  # the windows it is long enough in
            fits = (ends - starts >= least) & (low <= high)
            owner, low, high = owner[fits], low[fits], high[fits]
            again = owner[1:] == owner[:-1]  # a window that two intervals fit counts once
            low[1:] = np.where(again, np.maximum(low[1:], high[:-1] + 1), low[1:])
            each = np.maximum(high - low + 1, 0)
            window = np.repeat(low - np.cumsum(each) + each, each) + np.arange(each.sum())
            flat = np.repeat(owner, each) * count + window % count
            yield slice(a, b), np.bincount(flat, minlength=(b - a) * count).reshape(b - a, count)

    def rounds(self, length: int) -> Ints:
        """Rounds of this length in each device's trace, the last of them perhaps not whole."""
        return -(-self.period // length)


def daily(hours: Sequence[Sequence[tuple[int, int]]], ahead: Floats) -> Availability:
    """Of devices that are free at the same hours every day, by clocks that are so many hours ahead of UTC."""
    device = np.repeat(np.arange(len(hours)), [len(each) for each in hours])
    times = np.array([pair for each in hours for pair in each], np.int64).reshape(-1, 2)
    times -= np.round(ahead * HOUR).astype(np.int64)[device, None]
    return build(device, times[:, 0], times[:, 1], np.full(len(hours), DAY))


def build(device: Ints, start: Ints, end: Ints, period: Ints) -> Availability:
    """From intervals in any order, which may overlap and reach beyond the period: taken round it, and joined."""
    device, start, end = (np.asarray(column, np.int64) for column in (device, start, end))
    period = np.asarray(period, np.int64)
    length = np.minimum(end - start, period[device])
    start = np.mod(start, period[device])
    end = start + length
    beyond = np.flatnonzero(end > period[device])
    device = np.concatenate([device, device[beyond]])
    start = np.concatenate([start, np.zeros(len(beyond), np.int64)])
    end = np.concatenate([end, end[beyond] - period[device[beyond]]])
    end = np.minimum(end, period[device])
    span = int(period.max()) + 1
    if len(period) * (span + 1) >= 2**63:  # places of all devices on one line of whole numbers
        raise BadData(
            f"a trace of {span // DAY:,} days is too long for {len(period):,} devices: are its timestamps right?"
        )
    order = np.argsort(device * span + start, kind="stable")
    device, start, end = device[order], start[order], end[order]
    reach = np.maximum.accumulate(device * (span + 1) + end)
    apart = np.ones(len(device), bool)
    apart[1:] = device[1:] * (span + 1) + start[1:] > reach[:-1]
    owner = device[apart]
    last = np.append(np.flatnonzero(apart)[1:], len(device)) - 1 if len(device) else np.zeros(0, np.int64)
    first = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(period)))])
    return Availability(first, start[apart], reach[last] - owner * (span + 1), period)
