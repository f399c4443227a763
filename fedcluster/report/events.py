"""What went wrong in a run, cycle by cycle: updates that were refused, lost or late, and cycles that failed."""

from collections import Counter
from typing import Any

from fedcluster.runs.metrics import Line

TEXT = 200
DEVICES = 15  # that are named as the most frequent

GIVEN = {  # keys that list devices with a reason
    "reasons": "refused",
    "discarded": "discarded by the rule",
    "faults": "broke the protocol",
}
LOST = {  # keys of cycles.jsonl that list devices, and what happened to them
    "missing": "did not answer",
    "dropped": "dropped out",
    "late": "late",
}


def collect_events(rounds: list[Line], cycles: list[Line], names: Any, most: int) -> dict[str, Any]:
    """Totals by kind, by round, and by device, and the latest events one by one, at most so many."""
    events: list[list[Any]] = []
    kinds: Counter[str] = Counter()
    by_round: dict[int, Counter[str]] = {}
    by_device: Counter[str] = Counter()
    for line in cycles:
        for kind, device, why in of_cycle(line):
            named = "" if device is None else name_of(device, names)
            kinds[kind] += 1
            by_round.setdefault(line["round"], Counter())[kind] += 1
            by_device[named] += device is not None
            events.append([line["round"], line.get("cluster"), named, kind, str(why)[:TEXT]])
    by_device.pop("", None)
    order = sorted(by_round)
    return {
        "totals": dict(kinds),
        "rounds": order,
        "by_round": {kind: [by_round[j][kind] for j in order] for kind in kinds},
        "by_device": by_device.most_common(DEVICES),
        "listed": events[-most:] if most else [],
        "all": len(events),
        "cycles": len(cycles),
        "updates": rounds[-1].get("device_updates") if rounds else 0,
        "malicious": malicious(cycles),
    }


def malicious(cycles: list[Line]) -> dict[str, int]:
    """In a simulation with malicious devices: their updates, those that were refused or discarded, and the honest
    ones that were."""
    counts = Counter[str]()
    for line in cycles:
        listed = line.get("malicious")
        bad = {device for device in listed if isinstance(device, int)} if isinstance(listed, list) else set[int]()
        for kind, device, _ in of_cycle(line):
            if kind in (GIVEN["reasons"], GIVEN["discarded"]) and isinstance(device, int):
                counts["stopped" if device in bad else "honest"] += 1
        counts["sent"] += len(bad)
    return dict(counts) if counts["sent"] else {}


def of_cycle(line: Line) -> list[tuple[str, Any, str]]:
    """The kind of each event of a cycle, its device (None: the cycle itself), and the reason."""
    found: list[tuple[str, Any, str]] = []
    for key, kind in GIVEN.items():
        pairs = line.get(key)
        for pair in pairs if isinstance(pairs, list) else ():
            if isinstance(pair, list) and len(pair) == 2:
                found.append((kind, pair[0], pair[1]))
    for key, kind in LOST.items():
        devices = line.get(key)
        found += [(kind, device, "") for device in (devices if isinstance(devices, list) else ())]
    if line.get("undone"):
        found.append(("cycle undone", None, line["undone"]))
    if line.get("no_sum"):
        found.append(("cycle without a sum", None, line["no_sum"]))
    if line.get("too_few") or line.get("failed") is True:
        found.append(("cycle failed", None, f"{line['too_few']} updates" if line.get("too_few") else "too few updates"))
    return found


def name_of(device: Any, names: Any) -> str:
    """The name of device k, k itself where devices have no names."""
    known = isinstance(names, list) and isinstance(device, int) and 0 <= device < len(names)
    return str(names[device] if known else device)[:TEXT]
