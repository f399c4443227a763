"""The fleet file: what is known of the devices besides their data. CSV or Parquet, one row per device, any subset of

device, timezone, utc_offset, latitude, longitude, samples, seconds_per_sample, up_mbps, down_mbps

`timezone` is an IANA name, `utc_offset` is in hours (5.5) or +05:30. Cells of these two, latitude and longitude may be
empty.
"""

import re
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcluster.data.tables import Table, is_number
from fedcluster.errors import BadData
from fedcluster.fleet.availability import Availability, Ints
from fedcluster.fleet.timezones import hours_ahead
from fedcluster.inputs import read_bytes

Floats = NDArray[Any]
MOST_SAMPLES = 10**7  # of a device, as in fleet.samples
COLUMNS = (
    "device",
    "timezone",
    "utc_offset",
    "latitude",
    "longitude",
    "samples",
    "seconds_per_sample",
    "up_mbps",
    "down_mbps",
)


@dataclass(frozen=True, eq=False)
class DeviceTable:
    """What is known of the devices: a column for each property, None where it is not known. `utc_offset` is in hours,
    that of the time zone on the fleet's day; it, latitude and longitude are NaN for devices of which they are not
    known."""

    names: NDArray[np.str_] | None = None
    samples: Ints | None = None
    utc_offset: Floats | None = None
    latitude: Floats | None = None
    longitude: Floats | None = None
    seconds_per_sample: Floats | None = None
    up_mbps: Floats | None = None
    down_mbps: Floats | None = None
    availability: Availability | None = None

    def columns(self) -> dict[str, NDArray[Any]]:
        """The columns that are known; a trace contributes its own."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        trace = columns.pop("availability")
        if trace is not None:
            columns |= {"first": trace.first, "starts": trace.starts, "ends": trace.ends, "period": trace.period}
        return {name: column for name, column in columns.items() if column is not None}

    def digest(self) -> str:
        """A fingerprint, so that a resumed run can tell that its fleet is the same."""
        total = sha256()
        for name, column in self.columns().items():
            total.update(f"{name} {column.dtype} {len(column)}".encode())
            total.update(np.ascontiguousarray(column).view(np.uint8).data)
        return total.hexdigest()

    def rows(self, order: Ints) -> "DeviceTable":
        """The table of these devices in this order. A trace is matched by name, later."""
        columns: dict[str, Any] = {name: column[order] for name, column in self.columns().items()}
        return replace(self, **columns)


def read(path: Path, day: str) -> tuple[DeviceTable, Table]:
    """Read a fleet file. Offsets of time zones are those on `day`."""
    table = Table(path, read_bytes(path, "fleet.path"))
    unknown = [name for name in table.data.column_names if name not in COLUMNS]
    if unknown:
        raise BadData(f"{path}: column {unknown[0]!r} is not known; a fleet file has any of {', '.join(COLUMNS)}")

    def numbers(name: str, least: float, most: float = np.inf, gaps: bool = False) -> Floats | None:
        return table.numbers(name, least, most, gaps) if name in table else None

    samples = numbers("samples", 1, MOST_SAMPLES)
    if samples is not None and (samples % 1).any():
        table.refuse(int(np.flatnonzero(samples % 1)[0]), "samples must be a whole number")
    return DeviceTable(
        names=names(table) if "device" in table else None,
        samples=None if samples is None else samples.astype(np.int64),
        utc_offset=offsets(table, day),
        latitude=numbers("latitude", -90, 90, gaps=True),
        longitude=numbers("longitude", -180, 180, gaps=True),
        seconds_per_sample=numbers("seconds_per_sample", 0, 1e6),
        up_mbps=numbers("up_mbps", 1e-6, 1e9),
        down_mbps=numbers("down_mbps", 1e-6, 1e9),
    ), table


def names(table: Table) -> NDArray[np.str_]:
    codes, texts = table.words("device")
    empty = np.flatnonzero(codes < 0)
    if len(empty):
        table.refuse(int(empty[0]), "the device has no name")
    if len(texts) < len(codes):
        again = np.ones(len(codes), bool)
        again[np.unique(codes, return_index=True)[1]] = False
        row = int(np.flatnonzero(again)[0])
        table.refuse(row, f"device {texts[codes[row]]} has two rows")
    return np.array(texts)[codes]


def offsets(table: Table, day: str) -> Floats | None:
    """Hours ahead of UTC: of the time zone where one is given, else utc_offset."""
    if "timezone" not in table and "utc_offset" not in table:
        return None
    ahead = np.full(len(table), np.nan)
    for name, hours in (("utc_offset", parse_hours), ("timezone", lambda text: hours_ahead(text, day))):
        if name in table:
            codes, texts = table.words(name)
            for code, text in enumerate(texts):
                try:
                    hours(text)
                except ValueError as error:
                    table.refuse(int(np.flatnonzero(codes == code)[0]), f"{name} {error}")
            found = np.array([*(hours(text) for text in texts), np.nan])[codes]
            ahead = np.where(np.isnan(found), ahead, found)
    return ahead


def parse_hours(text: str) -> float:
    """Hours from 5.5, -3 or +05:30; ValueError for anything else."""
    clock = re.fullmatch(r"([+-]?)(\d{1,2}):([0-5]\d)", text, re.ASCII)
    if clock:
        sign, hours, minutes = clock.groups()
        offset = (-1 if sign == "-" else 1) * (int(hours) + int(minutes) / 60)
    elif is_number(text):
        offset = float(text)
    else:
        raise ValueError(f"{text!r} is not a number of hours; write 5.5 or +05:30")
    if not -14 <= offset <= 14:
        raise ValueError(f"{text} is not allowed: it must be from -14 to 14 hours")
    return offset
