"""State changes as YAML, device: [[seconds, state], ...], parsed event by event so that errors name the line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from fedcluster.errors import BadData
from fedcluster.fleet.timezones import LONGEST

FREE = {"free", "available", "ready", "active", "online", "on", "true", "1"}
BUSY = {"busy", "unavailable", "unready", "inactive", "offline", "off", "false", "0"}
NAME, CHANGE = "the name of a device", "a change, [seconds, state]"


class Events:
    """YAML events. Nothing is composed, so neither nesting nor aliases can expand the input."""

    def __init__(self, path: Path, content: bytes) -> None:
        self.path = path
        self.events = yaml.parse(content, yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader)

    def next(self, *kinds: type[Any], here: str = "") -> Any:
        """The next event, which must be one of these kinds; `here` describes it for the error message."""
        event = next(self.events, None)
        if event is None:
            raise yaml.YAMLError("it ends too early")
        if not isinstance(event, kinds) or getattr(event, "anchor", None) is not None:
            raise self.refuse(event, f"expected {here}") if here else yaml.YAMLError("it is not a mapping of devices")
        return event

    def refuse(self, event: Any, why: str) -> BadData:
        return BadData(f"{self.path}, line {event.start_mark.line + 1}: {why}")


Change = tuple[int, bool, int]  # when, whether free, the line


def by_device(path: Path, content: bytes) -> dict[str, list[Change]]:
    """Each device's changes, in ascending order."""
    changes: dict[str, list[Change]] = {}
    events = Events(path, content)
    try:
        events.next(yaml.StreamStartEvent)
        events.next(yaml.DocumentStartEvent)
        events.next(yaml.MappingStartEvent)
        while isinstance(key := events.next(yaml.ScalarEvent, yaml.MappingEndEvent, here=NAME), yaml.ScalarEvent):
            if key.value in changes:
                raise events.refuse(key, f"device {key.value} appears twice")
            changes[key.value] = list(changes_of(events))
        events.next(yaml.DocumentEndEvent)
        events.next(yaml.StreamEndEvent)
        if not changes:
            raise yaml.YAMLError("it names no device")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:160]
        raise BadData(
            f"{path} is in none of the formats of a trace: a table device,start,end, YAML "
            f"device: [[seconds, state], ...], FLASH records, or a FedScale pickle (as YAML: {reason})"
        ) from None
    return changes


def changes_of(events: Events) -> Iterator[Change]:
    """One device's, [[seconds, state], ...]."""
    events.next(yaml.SequenceStartEvent, here="the device's changes, [[seconds, state], ...]")
    before = -1
    while isinstance(
        change := events.next(yaml.SequenceStartEvent, yaml.SequenceEndEvent, here=CHANGE), yaml.SequenceStartEvent
    ):
        text, state = (events.next(yaml.ScalarEvent, here=CHANGE).value for _ in range(2))
        events.next(yaml.SequenceEndEvent, here=CHANGE)
        if not (text.replace(".", "", 1).isdecimal() and text.isascii()) or float(text) * 1000 > LONGEST:
            raise events.refuse(change, f"{text[:80]!r} is not a number of seconds")
        if state.lower() not in FREE | BUSY:
            raise events.refuse(change, f"state {state[:80]!r} is not known: use free or busy")
        now = round(float(text) * 1000)
        if now <= before:
            raise events.refuse(change, f"{text[:80]} s is not after the change before it")
        yield now, state.lower() in FREE, change.start_mark.line + 1
        before = now
