"""Replacing keys of an experiment: overrides on the command line and in Python."""

from collections.abc import Iterable
from typing import Any

from fedcluster.errors import BadExperiment
from fedcluster.experiment.earlier_keys import current_key
from fedcluster.experiment.parts import Part
from fedcluster.experiment.sections import NAMING

PARTS = (("task",), ("algorithm",), ("aggregation",), ("local", "schedule"), ("server", "schedule"))
"""The sections that name a part of the program and have its options."""
EITHER = {"local.steps": "epochs", "local.epochs": "steps"}  # alternatives: a section has one of the two


def replace_keys(keys: dict[str, Any], given: Iterable[tuple[str, Any]]) -> None:
    """Replace keys by the values given for them. local.epochs takes the place of local.steps, and the reverse."""
    for dotted, _ in given:
        section = keys.get(dotted.partition(".")[0])
        if dotted in EITHER and isinstance(section, dict):
            section.pop(EITHER[dotted], None)
    for dotted, value in sorted(given, key=lambda pair: not names_part(pair[0])):  # a part before its options
        set_key(keys, dotted, value)


def set_key(keys: dict[str, Any], dotted: str, value: Any) -> None:
    dotted = current_key(dotted)
    *sections, key = dotted.split(".")
    if sections and sections[0] in NAMING and names_part(dotted) and isinstance(had := keys.get(sections[0]), dict):
        keys[sections[0]] = without_options(had, NAMING[sections[0]], value)
    if len(sections) > 1 and tuple(sections) not in PARTS:
        raise BadExperiment(f"{dotted[:80]} is not a key: write section.key=value")
    for section in sections:
        keys = keys.setdefault(section, {})
        if not isinstance(keys, dict):
            raise BadExperiment(f"{dotted}: {section} is a value, not a section")
    if key == "name" and tuple(sections) in PARTS and keys.get("name", value) != value:
        keys.clear()  # its options are those of another part
    keys[key] = value


def names_part(dotted: str) -> bool:
    """Whether the key names a part of the program, such as algorithm.name or fleet.partition."""
    section, _, key = current_key(dotted).rpartition(".")
    return (tuple(section.split(".")) in PARTS and key == "name") or (section in NAMING and key == NAMING[section].key)


def without_options(keys: dict[str, Any], section: type[Part], part: Any) -> dict[str, Any]:
    """The keys of the section that stay when this part takes the place of another: not the options of the other, nor
    the samples of devices if they were the default of the other."""
    if keys.get(section.key, section.default_part()) == part:
        return keys
    kept = {key: value for key, value in keys.items() if key in section.model_fields}
    return {key: value for key, value in kept.items() if (key, value) != ("samples", "all")}
