"""The roster: which devices there are, what they said of themselves, and which node each is now.

A device is known by its own id. Flower's node ids are new with every start of a node or a SuperLink; what binds a node
to a device is its key. The roster only grows: a device that goes keeps its number and its cluster and is left out of
its turns until it is back; one that comes late, during a run or when it is resumed, gets the next number and joins the
smallest cluster in the next round.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated
from uuid import uuid4

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from fedcluster.data.partition import Labels
from fedcluster.errors import BadRun
from fedcluster.experiment import WITH_DEVICES, Experiment
from fedcluster.files import write_atomically
from fedcluster.fleet.availability import daily
from fedcluster.fleet.clustering import clusters
from fedcluster.fleet.clustering.clusters import Clusters
from fedcluster.fleet.fleet import Fleet, Ints, capped
from fedcluster.fleet.fleet_file import DeviceTable
from fedcluster.fleet.schedule import Cycle, Schedule
from fedcluster.fleet.timezones import daily_hours, hours_ahead, zone

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ROOM = 10_000  # devices that a roster may come to hold
LABELS = ("labels", "--tell-labels")
TOLD = {"major_class": LABELS, "balanced": LABELS, "similar": LABELS}
TOLD |= {"timezone": ("timezone", "--timezone"), "availability": ("slots", "--slots")}  # what clusterings go by

Text = Annotated[str, StringConstraints(max_length=64, pattern=r"^[A-Za-z0-9/_+ :.,-]*$")]
Count = Annotated[int, Field(ge=1, le=10**9)]


def told(check: Callable[[str], object]) -> AfterValidator:
    """Of what a device may keep to itself: where it tells, it must pass the check, which raises ValueError."""

    def checked(text: str) -> str:
        if text:
            check(text)
        return text

    return AfterValidator(checked)


class Registration(BaseModel):
    """What a device says of itself when it is asked, checked."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    device: Annotated[str, StringConstraints(pattern=f"^{NAME.pattern}$")]
    samples: Count
    shape: Annotated[list[Count], Field(min_length=1, max_length=3)]
    classes: Annotated[int, Field(ge=1, le=100_000)]
    timezone: Annotated[Text, told(zone)] = ""
    slots: Annotated[Text, told(daily_hours)] = ""
    labels: Annotated[list[Annotated[int, Field(ge=0, le=10**9)]], Field(max_length=100_000)] | None = None

    @model_validator(mode="after")
    def a_count_for_every_class(self) -> "Registration":
        if self.labels is not None and len(self.labels) != self.classes:
            raise ValueError(f"{len(self.labels)} label counts for {self.classes} classes")
        return self


class Entry(Registration):
    """A device on the roster: its cluster (-1: it takes no part), and the round from which on it takes part."""

    cluster: Annotated[int, Field(ge=-1)] = 0
    since: Annotated[int, Field(ge=0)] = 0


def read_registration(text: str) -> Registration:
    """ValueError says what is wrong with it."""
    try:
        return Registration.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'registration'}: {first['msg']}") from None


class Registry:
    """Devices in the order of their numbers. With a path, latecomers are on the disk before they take part; those who
    are there at the start are saved by whoever begins the run."""

    def __init__(self, experiment: Experiment, path: Path | None = None) -> None:
        self.experiment, self.path = experiment, path
        self.run = uuid4().hex  # what devices keep belongs to one run and to no other
        self.entries: list[Entry] = []
        self.waiting: dict[str, Registration] = {}
        if path is not None and path.exists():
            try:
                stored = json.loads(path.read_bytes())
                self.run = str(stored["run"])
                self.entries = [Entry.model_validate(line) for line in stored["devices"]]
            except (ValueError, TypeError, KeyError) as error:
                raise BadRun(f"{path} is damaged ({str(error).splitlines()[0]}): choose another --out") from None

    def number(self, device: str) -> int | None:
        return next((k for k, entry in enumerate(self.entries) if entry.device == device), None)

    def note(self, registration: Registration) -> str | None:
        """A device has said who it is: known devices stay what they are, others wait for the next round. Returns why it
        is refused, if it is."""
        known = self.number(registration.device)
        if known is None:
            if len(self.entries) + len(self.waiting) >= ROOM:
                return f"the roster is full with {ROOM:,} devices"
            unfit = self.unfit(registration)
            if unfit is None:
                self.waiting[registration.device] = registration
            return unfit
        if self.entries[known].samples != registration.samples:
            return f"it had {self.entries[known].samples:,} samples and now says {registration.samples:,}"
        return None

    def unfit(self, registration: Registration) -> str | None:
        """All devices learn the same thing, and tell what the clustering goes by."""
        method = self.experiment.clusters.method
        field, option = TOLD.get(str(method), ("device", ""))
        if not getattr(registration, field):
            return f'clusters.method = "{method}" goes by its {field}, which it does not tell: join with {option}'
        for other in [*self.entries, *self.waiting.values()][:1]:
            if other.shape != registration.shape:
                return f"its samples are {registration.shape}, those of device {other.device} are {other.shape}"
        if self.entries and self.experiment.data.name == WITH_DEVICES and registration.classes > self.classes:
            return f"it has {registration.classes} classes, but the federation learns {self.classes}"
        return None

    @property
    def classes(self) -> int:
        """As many as the devices had with which the run began."""
        return max(entry.classes for entry in self.entries if entry.since == 0)

    def admit(self, round: int, say: Callable[[str], None]) -> None:
        """Those who wait take part from this round on: at the start by the experiment's clustering, later each in the
        smallest cluster, and in the second round at the earliest: what the run began with stays as it is."""
        if not self.waiting:
            return
        newcomers = sorted(self.waiting.values(), key=order)
        self.waiting = {}
        if not self.entries:
            self.entries = [Entry(**dict(one)) for one in newcomers]
            groups = clusters.build(self.experiment.clusters, self.fleet(), self.experiment.seed)
            self.entries = [
                entry.model_copy(update={"cluster": int(cluster)})
                for entry, cluster in zip(self.entries, groups.assignment, strict=True)
            ]
            return
        since = max(round, 1, self.entries[-1].since)  # numbers are given in the order of the rounds
        for one in newcomers:
            smallest = int(np.bincount([entry.cluster + 1 for entry in self.entries])[1:].argmin())
            self.entries.append(Entry(**dict(one), cluster=smallest, since=since))
            say(f"device {one.device} joins cluster {smallest} in round {since + 1}")
        for claim in self.claims(len(self.entries) - len(newcomers)):
            say(claim)
        self.save()

    def save(self) -> None:
        if self.path is not None:
            lines = [entry.model_dump(exclude_none=True) for entry in self.entries]
            write_atomically(self.path, json.dumps({"run": self.run, "devices": lines}, indent=1) + "\n")

    def fleet(self, round: int | None = None) -> Fleet:
        """The devices that take part in a round, as the simulator sees a fleet: without their data."""
        entries = self.entries if round is None else [entry for entry in self.entries if entry.since <= round]
        sizes = np.array([entry.samples for entry in entries])
        cap = self.experiment.accept.cap(claimed=True)
        method = self.experiment.clusters.method
        labels = label_counts([entry.labels for entry in entries], max(entry.classes for entry in entries))
        day = self.experiment.fleet.date
        ahead = np.array([hours_ahead(entry.timezone, day) if entry.timezone else np.nan for entry in entries])
        free = None
        if method == "availability":
            free = daily([daily_hours(entry.slots) for entry in entries], np.nan_to_num(ahead))
        known = DeviceTable(utc_offset=None if np.isnan(ahead).all() else ahead, availability=free)
        names = np.array([entry.device for entry in entries])
        return Fleet(sizes, names, labels, known, cap)

    def claims(self, first: int = 0) -> list[str]:
        """Who, from device number `first` on, says that it has more samples than it counts for."""
        fleet = self.fleet()
        counts = capped(fleet.sizes, fleet.cap).tolist()
        return [
            f"device {entry.device} says that it has {entry.samples:,} samples and counts for {count:,}, "
            f"{fleet.cap:g} times the median (accept.sample_cap)"
            for entry, count in zip(self.entries[first:], counts[first:], strict=True)
            if count < entry.samples
        ]

    def clusters(self, round: int | None = None) -> Clusters:
        entries = self.entries if round is None else [entry for entry in self.entries if entry.since <= round]
        assignment = np.array([entry.cluster for entry in entries], np.int32)
        return Clusters(assignment, int(assignment.max()) + 1)


def label_counts(told: list[list[int] | None], classes: int) -> Labels | None:
    """The label counts that devices have told, if all of them have."""
    padded = [counts + [0] * (classes - len(counts)) for counts in told if counts]
    if len(padded) < len(told):
        return None
    return Labels(np.array(padded).argmax(axis=1).astype(np.int32), lambda k: np.array(padded[k]))


def order(registration: Registration) -> tuple[bool, int, str]:
    """Numbers by their value, before names by their letters: device 3 of a federation is device 3 of the simulation."""
    name = registration.device
    return (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)


class LiveSchedule(Schedule):
    """A schedule over a roster that grows. `look` finds out who has come, before a round begins. `wait` comes before a
    round is taken again, with other cohorts. `begun` is a round of which some cycles were taken before the server was
    stopped: its cohorts stay as they are."""

    def __init__(
        self,
        registry: Registry,
        look: Callable[[], None],
        say: Callable[[str], None],
        wait: Callable[[int], None] | None = None,
    ) -> None:
        self.registry, self.look, self.say, self.wait = registry, look, say, wait
        self.begun: int | None = None
        self.latest = -1
        experiment = registry.experiment
        super().__init__(experiment.clusters, registry.fleet(0), registry.clusters(0), experiment.seed)

    def round(self, j: int, order: Ints | None = None) -> list[Cycle]:
        self.attempt = self.attempt + 1 if j == self.latest else 0
        self.latest = j
        if self.attempt and self.wait is not None:
            self.wait(j)
        self.look()
        self.registry.admit(j + (j == self.begun), self.say)
        self.fleet, self.clusters = self.registry.fleet(j), self.registry.clusters(j)
        return super().round(j, order)

    def cohort_size(self) -> int:
        return sum(cycle.wanted for cycle in super().round(0))

    def largest_cohort(self) -> int:
        return max(cycle.wanted for cycle in super().round(0))
