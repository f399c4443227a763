"""Clustering by availability: the day is divided into M slots, and every device gets one in which it is available long
enough, so that clusters are as equal as the hours of the devices allow.

Devices that fit the same slots are interchangeable, so groups g of them are assigned, not devices. With n_g devices in
group g and x_gs of them in slot s, the assignment has the least total of a convex cost c of the sizes y_s, which is
least for equal sizes:

    minimise  sum_s c(y_s)    subject to   sum_s x_gs = n_g,   y_s = sum_g x_gs,   x_gs >= 0 where g fits s, else 0

c is piecewise linear with whole breakpoints, one of them at n / M. That makes it a minimum-cost flow, a linear
programme whose vertices are whole numbers. Which devices of a group go to which slot is random.
"""

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcluster.errors import BadData, BadExperiment
from fedcluster.experiment import Seconds, Section
from fedcluster.fleet.availability import Availability, Ints
from fedcluster.fleet.clustering.request import Method, Request
from fedcluster.fleet.timezones import DAY
from fedcluster.inputs import total_memory

MAX_SLOTS = 1440  # of a day: a minute each
PIECES = 100  # of the cost below the mean, and as many above it: sizes are equal to a hundredth of the mean


@dataclass(frozen=True, eq=False)
class Timetable:
    """The slot of every device and, if it may be in two, its second; -1: it fits none. `share[k, s]` is the share of
    the days of its trace on which device k is available long enough in slot s."""

    slot: Ints
    second: Ints
    share: NDArray[np.float32]

    def used(self) -> Ints:
        """The slots that have a device, in ascending order."""
        return np.unique(self.slot[self.slot >= 0])


def timetable(trace: Availability, count: int, free_seconds: float, rng: Generator) -> Timetable:
    """A device fits a slot if it is available for `free_seconds` without a break on at least half of its days. If there
    is no such slot, it fits those in which it is available on the most days."""
    width, least = DAY // count, round(free_seconds * 1000)
    if least > width:
        raise BadExperiment(
            f"clusters.free_seconds = {free_seconds:g} is more than a slot has: a day in {count} slots leaves "
            f"{width / 1000:.0f} s: use fewer clusters, or lower free_seconds"
        )
    if count > MAX_SLOTS or 4 * len(trace) * count > total_memory() / 4:
        raise BadExperiment(
            f"clusters.count = {count} slots of a day for {len(trace):,} devices: use at most {MAX_SLOTS} slots, and "
            "no more than fit into memory"
        )
    share = np.empty((len(trace), count), np.float32)
    for part, days in trace.windows(count, width, least):
        share[part] = days / trace.rounds(DAY)[part, None]
    highest = share.max(axis=1, keepdims=True)
    fits = (share >= np.minimum(highest, 0.5)) & (share > 0)
    patterns, group = distinct_rows(fits)
    assigned = assign(patterns, np.bincount(group))
    order = np.argsort(group[shuffled := rng.permutation(len(fits))], kind="stable")
    slots = np.append(np.arange(count), -1)
    slot = np.empty(len(fits), np.int64)
    slot[shuffled[order]] = np.repeat(np.tile(slots, len(assigned)), assigned.reshape(-1))
    return Timetable(slot, second_slots(slot, fits, rng), share)


def distinct_rows(fits: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], Ints]:
    """The distinct rows, and the number of each row among them. As many columns are compared at a time as fit into a
    whole number."""
    patterns, group = np.zeros((1, 0), bool), np.zeros(len(fits), np.int64)
    for start in range(0, fits.shape[1], 32):
        width = min(32, fits.shape[1] - start)
        bits = fits[:, start : start + width] @ (1 << np.arange(width))
        values, group = np.unique(group * 2**32 + bits, return_inverse=True)
        unpacked = (values[:, None] >> np.arange(width)) & 1
        patterns = np.hstack([patterns[values >> 32], unpacked.astype(bool)])
    return patterns, group


def assign(patterns: NDArray[np.bool_], sizes: Ints) -> Ints:
    """x[g, s], the number of devices of each group in each slot; the last column is for groups that fit none."""
    from scipy.optimize import linprog  # half a second, which few experiments need
    from scipy.sparse import coo_array

    fitting = patterns.any(axis=1)
    total, count = int(sizes[fitting].sum()), patterns.shape[1]
    assigned = np.zeros((len(patterns), count + 1), np.int64)
    assigned[~fitting, -1] = sizes[~fitting]
    if not total:
        return assigned
    group, slot = np.nonzero(patterns)
    mean = total / count
    breakpoints = np.unique(np.round(mean * np.arange(2 * PIECES) / PIECES).astype(np.int64))
    breakpoints = np.unique([*breakpoints, total // count, -(-total // count), total])
    widths, pieces = np.diff(breakpoints), len(breakpoints) - 1
    middle = (breakpoints[:-1] + breakpoints[1:]) / 2
    flows, steps = len(group), count * pieces
    rows = np.concatenate([group, len(patterns) + slot, len(patterns) + np.repeat(np.arange(count), pieces)])
    columns = np.concatenate([np.arange(flows), np.arange(flows), flows + np.arange(steps)])
    values = np.concatenate([np.ones(2 * flows), -np.ones(steps)])
    solution = linprog(
        np.concatenate([np.zeros(flows), np.tile(middle / mean, count)]),
        A_eq=coo_array((values, (rows, columns)), shape=(len(patterns) + count, flows + steps)).tocsr(),
        b_eq=np.concatenate([np.where(fitting, sizes, 0), np.zeros(count)]),
        bounds=np.column_stack([np.zeros(flows + steps), np.append(np.full(flows, total), np.tile(widths, count))]),
        method="highs-ds",
    )
    assert solution.success, solution.message  # every group that fits a slot has room in it
    assigned[group, slot] = np.round(solution.x[:flows]).astype(np.int64)
    assert (assigned.sum(axis=1) == sizes).all()
    return assigned


def second_slots(slot: Ints, fits: NDArray[np.bool_], rng: Generator) -> Ints:
    """A second slot beside the first that the device fits too, drawn if both neighbours do; else the first again."""
    count, devices = fits.shape[1], np.arange(len(slot))
    before, after = (slot - 1) % count, (slot + 1) % count
    fits_before, fits_after = fits[devices, before], fits[devices, after]
    heads = rng.random(len(slot)) < 0.5
    earlier = fits_before & (heads | ~fits_after)
    return np.where(slot < 0, -1, np.where(earlier, before, np.where(fits_after, after, slot)))


class AvailabilityOptions(Section):
    """How long a device must be available in its slot, and whether it may be in two neighbouring slots, one of which is
    drawn each round."""

    free_seconds: Seconds = 600.0
    soft: bool = False


def availability(request: Request) -> Ints:
    """Clusters by a slot of the day in which a device is available long enough; with `soft`, by two. Devices that are
    never available are in no cluster; slots without devices are left out."""
    return number_slots(find_slots(request), request.options.soft)


def find_slots(request: Request) -> Timetable:
    trace, free_seconds = request.fleet.known.availability, request.options.free_seconds
    if trace is None:
        raise BadData(
            'clusters.method = "availability" needs to know when devices are free: give fleet.availability, a trace, '
            "or use fleet.world"
        )
    slots = timetable(trace, request.clusters, free_seconds, request.rng)
    if slots.slot.max() < 0:
        raise BadData(f"no device is ever free for {free_seconds:g} s: lower clusters.free_seconds")
    return slots


def number_slots(slots: Timetable, soft: bool) -> Ints:
    """The assignment to slots, numbered without those that have no device."""
    used = slots.used()
    number = np.full(slots.share.shape[1] + 1, -1)  # the last is for devices without a slot, -1
    number[used] = np.arange(len(used))
    first, second = number[slots.slot], number[slots.second]
    return np.column_stack([first, np.where(second < 0, first, second)]) if soft else first


AVAILABILITY = Method(availability, AvailabilityOptions, lambda options: "availability", at_most=True)
