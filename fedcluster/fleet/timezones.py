"""Time zones: how far a clock on the wall is ahead of UTC, on which day."""

import re
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import numpy as np
from numpy.typing import NDArray

HOUR, DAY = 3_600_000, 86_400_000  # simulated time is counted in whole milliseconds, so that sums are exact
LONGEST = 100 * 366 * DAY  # of a trace
STEP = HOUR // 4  # summer time begins and ends at a quarter of an hour
HOURS = re.compile(r"([01]?\d|2[0-3])(?::([0-5]\d))?-([01]?\d|2[0-4])(?::([0-5]\d))?", re.ASCII)


def zone(name: str) -> ZoneInfo:
    """The zone of this IANA name; ValueError when there is none. The name may be anything."""
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise ValueError(f"{name!r} is not a time zone; use an IANA name such as Europe/Berlin") from None


def hours_ahead(name: str, day: str) -> float:
    """Hours ahead of UTC at noon of this day (YYYY-MM-DD): where there is summer time it matters which."""
    noon = datetime.combine(date.fromisoformat(day), datetime.min.time(), UTC) + timedelta(hours=12)
    offset = zone(name).utcoffset(noon)
    assert offset is not None
    return offset.total_seconds() / 3600


def daily_hours(text: str) -> list[tuple[int, int]]:
    """Hours of every day by the clock on the wall, such as 22-6 or 12-13:30,22-6, as milliseconds since midnight, the
    end after the start; ValueError when the text, which may be anything, is not like that."""
    spans = []
    for part in text.split(","):
        match = HOURS.fullmatch(part.strip())
        times = [int(number or 0) for number in match.groups()] if match else [0, 0, 0, 0]
        start, end = (times[i] * HOUR + times[i + 1] * HOUR // 60 for i in (0, 2))
        if start == end or end > DAY:
            raise ValueError(f"{part.strip()!r} are not hours of a day; write 22-6, 12-13:30,22-6, or 0-24 for all day")
        spans.append((start, end if end > start else end + DAY))
    return spans


def to_utc(local: NDArray[np.int64], name: str) -> NDArray[np.int64]:
    """Milliseconds since 1970 by the clocks of a zone, as UTC. An hour that comes twice in autumn is its first."""
    place = zone(name)
    quarters, which = np.unique(local // STEP, return_inverse=True)
    start = datetime(1970, 1, 1)
    offsets = [(start + timedelta(milliseconds=int(q) * STEP)).replace(tzinfo=place).utcoffset() for q in quarters]
    return local - np.array([int((o or timedelta()).total_seconds() * 1000) for o in offsets], np.int64)[which]
