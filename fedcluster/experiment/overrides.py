"""Replacing keys of an experiment: overrides on the command line and in Python."""

from collections.abc import Iterable
from typing import Any

from fedcluster.errors import BadExperiment
from fedcluster.experiment.earlier_keys import current_key
from fedcluster.experiment.sections import Fleet

PARTS = (("task",), ("algorithm",), ("aggregation",), ("local", "schedule"), ("server", "schedule"))
"""The sections that name a part of the program and have its options."""
EITHER = {"local.steps": "epochs", "local.epochs": "steps"}  # two ways to say one thing, of which a section has one


def replace_keys(keys: dict[str, Any], given: Iterable[tuple[str, Any]]) -> None:
    """Replace keys by the values given for them. local.epochs takes the place of local.steps, and the reverse."""
    for dotted, _ in given:
        section = keys.get(dotted.partition(".")[0])
        if dotted in EITHER and isinstance(section, dict):
            section.pop(EITHER[dotted], None)
    for dotted, value in given:
        set_key(keys, dotted, value)


def set_key(keys: dict[str, Any], dotted: str, value: Any) -> None:
    dotted = current_key(dotted)
    *sections, key = dotted.split(".")
    if sections == ["fleet"] and key == "partition" and isinstance(had := keys.get("fleet"), dict):
        keys["fleet"] = without_options(had, value)
    if len(sections) > 1 and tuple(sections) not in PARTS:
        raise BadExperiment(f"{dotted[:80]} is not a key: write section.key=value")
    for section in sections:
        keys = keys.setdefault(section, {})
        if not isinstance(keys, dict):
            raise BadExperiment(f"{dotted}: {section} is a value, not a section")
    if key == "name" and tuple(sections) in PARTS and keys.get("name", value) != value:
        keys.clear()  # its options are those of another part
    keys[key] = value


def without_options(fleet: dict[str, Any], partition: Any) -> dict[str, Any]:
    """The keys of [fleet] that stay when this partition takes the place of another: not the options of the other, nor
    the samples if they were the other's default."""
    if fleet.get("partition", "major_class") == partition:
        return fleet
    kept = {key: value for key, value in fleet.items() if key in Fleet.model_fields}
    return {key: value for key, value in kept.items() if (key, value) != ("samples", "all")}
