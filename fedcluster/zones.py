"""Time zones: how far a clock on the wall is ahead of UTC, on which day."""

from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import numpy as np
from numpy.typing import NDArray

HOUR, DAY = 3_600_000, 86_400_000  # simulated time is counted in whole milliseconds, so that sums are exact
STEP = HOUR // 4  # summer time begins and ends at a quarter of an hour


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


def to_utc(local: NDArray[np.int64], name: str) -> NDArray[np.int64]:
    """Milliseconds since 1970 by the clocks of a zone, as UTC. An hour that comes twice in autumn is its first."""
    place = zone(name)
    quarters, which = np.unique(local // STEP, return_inverse=True)
    start = datetime(1970, 1, 1)
    offsets = [(start + timedelta(milliseconds=int(q) * STEP)).replace(tzinfo=place).utcoffset() for q in quarters]
    return local - np.array([int((o or timedelta()).total_seconds() * 1000) for o in offsets], np.int64)[which]
