"""The registry of a federation: its devices, what they said of themselves, and their clusters.

A device is known by its own id; Flower's node ids change with every start of a node or a SuperLink, and its key binds a
node to a device. The registry only grows. A device that leaves keeps its number and cluster, and is missing from its
cycles until it is back. One that comes late, during a run or when it is resumed, gets the next number and joins the
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

from fedcluster.data.dataset import DataSpec
from fedcluster.data.encoding import Moments
from fedcluster.data.held_out import held_out_sizes
from fedcluster.data.partition import Labels
from fedcluster.data.targets import MOST_TOKENS, PLURALS, TARGETS
from fedcluster.errors import BadRun
from fedcluster.experiment import WITH_DEVICES, Experiment
from fedcluster.files import write_atomically
from fedcluster.fleet.availability import daily
from fedcluster.fleet.clustering import clusters
from fedcluster.fleet.clustering import registry as clusterings
from fedcluster.fleet.clustering.clusters import Clusters
from fedcluster.fleet.fleet import Fleet, Ints, capped
from fedcluster.fleet.fleet_file import DeviceTable
from fedcluster.fleet.schedule import Cycle, Sampling, Schedule
from fedcluster.fleet.timezones import daily_hours, hours_ahead, zone

DEVICE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_DEVICES = 10_000
REQUIRED = {  # by what a clustering needs: the field of every device, and the option of join that gives it
    "labels": ("labels", "--tell-labels"),
    "timezone": ("timezone", "--timezone"),
    "availability": ("slots", "--slots"),
}

Target = Annotated[str, StringConstraints(pattern=f"^({'|'.join(TARGETS)})$")]
Text = Annotated[str, StringConstraints(max_length=64, pattern=r"^[A-Za-z0-9/_+ :.,-]*$")]
Count = Annotated[int, Field(ge=1, le=10**9)]
Finite = Annotated[float, Field(ge=-1e30, le=1e30)]
Statistics = Annotated[  # count, mean and sum of squared deviations of a column
    tuple[Annotated[float, Field(ge=1, le=1e9)], Finite, Annotated[float, Field(ge=0, le=1e60)]], Field(strict=False)
]


def empty_or(check: Callable[[str], object]) -> AfterValidator:
    """A text that a device may leave empty, or that passes the check, which raises ValueError."""

    def checked(text: str) -> str:
        if text:
            check(text)
        return text

    return AfterValidator(checked)


class Registration(BaseModel):
    """What a device says of itself, checked. `test_samples` is the number of test samples in its own data, if the
    server may ask for its scores."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    device: Annotated[str, StringConstraints(pattern=f"^{DEVICE_ID.pattern}$")]
    samples: Count
    shape: Annotated[list[Count], Field(min_length=1, max_length=3)]
    target: Target = "class"
    outputs: Annotated[int, Field(ge=1, le=MOST_TOKENS)]  # classes, numbers, labels or tokens
    vocabulary: Annotated[int, Field(ge=0, le=MOST_TOKENS)] = 0
    timezone: Annotated[Text, empty_or(zone)] = ""
    slots: Annotated[Text, empty_or(daily_hours)] = ""
    labels: Annotated[list[Annotated[int, Field(ge=0, le=10**9)]], Field(max_length=100_000)] | None = None
    test_samples: Count | None = None
    statistics: Annotated[dict[str, Statistics], Field(max_length=10_000)] | None = None

    @model_validator(mode="after")
    def check_labels(self) -> "Registration":
        if self.labels is not None and (self.target != "class" or len(self.labels) != self.outputs):
            raise ValueError(f"{len(self.labels)} label counts for {self.outputs} {PLURALS[self.target]}")
        return self

    @property
    def spec(self) -> DataSpec:
        return DataSpec(tuple(self.shape), self.target, self.outputs, self.vocabulary)


class Entry(Registration):
    """A registered device with its cluster, -1 if it is in none, and the first round that it takes part in."""

    cluster: Annotated[int, Field(ge=-1)] = 0
    since: Annotated[int, Field(ge=0)] = 0


def read_registration(text: str) -> Registration:
    """Raises ValueError, whose text says what is wrong."""
    try:
        return Registration.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'registration'}: {first['msg']}") from None


class Registry:
    """Devices in the order of their numbers. With a path, late devices are written to it before they take part; the
    first devices are written by whoever starts the run."""

    def __init__(self, experiment: Experiment, path: Path | None = None) -> None:
        self.experiment, self.path = experiment, path
        self.run = uuid4().hex  # device state belongs to one run and to no other
        self.entries: list[Entry] = []
        self.pending: dict[str, Registration] = {}  # devices that join with the next round
        if path is not None and path.exists():
            try:
                stored = json.loads(path.read_bytes())
                self.run = str(stored["run"])
                self.entries = [Entry.model_validate(line) for line in stored["devices"]]
            except (ValueError, TypeError, KeyError) as error:
                raise BadRun(f"{path} is damaged ({str(error).splitlines()[0]}): choose another --out") from None

    def number(self, device: str) -> int | None:
        return next((k for k, entry in enumerate(self.entries) if entry.device == device), None)

    def register(self, registration: Registration) -> str | None:
        """Register a device that is online. A known device keeps its entry, but may change whether it is asked for its
        scores; another one joins with the next round. Returns the reason if it is refused."""
        known = self.number(registration.device)
        if known is None:
            if len(self.entries) + len(self.pending) >= MAX_DEVICES:
                return f"the registry is full with {MAX_DEVICES:,} devices"
            mismatch = self.mismatch(registration)
            if mismatch is None:
                self.pending[registration.device] = registration
            return mismatch
        if self.entries[known].samples != registration.samples:
            return f"it had {self.entries[known].samples:,} samples and now says {registration.samples:,}"
        self.entries[known] = self.entries[known].model_copy(update={"test_samples": registration.test_samples})
        return None

    def mismatch(self, registration: Registration) -> str | None:
        """Why the device cannot take part: the clustering needs more of it, or its samples are of another shape."""
        field, option = REQUIRED.get(str(clusterings.needs(self.experiment.clusters)), ("device", ""))
        if not getattr(registration, field):
            method = self.experiment.to_dict()["clusters"]["method"]
            return f'clusters.method = "{method}" needs its {field}: join with {option}'
        for other in [*self.entries, *self.pending.values()][:1]:
            if other.shape != registration.shape:
                return f"its samples are {registration.shape}, those of device {other.device} are {other.shape}"
            if (other.statistics or {}).keys() != (registration.statistics or {}).keys():
                return f"it tells of other columns than device {other.device} (--columns, --tell-statistics)"
            if other.target != registration.target or bool(other.vocabulary) != bool(registration.vocabulary):
                return f"its data are of another kind than those of device {other.device}"
            if other.target in ("number", "multilabel") and other.outputs != registration.outputs:
                what = PLURALS[other.target]
                return f"its targets are {registration.outputs} {what}, those of device {other.device} {other.outputs}"
        if self.entries and self.experiment.data.name == WITH_DEVICES:
            spec = self.spec
            if registration.outputs > spec.outputs or registration.vocabulary > spec.vocabulary:
                return f"it has {outputs_of(registration.spec)}, but the federation learns {outputs_of(spec)}"
        return None

    @property
    def spec(self) -> DataSpec:
        """The spec of the devices with which the run started: with as many classes or tokens as any of them has."""
        first = [entry.spec for entry in self.entries if entry.since == 0]
        most = {name: max(getattr(spec, name) for spec in first) for name in ("outputs", "vocabulary")}
        return first[0]._replace(**most)

    @property
    def scales(self) -> dict[str, tuple[float, float]] | None:
        """Mean and deviation of every column that the devices with which the run began have told of."""
        first = [entry.statistics for entry in self.entries if entry.since == 0]
        if not first[0]:
            return None
        return {name: Moments.gathered([told[name] for told in first if told]).pooled() for name in first[0]}

    def admit(self, round: int, say: Callable[[str], None]) -> None:
        """Admit the pending devices from this round on: at the start by the experiment's clustering, later each to the
        smallest cluster, and not before the second round, so that a resumed run starts with the same devices."""
        if not self.pending:
            return
        new = sorted(self.pending.values(), key=sort_key)
        self.pending = {}
        if not self.entries:
            self.entries = [Entry(**dict(one)) for one in new]
            groups = clusters.build(self.experiment.clusters, self.fleet(), self.experiment.seed)
            self.entries = [
                entry.model_copy(update={"cluster": int(cluster)})
                for entry, cluster in zip(self.entries, groups.assignment, strict=True)
            ]
            return
        since = max(round, 1, self.entries[-1].since)  # numbers are in the order of the rounds
        for one in new:
            smallest = int(np.bincount([entry.cluster + 1 for entry in self.entries])[1:].argmin())
            self.entries.append(Entry(**dict(one), cluster=smallest, since=since))
            say(f"device {one.device} joins cluster {smallest} in round {since + 1}")
        for warning in self.capped_claims(len(self.entries) - len(new)):
            say(warning)
        self.save()

    def save(self) -> None:
        if self.path is not None:
            lines = [entry.model_dump(exclude_none=True) for entry in self.entries]
            write_atomically(self.path, json.dumps({"run": self.run, "devices": lines}, indent=1) + "\n")

    def fleet(self, round: int | None = None) -> Fleet:
        """The devices that take part in a round (None: all), as a simulated fleet without data."""
        entries = self.members(round)
        labels = label_counts([entry.labels for entry in entries], max(entry.outputs for entry in entries))
        day = self.experiment.fleet.date
        ahead = np.array([hours_ahead(entry.timezone, day) if entry.timezone else np.nan for entry in entries])
        free = None
        if clusterings.needs(self.experiment.clusters) == "availability":
            free = daily([daily_hours(entry.slots) for entry in entries], np.nan_to_num(ahead))
        known = DeviceTable(utc_offset=None if np.isnan(ahead).all() else ahead, availability=free)
        sizes, names = np.array([entry.samples for entry in entries]), np.array([entry.device for entry in entries])
        sizes -= held_out_sizes(sizes, self.experiment.fleet.test_share)  # devices do not train on these
        return Fleet(sizes, names, labels, known, self.experiment.accept.cap(claimed=True))

    def clusters(self, round: int | None = None) -> Clusters:
        assignment = np.array([entry.cluster for entry in self.members(round)], np.int32)
        return Clusters(assignment, int(assignment.max()) + 1)

    def members(self, round: int | None) -> list[Entry]:
        return self.entries if round is None else [entry for entry in self.entries if entry.since <= round]

    def test_sizes(self, round: int) -> Ints:
        """The number of samples on which each device that takes part in a round may be scored: those that it holds out,
        or its own test samples. 0 if it does not let the server ask."""
        entries, share = self.members(round), self.experiment.fleet.test_share
        held = held_out_sizes(np.array([entry.samples for entry in entries]), share)
        own = np.array([entry.test_samples or 0 for entry in entries])
        return np.where(own > 0, held, 0) if share else own

    def capped_claims(self, first: int = 0) -> list[str]:
        """A warning for every device, from number `first` on, whose claimed number of samples is capped."""
        fleet = self.fleet()
        sizes, counts = fleet.sizes.tolist(), capped(fleet.sizes, fleet.cap).tolist()
        return [
            f"device {entry.device} says that it has {entry.samples:,} samples and counts for {count:,}, "
            f"{fleet.cap:g} times the median (accept.sample_cap)"
            for entry, size, count in zip(self.entries[first:], sizes[first:], counts[first:], strict=True)
            if count < size
        ]


def outputs_of(spec: DataSpec) -> str:
    """How many outputs there are of what, and of how many tokens samples consist."""
    tokens = f" and {spec.vocabulary} tokens" if spec.vocabulary and spec.target != "token" else ""
    return f"{spec.outputs} {PLURALS[spec.target]}{tokens}"


def label_counts(counts: list[list[int] | None], classes: int) -> Labels | None:
    """The devices' label counts, if all devices have sent them."""
    padded = [own + [0] * (classes - len(own)) for own in counts if own]
    if len(padded) < len(counts):
        return None
    return Labels(np.array(padded).argmax(axis=1).astype(np.int32), lambda k: np.array(padded[k]))


def sort_key(registration: Registration) -> tuple[bool, int, str]:
    """Numbers by value, before names by letters: device 3 of a federation is device 3 of the simulation."""
    name = registration.device
    return (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)


class RegistrySchedule(Schedule):
    """The schedule of the registered devices: a pure function of the registry, the seed and the round."""

    def __init__(self, registry: Registry, sampling: Sampling | None = None) -> None:
        options, seed = registry.experiment.clusters, registry.experiment.seed
        super().__init__(options, registry.fleet(0), registry.clusters(0), seed, sampling=sampling)
        self.registry = registry

    def cycles(self, j: int, order: Ints | None = None, attempt: int = 0) -> list[Cycle]:
        fleet, clusters = self.registry.fleet(j), self.registry.clusters(j)
        return Schedule(self.options, fleet, clusters, self.seed, sampling=self.sampling).cycles(j, order, attempt)

    def cluster_sizes(self, j: int) -> Ints:
        return np.array([len(members) for members in self.registry.clusters(j).members])

    def name(self, k: int) -> str:
        return self.registry.entries[k].device

    def largest_cohort(self) -> int:
        return max(cycle.wanted for cycle in self.round(0))
