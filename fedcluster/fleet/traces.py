"""Availability traces: when each device is free. `FORMATS` lists the formats that can be read:

    intervals       CSV or Parquet with columns device,start,end and optionally timezone
    state_changes   YAML  device: [[seconds, state], ...]
    flash           JSON records with guid and messages, lines of YYYY-MM-DD HH:MM:SS<TAB>EVENT
    fedscale        a pickle {client: {"active": [...], "inactive": [...], "finish_time": ...}} of plain containers

A user's own format is a function path -> iterable of (device, start, end) in seconds. Seconds count from midnight UTC;
moments are in UTC unless a zone is given. A trace repeats after the whole days on which its intervals begin (FedScale's
after its finish_time), so that a night stays a night.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcluster.data.tables import PARQUET, Table
from fedcluster.errors import BadData, FedClusterError
from fedcluster.experiment import import_object
from fedcluster.fleet import pickles
from fedcluster.fleet.availability import Availability, Ints, build
from fedcluster.fleet.state_changes import by_device
from fedcluster.fleet.timezones import DAY, HOUR, LONGEST, hours_ahead, to_utc, zone
from fedcluster.inputs import check_file, read_bytes

EVENTS = {  # FLASH: a device is ready when it is locked, on wifi and charging
    "screen_lock": ("locked", True),
    "screen_unlock": ("locked", False),
    "wifi": ("wifi", True),
    **dict.fromkeys(("unknown", "2g", "3g", "4g", "5g"), ("wifi", False)),
    "battery_charged_on": ("charging", True),
    "battery_charged_off": ("charging", False),
}
SILENT = {"screen_on", "screen_off", "battery_low", "battery_okay", "phone_on", "phone_off"}
SPAN = (1970, 2100)  # the years that a moment may be in: any other is a typing error
MOST_SHARED = 5_000_000  # intervals of a pickle whose clients share lists


@dataclass(frozen=True, eq=False)
class Trace:
    """Free intervals in milliseconds. `device` is an index into `names`; `where(row)` says where in the file an
    interval is."""

    path: Path
    names: list[str]
    device: Ints
    start: Ints
    end: Ints
    period: Ints
    where: Callable[[int], str]

    def of(self, names: Iterable[str]) -> Availability:
        """The availability of these devices, in this order. A device that the trace does not name is never free."""
        place = {name: k for k, name in enumerate(names)}
        known = np.array([place.get(name, -1) for name in self.names], np.int64)
        strangers = np.flatnonzero(known < 0)
        if len(strangers):
            name = self.names[strangers[0]]
            row = np.flatnonzero(self.device == strangers[0])
            at = self.where(int(row[0])) if len(row) else str(self.path)
            raise BadData(f"{at}: the fleet has no device {name!r}")
        period = np.full(len(place), DAY)
        period[known] = self.period
        return build(known[self.device], self.start, self.end, period)


def read(path: Path, day: str, format: str | Callable[..., Any] | None = None) -> Trace:
    """Read a trace. Without a format, the content tells. `day` is the date for which zones give their UTC offset."""
    if callable(format) or (format is not None and format not in FORMATS):
        return from_function(path, import_object(format, "path") if isinstance(format, str) else format)
    content = read_bytes(path, "fleet.availability")
    return FORMATS[format or detect(content)](path, content, day)


def detect(content: bytes) -> str:
    """The format of a trace, by its content."""
    head = content[:4096].removeprefix(b"\xef\xbb\xbf").lstrip()
    columns = {name.strip(b' "\r') for name in head.split(b"\n", 1)[0].split(b",")}
    if head.startswith(PARQUET) or {b"device", b"start", b"end"} <= columns:
        return "intervals"
    if head.startswith(b"\x80"):
        return "fedscale"
    if head[:1] in (b"{", b"[") and b'"messages"' in content:
        return "flash"
    return "state_changes"


def from_function(path: Path, reader: Callable[[Path], Iterable[tuple[Any, float, float]]]) -> Trace:
    """A trace in a user's own format: `reader` yields (device, start, end), in seconds from midnight UTC."""
    name = getattr(reader, "__name__", type(reader).__name__)
    check_file(path, "fleet.availability")
    rows: list[tuple[str, float, float]] = []
    try:
        for device, start, end in reader(path):
            rows.append((str(device), float(start), float(end)))
    except FedClusterError:
        raise
    except Exception as error:  # the function is the user's
        raise BadData(
            f"fleet.trace_format: {name} failed after {len(rows):,} intervals of {path} "
            f"({type(error).__name__}: {error}); it must yield (device, start, end) with times in seconds"
        ) from error

    def where(row: int) -> str:
        return f"{path}, interval {row + 1}: {rows[row]}"

    limit = LONGEST / 1000
    for row, (_, start, end) in enumerate(rows):
        if not -limit <= start < end <= limit:
            raise BadData(f"{where(row)}: start must be before end, and both within {limit:,.0f} s of midnight UTC")
    place = {device: k for k, device in enumerate(dict.fromkeys(device for device, _, _ in rows))}
    device = np.array([place[device] for device, _, _ in rows], np.int64)
    times = to_ms(np.array([(start, end) for _, start, end in rows], np.float64).reshape(-1, 2))
    return whole_days(path, list(place), device, times[:, 0], times[:, 1], where)


def intervals(path: Path, content: bytes, day: str) -> Trace:
    """Columns device,start,end, in seconds or as moments; with a column timezone, in that zone's local time."""
    table = Table(path, content)
    missing = [name for name in ("device", "start", "end") if name not in table]
    if missing:
        raise BadData(f"{path} has no column {missing[0]}; intervals need device,start,end")
    device, names = table.words("device")
    refuse_first(table, device < 0, "the device has no name")
    moments = {name: table.times(name) if table.floats(name) is None else None for name in ("start", "end")}
    for name, told in moments.items():
        if told is not None:
            wrong = outside(told)
            if wrong.any():
                year = np.datetime64(int(told[wrong.argmax()]), "ms").astype("datetime64[Y]")
                refuse_first(table, wrong, f"{name} is in the year {year}: moments are from {SPAN[0]} to {SPAN[1]}")
    zones = table.words("timezone") if "timezone" in table else None
    columns = []
    for name in ("start", "end"):
        local = moments[name]
        if local is None or moments["start"] is None or moments["end"] is None:
            local = np.round(table.numbers(name, -LONGEST / 1000, LONGEST / 1000) * 1000).astype(np.int64)
            ahead = lambda local, name: local - round(hours_ahead(name, day) * HOUR)  # noqa: E731
        else:
            ahead = to_utc
        columns.append(local if zones is None else in_utc(table, local, *zones, ahead))
    start, end = columns
    refuse_first(table, end <= start, "it ends before it begins")
    if moments["start"] is not None and moments["end"] is not None:
        start, end = since_midnight(start, end)
    return whole_days(path, names, device, start, end, table.where)


def outside(moments: Ints) -> NDArray[np.bool_]:
    """Which moments, in milliseconds since 1970, are outside the years of SPAN."""
    first, last = (int(np.datetime64(str(year), "ms").astype(np.int64)) for year in SPAN)
    return (moments < first) | (moments >= last)


def in_utc(table: Table, local: Ints, codes: Ints, zones: list[str], ahead: Callable[[Ints, str], Ints]) -> Ints:
    """Local times of each row's zone, in UTC. A row without a zone is in UTC already."""
    utc = local.copy()
    for code, name in enumerate(zones):
        rows = np.flatnonzero(codes == code)
        try:
            zone(name)
        except ValueError as error:
            table.refuse(int(rows[0]), str(error))
        utc[rows] = ahead(local[rows], name)
    return utc


def refuse_first(table: Table, wrong: NDArray[np.bool_], why: str) -> None:
    rows = np.flatnonzero(wrong)
    if len(rows):
        table.refuse(int(rows[0]), why)


def repeated(names: list[str]) -> int | None:
    """The index of the first name that occurs a second time."""
    seen: set[str] = set()
    for i, name in enumerate(names):
        if name in seen:
            return i
        seen.add(name)
    return None


def since_midnight(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Moments relative to the midnight before the first of them."""
    midnight = int(start.min()) // DAY * DAY if len(start) else 0
    return start - midnight, end - midnight


def whole_days(
    path: Path, names: list[str], device: Ints, start: Ints, end: Ints, where: Callable[[int], str]
) -> Trace:
    """A trace that repeats after the whole days on which its intervals begin."""
    days = int(start.max()) // DAY + 1 if len(start) else 1
    return Trace(path, names, device, start, end, np.full(len(names), max(days, 1) * DAY), where)


def state_changes(path: Path, content: bytes, day: str) -> Trace:
    """YAML: the last state of a device holds until its first change of the next period."""
    changes = by_device(path, content)
    period = (max((mine[-1][0] for mine in changes.values() if mine), default=0) // DAY + 1) * DAY
    rows = []
    for k, mine in enumerate(changes.values()):
        if not mine:
            continue
        for (now, free, line), (then, _, _) in zip(mine, [*mine[1:], (mine[0][0] + period, True, 0)], strict=True):
            if free:
                rows.append((k, now, then, line))
    device, start, end, lines = np.array(rows, np.int64).reshape(-1, 4).T
    periods = np.full(len(changes), period)
    return Trace(path, list(changes), device, start, end, periods, lambda row: f"{path}, line {lines[row]}")


def flash(path: Path, content: bytes, day: str) -> Trace:
    """FLASH: records in one object by key, in a list, or one on each line."""
    names: list[str] = []
    device: list[int] = []
    spans: list[NDArray[np.int64]] = []
    for record in records(path, content):
        guid, messages = record.get("guid"), record.get("messages")
        if not isinstance(guid, str | int) or not isinstance(messages, str):
            raise BadData(f"{path}: record {len(names) + 1} needs a guid and a text of messages")
        names.append(str(guid))
        spans.append(ready(messages, f"{path}, device {guid}"))
        device += [len(names) - 1] * len(spans[-1])
    twice = repeated(names)
    if twice is not None:
        raise BadData(f"{path}: device {names[twice]} appears twice")
    span = np.concatenate(spans) if spans else np.zeros((0, 2), np.int64)
    start, end = since_midnight(span[:, 0], span[:, 1])
    where = lambda row: f"{path}, device {names[device[row]]}"  # noqa: E731
    return whole_days(path, names, np.array(device, np.int64), start, end, where)


def records(path: Path, content: bytes) -> Iterator[dict[str, Any]]:
    try:
        try:
            parsed = json.loads(content)
        except ValueError:
            parsed = [json.loads(line) for line in content.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise BadData(f"{path} is not JSON ({error})") from None
    if isinstance(parsed, dict) and "messages" not in parsed:
        parsed = list(parsed.values())
    for record in parsed if isinstance(parsed, list) else [parsed]:
        if not isinstance(record, dict):
            raise BadData(f"{path}: a record must be an object with guid and messages, not {type(record).__name__}")
        yield record


def ready(messages: str, source: str) -> NDArray[np.int64]:
    """When a device is locked, on wifi and charging, as rows [start, end] in milliseconds. A state counts as false
    until its first event; after the last line the device is not free."""
    lines = [(n, line.split("\t")) for n, line in enumerate(messages.split("\n"), 1) if line.strip("\r\n\t \0")]
    for n, parts in lines:
        if len(parts) != 2:
            raise BadData(f"{source}, line {n} of its messages: expected a timestamp, a tab and an event")
    stamps = [parts[0].strip() for _, parts in lines]
    try:
        moments = np.array(stamps, "datetime64[ms]").astype(np.int64)
    except ValueError:
        moments = np.zeros(0, np.int64)
    if len(moments) < len(lines) or any(len(stamp) != 19 for stamp in stamps):
        n = next(n for n, parts in lines if not is_moment(parts[0].strip()))
        raise BadData(f"{source}, line {n} of its messages: the timestamp is not YYYY-MM-DD HH:MM:SS")
    if outside(moments).any():
        n, parts = lines[int(outside(moments).argmax())]
        raise BadData(
            f"{source}, line {n} of its messages: {parts[0].strip()}, but timestamps are from {SPAN[0]} to {SPAN[1]}"
        )
    state = {"locked": False, "wifi": False, "charging": False}
    began: int | None = None
    intervals: list[tuple[int, int]] = []
    for i in np.argsort(moments, kind="stable"):
        n, (_, event) = lines[i]
        event = event.strip("\r \0").lower()
        if event in EVENTS:
            what, holds = EVENTS[event]
            state[what] = holds
        elif event not in SILENT and not event.endswith("%"):
            raise BadData(f"{source}, line {n} of its messages: event {event!r} is not known")
        if all(state.values()):
            began = int(moments[i]) if began is None else began
        elif began is not None:
            intervals.append((began, int(moments[i])))
            began = None
    if began is not None:
        intervals.append((began, int(moments.max())))
    return np.array([pair for pair in intervals if pair[0] < pair[1]], np.int64).reshape(-1, 2)


def is_moment(text: str) -> bool:
    try:
        return len(text) == 19 and not np.isnat(np.datetime64(text))
    except ValueError:
        return False


def fedscale(path: Path, content: bytes, day: str) -> Trace:
    """FedScale: active from active[i] until inactive[i], every finish_time seconds."""
    try:
        clients = pickles.plain(content)
    except (ValueError, KeyError, IndexError) as error:  # a damaged or hostile pickle
        reason = str(error) if isinstance(error, ValueError) else "it is damaged"
        raise BadData(
            f"{path} is refused: a pickle may hold plain numbers, texts, lists and dicts only ({reason[:120]})"
        ) from None
    if not isinstance(clients, dict) or not clients:
        raise BadData(f"{path} must hold a dict of clients, like FedScale's traces")
    rows: list[NDArray[np.float64]] = []
    names: list[str] = []
    periods: list[int] = []
    total = 0
    read: dict[int, NDArray[np.float64]] = {}  # lists by id: clients may share them
    for client, mine in clients.items():
        source = f"{path}, client {str(client)[:80]}"
        if not isinstance(mine, dict):
            raise BadData(f"{source}: expected a dict with active, inactive and finish_time")
        active, inactive = mine.get("active"), mine.get("inactive")
        period: Any = mine.get("finish_time")
        if not is_seconds(period) or period <= 0:
            raise BadData(f"{source}: finish_time must be a number of seconds")
        if not isinstance(active, list) or not isinstance(inactive, list) or len(active) != len(inactive):
            raise BadData(f"{source}: active and inactive must be lists of the same length")
        total += len(active)
        if total > max(MOST_SHARED, len(content)):  # a list costs its bytes once, however many clients share it
            raise BadData(f"{source}: clients share lists of more than {MOST_SHARED:,} intervals in all")
        for column in (active, inactive):
            if id(column) not in read:
                if not all(map(is_seconds, column)):
                    raise BadData(f"{source}: active and inactive must be seconds")
                read[id(column)] = np.array(column, np.float64)
        k = len(names)
        names.append(str(client))
        periods.append(max(1, round(period * 1000)))
        a, b = read[id(active)], read[id(inactive)]
        different = a != b
        a, b = a[different], np.where(b > a, b, b + period)[different]
        rows.append(np.stack([np.full(len(a), k), a, b]))
    if repeated(names) is not None:
        raise BadData(f"{path}: a client appears twice, as a number and as a text")
    device, start, end = np.concatenate(rows, axis=1)
    device, start, end = device.astype(np.int64), to_ms(start), to_ms(end)
    return Trace(path, names, device, start, end, np.array(periods), lambda row: f"{path}, client {names[device[row]]}")


def is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LONGEST / 1000


def to_ms(seconds: Ints) -> Ints:
    return np.round(seconds * 1000).astype(np.int64)


Reader = Callable[[Path, bytes, str], Trace]
FORMATS: dict[str, Reader] = {
    "intervals": intervals,
    "state_changes": state_changes,
    "flash": flash,
    "fedscale": fedscale,
}
