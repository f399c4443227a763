"""Clustering by availability: the day is divided into M slots, and every device gets one in which it is free long
enough, so that clusters are as equal as the devices' hours allow.

Devices that fit the same slots are alike, so groups g of them are assigned, not devices. With n_g devices in group g
and x_gs of them in slot s, the smallest of a convex cost of the sizes y_s is sought, which is least for equal ones:

    minimise  sum_s c(y_s)    subject to   sum_s x_gs = n_g,   y_s = sum_g x_gs,   x_gs >= 0 where g fits s, else 0

c is piecewise linear with whole corners, one of them at n / M. That makes it a minimum-cost flow, a linear programme
whose corner solutions are whole numbers. Which devices of a group go where is drawn.
"""

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array

from fedcluster.errors import BadExperiment
from fedcluster.fleet.availability import Availability, Ints
from fedcluster.fleet.timezones import DAY
from fedcluster.inputs import total_memory

MOST_SLOTS = 1440  # of a day: a minute each
PIECES = 100  # corners of the cost below the mean, and as many above: sizes are equal to a hundredth of it


@dataclass(frozen=True, eq=False)
class Timetable:
    """The slot of every device and, when it may sit in two, its second; -1: it fits none. `share[k, s]` is the share
    of the days of its trace on which device k is free long enough in slot s."""

    slot: Ints
    second: Ints
    share: NDArray[np.float32]

    def used(self) -> Ints:
        """The slots that have a device."""
        return np.unique(self.slot[self.slot >= 0])


def timetable(trace: Availability, count: int, free_seconds: float, rng: Generator) -> Timetable:
    """A device fits a slot when it is free for `free_seconds` without a break on at least half of its days; one that
    fits none on half of them, those in which it is so most often."""
    width, least = DAY // count, round(free_seconds * 1000)
    if least > width:
        raise BadExperiment(
            f"clusters.free_seconds = {free_seconds:g} is more than a slot has: a day in {count} slots leaves "
            f"{width / 1000:.0f} s: take fewer clusters, or ask for less"
        )
    if count > MOST_SLOTS or 4 * len(trace) * count > total_memory() / 4:
        raise BadExperiment(
            f"clusters.count = {count} slots of a day for {len(trace):,} devices: take at most {MOST_SLOTS} slots, and "
            "no more than fit into memory"
        )
    share = np.empty((len(trace), count), np.float32)
    for part, days in trace.windows(count, width, least):
        share[part] = days / trace.rounds(DAY)[part, None]
    most = share.max(axis=1, keepdims=True)
    fits = (share >= np.minimum(most, 0.5)) & (share > 0)
    code = np.zeros(len(fits), np.int64)
    patterns, group = np.zeros((1, 0), bool), code
    for start in range(0, count, 32):  # as many slots as fit into a number at a time
        bits = fits[:, start : start + 32] @ (1 << np.arange(min(32, count - start)))
        values, group = np.unique(group * 2**32 + bits, return_inverse=True)
        unpacked = (values[:, None] >> np.arange(min(32, count - start))) & 1
        patterns = np.hstack([patterns[values >> 32], unpacked.astype(bool)])
    taken = assign(patterns, np.bincount(group))
    order = np.argsort(group[shuffled := rng.permutation(len(fits))], kind="stable")
    slots = np.append(np.arange(count), -1)
    slot = np.empty(len(fits), np.int64)
    slot[shuffled[order]] = np.repeat(np.tile(slots, len(taken)), taken.reshape(-1))
    return Timetable(slot, neighbours(slot, fits, rng), share)


def assign(patterns: NDArray[np.bool_], sizes: Ints) -> Ints:
    """x[g, s], devices of each group in each slot; a last column for the groups that fit none."""
    fitting = patterns.any(axis=1)
    total, count = int(sizes[fitting].sum()), patterns.shape[1]
    taken = np.zeros((len(patterns), count + 1), np.int64)
    taken[~fitting, -1] = sizes[~fitting]
    if not total:
        return taken
    group, slot = np.nonzero(patterns)
    mean = total / count
    corners = np.unique(np.round(mean * np.arange(2 * PIECES) / PIECES).astype(np.int64))
    corners = np.unique([*corners, total // count, -(-total // count), total])
    widths, pieces = np.diff(corners), len(corners) - 1
    middle = (corners[:-1] + corners[1:]) / 2
    flows, steps = len(group), count * pieces
    rows = np.concatenate([group, len(patterns) + slot, len(patterns) + np.repeat(np.arange(count), pieces)])
    columns = np.concatenate([np.arange(flows), np.arange(flows), flows + np.arange(steps)])
    values = np.concatenate([np.ones(2 * flows), -np.ones(steps)])
    found = linprog(
        np.concatenate([np.zeros(flows), np.tile(middle / mean, count)]),
        A_eq=coo_array((values, (rows, columns)), shape=(len(patterns) + count, flows + steps)).tocsr(),
        b_eq=np.concatenate([np.where(fitting, sizes, 0), np.zeros(count)]),
        bounds=np.column_stack([np.zeros(flows + steps), np.append(np.full(flows, total), np.tile(widths, count))]),
        method="highs-ds",
    )
    assert found.success, found.message  # every group that fits a slot has room in it
    taken[group, slot] = np.round(found.x[:flows]).astype(np.int64)
    assert (taken.sum(axis=1) == sizes).all()
    return taken


def neighbours(slot: Ints, fits: NDArray[np.bool_], rng: Generator) -> Ints:
    """A second slot beside the first that the device fits as well, drawn where both are; else the first again."""
    count, everyone = fits.shape[1], np.arange(len(slot))
    before, after = (slot - 1) % count, (slot + 1) % count
    fits_before, fits_after = fits[everyone, before], fits[everyone, after]
    heads = rng.random(len(slot)) < 0.5
    earlier = fits_before & (heads | ~fits_after)
    return np.where(slot < 0, -1, np.where(earlier, before, np.where(fits_after, after, slot)))
