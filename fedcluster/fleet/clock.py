"""The clock: simulated time, in whole milliseconds from midnight UTC of the fleet's day.

One rule for every method; FedAvg is its case of one cluster. A cycle opens when the model that it starts from is there:
when the one before it is over or, where cycles overlap (see `algorithms.overlap`), when an earlier one is. Its cohort,
`over_select` times the devices wanted, is drawn from the whole cluster, free or not: the draw never depends on the
time. Every device begins when it is next free, and needs

    download + training + upload = bytes / down  +  samples in its steps x seconds_per_sample  +  bytes / up

What is not known of a device takes no time, and without a trace it is always free. It is lost for this cycle when it
leaves its free time before it is done, or drops out. The cycle is over when as many updates as wanted are in, when
no device is left to wait for, or at the deadline; without one, a device that is never free is not waited for. With
fewer than `min_updates` it fails and the model stays. All of that follows from (seed, round, cycle, time) before
anything is trained, so that only devices that report need be trained.
"""

from dataclasses import dataclass, replace

import numpy as np

from fedcluster.errors import BadExperiment
from fedcluster.experiment import Local, sections
from fedcluster.fleet.availability import FOREVER
from fedcluster.fleet.fleet import Fleet, Ints
from fedcluster.fleet.schedule import Cycle, Schedule, samples_used
from fedcluster.rng import stream
from fedcluster.state import Time


@dataclass(frozen=True, eq=False)
class CycleOutcome:
    """How a cycle goes. `started`: the cycle with the devices that download and begin to train. `reported`: with those
    whose updates are in when the cycle is over; none if it failed. `dropped` and `stragglers`: devices that left, and
    devices that were still training or had not begun. `time`: the simulated time when the cycle, and every one before
    it, is over."""

    started: Cycle
    reported: Cycle
    time: Time
    opened: int = 0
    dropped: Ints | None = None
    stragglers: Ints | None = None
    failed: bool = False


def all_report(cycle: Cycle, time: Time) -> CycleOutcome:
    """Without a clock, all devices report and no time passes."""
    return CycleOutcome(cycle, cycle, time)


class Clock:
    """`down` and `up` are the bytes of a device's messages in a cycle, over all phases."""

    def __init__(self, options: sections.Clock, fleet: Fleet, local: Local, seed: int, down: int, up: int) -> None:
        self.options, self.fleet, self.local, self.seed, self.down, self.up = options, fleet, local, seed, down, up
        self.deadline = FOREVER if options.deadline is None else round(options.deadline * 1000)

    def outcome(self, cycle: Cycle, time: Time) -> CycleOutcome:
        cohort, opened, trace = cycle.cohort, time.available(cycle.staleness), self.fleet.known.availability
        starts = np.full(len(cohort), opened) if trace is None else trace.next_free(cohort, opened)
        ends = starts + self.work(cycle.round, cohort)
        leaves = np.full(len(cohort), FOREVER) if trace is None else trace.free_until(cohort, starts)
        leaves = np.minimum(leaves, self.drop_out_times(cycle, starts, ends))
        lost, never = leaves < ends, starts == FOREVER
        over = opened + self.deadline
        if (~lost & ~never).sum() >= cycle.wanted > 0:
            over = min(over, int(np.sort(ends[~lost & ~never])[cycle.wanted - 1]))
        elif self.options.deadline is None or not never.any():  # all are back or lost, or none will ever come
            over = min(over, int(np.minimum(leaves, ends)[~never].max(initial=opened)))

        in_time = np.flatnonzero(~lost & ~never & (ends <= over))
        first = np.sort(in_time[np.argsort(ends[in_time], kind="stable")][: cycle.wanted])
        lost &= ~never & (leaves <= over)
        late = ~lost
        late[first] = False
        failed, now = len(first) < self.options.min_updates, max(over, time.now)
        worked = busy(np.maximum(starts, time.now), np.minimum(np.minimum(leaves, ends), over))
        return CycleOutcome(
            started=select_devices(cycle, np.flatnonzero(starts < max(over, opened + 1))),
            reported=select_devices(cycle, first[:0] if failed else first),
            time=replace(
                time,
                now=now,
                idle=time.idle + now - time.now - worked,
                dropped=time.dropped + int(lost.sum()),
                late=time.late + int(late.sum()),
                failed=time.failed + failed,
                past=(time.now, *time.past)[: len(time.past)],
            ),
            opened=opened,
            dropped=cohort[lost],
            stragglers=cohort[late],
            failed=failed,
        )

    def work(self, round: int, cohort: Ints) -> Ints:
        """Milliseconds that each device of the cohort needs for the cycle."""
        known, sizes = self.fleet.known, self.fleet.sizes[cohort]
        seconds = np.zeros(len(cohort))
        if known.down_mbps is not None:
            seconds += self.down * 8e-6 / known.down_mbps[cohort]
        if known.up_mbps is not None:
            seconds += self.up * 8e-6 / known.up_mbps[cohort]
        if known.seconds_per_sample is not None:
            devices = zip(cohort.tolist(), sizes.tolist(), strict=True)
            used = [samples_used(self.local, self.seed, round, device, samples) for device, samples in devices]
            seconds += np.array(used) * known.seconds_per_sample[cohort]
        whole: Ints = np.ceil(np.minimum(seconds, FOREVER / 1e6) * 1000).astype(np.int64)
        return whole

    def drop_out_times(self, cycle: Cycle, starts: Ints, ends: Ints) -> Ints:
        """When a device drops out, somewhere in its work, also in work that takes no time; FOREVER when it does not."""
        if self.options.dropout == 0:
            return np.full(len(starts), FOREVER)
        rng = stream(self.seed, "drop_out", cycle.round, cycle.cycle)
        out, where = rng.random((2, len(starts)))
        within = np.minimum(starts + np.floor((ends - starts) * where).astype(np.int64), ends - 1)
        return np.where(out < self.options.dropout, within, FOREVER)


def busy(starts: Ints, ends: Ints) -> int:
    """How long any device was at work: the length of the union of the intervals."""
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    before = np.concatenate([[-FOREVER], ends[:-1]])
    return int(np.maximum(ends - np.maximum(starts, before), 0).sum())


def select_devices(cycle: Cycle, positions: Ints) -> Cycle:
    """The cycle with the devices at these positions of its cohort."""
    return replace(
        cycle, cohort=cycle.cohort[positions], weights=cycle.weights[positions], samples=cycle.samples[positions]
    )


def check(options: sections.Clock, schedule: Schedule) -> None:
    """A cycle that can never have enough updates would fail for ever."""
    least = min(cycle.wanted for cycle in schedule.round(0))
    if options.min_updates > least:
        raise BadExperiment(
            f"clock.min_updates = {options.min_updates}, but a cycle asks for as few as {least} updates: lower it, or "
            "raise clusters.participation"
        )
