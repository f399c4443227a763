"""Experiment files: TOML in, with overrides and with paths resolved beside the file."""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError, create_model

from fedcluster.errors import BadData, BadExperiment
from fedcluster.experiment.earlier_keys import current_keys
from fedcluster.experiment.experiment import Experiment
from fedcluster.experiment.messages import format_error
from fedcluster.experiment.overrides import replace_keys
from fedcluster.experiment.parts import Section
from fedcluster.experiment.sections import DATASETS, SECTIONS, TOKENIZERS, WITH_DEVICES
from fedcluster.experiment.types import is_text
from fedcluster.inputs import MOST_TEXT, read_bytes


def load(path: str | Path, overrides: list[str] | None = None) -> Experiment:
    """Read an experiment file and apply `key=value` overrides, each value as TOML would have it."""
    path = Path(path)
    keys = current_keys(parse(read(path), str(path)))
    replace_keys(keys, read_overrides(overrides or []))
    for section, key in PATHS:
        resolve_path(keys.get(section), key, path.parent)
    check_plain_keys(keys)
    return Experiment(**keys)


PLAIN = ("seed", "rounds", "method", "data", "local", "server", "accept", "centralized", "clock", "eval", "stop")
"""The keys and sections that name no part of the program."""


def check_plain_keys(keys: dict[str, Any]) -> None:
    """Refuse unknown sections, and mistakes in the plain ones. `Experiment` would refuse them, too, but after the
    seconds that it takes to import the parts that the other sections name."""
    fields: dict[str, Any] = {
        name: (Experiment.model_fields[name].annotation, Experiment.model_fields[name]) for name in PLAIN
    }
    given = {name: value for name, value in keys.items() if name in PLAIN or name not in Experiment.model_fields}
    try:
        create_model("PlainKeys", __base__=Section, **fields)(**given)
    except ValidationError as error:
        raise BadExperiment(format_error(error, SECTIONS, Experiment.model_fields)) from None


def read_overrides(overrides: Iterable[str]) -> list[tuple[str, Any]]:
    """The keys and values of `key=value` texts."""
    given: list[tuple[str, Any]] = []
    for override in overrides:
        if not is_text(override):
            raise BadExperiment(f"-o {override[:80]!r}: is not UTF-8 text")
        key, equals, raw = override.partition("=")
        if not equals:
            raise BadExperiment(f"-o {override[:80]}: write it as key=value, for example -o clusters.count=5")
        given.append((key.strip(), literal(raw.strip())))
    return given


def read(path: Path) -> str:
    if not path.exists():
        raise BadData(f"{path}: there is no such experiment file")
    try:
        return read_bytes(path, "experiment", MOST_TEXT).decode()
    except UnicodeDecodeError as error:
        raise BadData(f"{path}: cannot be read as text ({error})") from None


def parse(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise BadExperiment(f"{source}: not valid TOML: nested too deep") from None
    except ValueError as error:  # also what Python says of a number with thousands of digits
        raise BadExperiment(f"{source}: not valid TOML: {error}") from None


def literal(raw: str) -> Any:
    """A TOML value, or a plain word taken as a string."""
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except RecursionError:
        raise BadExperiment(f"-o ...={raw[:40]}...: nested too deep") from None
    except ValueError:
        return raw
    return parsed["value"] if len(parsed) == 1 else raw


PATHS = (
    ("data", "name"),
    ("data", "tokenizer"),
    ("fleet", "path"),
    ("fleet", "availability"),
    ("clusters", "path"),
    ("model", "init"),
)


def resolve_path(section: Any, key: str, folder: Path) -> None:
    """A relative path is looked for beside the experiment file first, then in the working directory."""
    if isinstance(section, dict) and isinstance(section.get(key), str):
        for place in (folder, Path()):
            if section[key] not in (*DATASETS, *TOKENIZERS, WITH_DEVICES) and path_exists(place / section[key]):
                section[key] = str((place / section[key]).resolve())
                return


def path_exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, or no path at all
        return False
