"""Hooks of mkdocs: pages that are generated from the code, and links to files outside this folder.

reference/keys.md       every key of an experiment: its type and default from the pydantic models, its meaning from the
                        tables of experiment.md
reference/commands.md   every command, its arguments and options
reference/api.md        every public name
reference/changelog.md  CHANGELOG.md

A key, an option or a public name without a description is a warning, and with --strict an error.
"""

import json
import logging
import math
import os
import re
from itertools import product
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
import typer.main
from mkdocs.structure.files import File, Files
from pydantic.fields import FieldInfo

import fedcluster
from fedcluster.cli.main import app
from fedcluster.experiment import SECTIONS, Experiment, LearningRateSchedule, Part

log = logging.getLogger("mkdocs.hooks.fedcluster")
DOCS = Path(__file__).parent
ROOT = DOCS.parent
Meanings = dict[tuple[str, str], tuple[str, str]]  # (section, key) -> default, meaning
SCHEDULES = {"local.schedule": LearningRateSchedule, "server.schedule": LearningRateSchedule}


def on_files(files: Files, config: Any) -> Files:
    pages = {"keys": keys_page(), "commands": commands_page(), "api": api_page(), "changelog": changelog_page()}
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links that leave docs/ point into the repository, if its address is known, and else become plain text."""

    def replace(match: "re.Match[str]") -> str:
        text, target = match[1], match[2]
        path, _, anchor = target.partition("#")
        if "://" in path or not path:
            return match[0]
        full = Path(os.path.normpath(ROOT / "docs" / Path(page.file.src_uri).parent / path))
        if full.is_relative_to(DOCS) and (full.suffix == ".md" or full.is_file()):
            return match[0]
        if full.is_dir() and (full / "README.md").exists() and full.is_relative_to(DOCS):
            return f"[{text}]({path.rstrip('/')}/README.md{'#' + anchor if anchor else ''})"
        if not full.exists():
            log.warning("%s links to %s, which does not exist", page.file.src_uri, target)
        address = config.repo_url
        where = full.relative_to(ROOT).as_posix()
        return f"[{text}]({address.rstrip('/')}/blob/main/{where})" if address else f"{text} (`{where}`)"

    return re.sub(r"(?<!!)\[([^\]\[]+)\]\(([^)\s]+)\)", replace, markdown)


def changelog_page() -> str:
    """CHANGELOG.md, whose links start from the root of the repository."""
    text = re.sub(r"\]\((?!https?:|#)([^)]+)\)", r"](../../\1)", (ROOT / "CHANGELOG.md").read_text())
    return text.replace("](../../docs/", "](../")


# every key


def keys_page() -> str:
    meanings = described_keys()
    text = [
        "# Every key\n",
        "Types, limits and defaults come from the program, meanings from [The experiment file](../experiment.md). "
        "On the command line, write a key with its section: `-o local.lr=0.1`.\n",
        "## Top level\n",
        rows("", {key: one for key, one in Experiment.model_fields.items() if key not in SECTIONS}, meanings),
    ]
    for name, section in [*SECTIONS.items(), *SCHEDULES.items()]:
        text += [f"## `[{name}]`\n", " ".join((section.__doc__ or "").split()) + "\n"]
        text.append(rows(name, dict(section.model_fields), meanings))
        if issubclass(section, Part):
            text.append(options_of_parts(name, section))
    return "\n".join(text)


def rows(section: str, fields: dict[str, FieldInfo], meanings: Meanings) -> str:
    """The table of a section's keys. Both schedules share their description."""
    lines = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for key, field in fields.items():
        said, meaning = meanings.get((section, key), ("", "a section of its own" if key == "schedule" else ""))
        if not meaning:
            log.warning("experiment.md does not describe %s.%s", section, key)
        cells = f"`{key}`", kind(field.annotation, field.metadata), default(field) or said, meaning
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def options_of_parts(section: str, part: type[Part]) -> str:
    """The options that the parts of a registry declare."""
    lines = [f"| `{part.key}` | option | type | default |", "| --- | --- | --- | --- |"]
    for name, one in part.names().items():
        options = getattr(one, "Options", None) or getattr(getattr(one, "func", None), "Options", None)
        if options is None and hasattr(one, "options"):
            options = one.options
        for key, field in getattr(options, "model_fields", {}).items():
            lines.append(f"| `{name}` | `{key}` | {kind(field.annotation, field.metadata)} | {default(field)} |")
    return "\n".join(["Options of the parts that it can name:\n", *lines, ""]) if len(lines) > 2 else ""


def default(field: FieldInfo) -> str:
    """The default as TOML would have it; empty where there is none, or where it depends on other keys."""
    if field.is_required() or field.default is None or field.default_factory is not None:
        return ""
    return f"`{json.dumps(field.default)}`"


LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def kind(annotation: Any, metadata: Any = ()) -> str:
    """A type in words, with its limits."""
    limits = []
    for one in metadata:
        for part in (one, *getattr(one, "metadata", ())):  # a Field inside Annotated has its limits in `metadata`
            limits += [f"{words} {number(getattr(part, key))}" for key, words in LIMITS.items() if hasattr(part, key)]
    return plain(annotation) + (f", {', '.join(limits)}" if limits else "")


def number(value: float) -> str:
    """A number in words; large powers of 10 and 2 as such."""
    if value == int(value) and abs(value) >= 10**6:
        power = round(math.log10(value)), value.bit_length() - 1 if isinstance(value, int) else 0
        if value in (10 ** power[0], float(10 ** power[0])):
            return f"10^{power[0]}"
        if 2 ** power[1] == value:
            return f"2^{power[1]}"
    return f"{value:,}" if abs(value) < 10**7 and value == int(value) else f"{value:g}"


def plain(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind(arguments[0], arguments[1:])
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(plain(one) for one in arguments if one is not NoneType))
    if origin is Literal:
        return " or ".join(f'`"{one}"`' for one in arguments)
    if origin in (tuple, list):
        inner = [plain(one) for one in arguments if one is not Ellipsis]
        return f"a list of {inner[0]}s" if Ellipsis in arguments or origin is list else f"[{', '.join(inner)}]"
    if origin is dict:
        return "a table"
    names = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "name"}
    return names.get(annotation, "name" if not isinstance(annotation, type) else "section")


def described_keys() -> Meanings:
    """The defaults and meanings of the first table of experiment.md. Where a row has several keys, its default is not
    taken apart."""
    found: Meanings = {}
    sections = [""]
    for line in (DOCS / "experiment.md").read_text().splitlines():
        if line.startswith("## "):
            break
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) != 3 or cells[0] in ("key", "---"):
            continue
        if cells[0].startswith("**"):
            sections = re.findall(r"\[([\w.]+)\]", cells[0])
            continue
        meaning = re.sub(r"\]\((?!http)([^)]+)\)", lambda m: f"]({rebased(m[1])})", cells[2])
        keys = re.findall(r"`([\w.]+)`", cells[0])
        for section, key in product(sections, keys):
            found[section, key] = (cells[1] if len(keys) == 1 else "", meaning)
    return found


def rebased(target: str) -> str:
    """A link of experiment.md, as reference/keys.md needs it."""
    return f"../experiment.md{target}" if target.startswith("#") else f"../{target}"


# every command

BAR = r"\|"  # inside a cell


def commands_page() -> str:
    root = typer.main.get_command(app)
    assert isinstance(root, click.Group)
    text = ["# Commands\n", (root.help or "") + "\n", f"{root.epilog}\n"]
    for name, command in root.commands.items():
        context = click.Context(command, info_name=f"fedcluster {name}")
        text += [f"## `fedcluster {name}`\n", (command.help or "").replace("\n", " ") + "\n"]
        text += ["```\n" + command.get_usage(context).removeprefix("Usage: ") + "\n```\n"]
        lines = ["| option | default | meaning |", "| --- | --- | --- |"]
        for parameter in command.params:
            if not isinstance(parameter, click.Option) or parameter.hidden:
                continue
            if not parameter.help and parameter.name != "help":
                log.warning("fedcluster %s: the option --%s has no help", name, parameter.name)
            metavar = "" if parameter.is_flag else f" {parameter.make_metavar(context)}"
            names = ", ".join(f"`{one}{metavar}`" for one in parameter.opts)
            shown = parameter.default if parameter.show_default and not parameter.is_flag else None
            shown = getattr(shown, "value", shown)
            cell = "" if shown is None or callable(shown) else f"`{shown}`"
            cells = names, cell, parameter.help or ""
            lines.append(f"| {' | '.join(one.replace('|', BAR) for one in cells)} |")
        text += ["\n".join(lines) + "\n"] if len(lines) > 2 else []
    return "\n".join(text)


# every public name


def api_page() -> str:
    text = ["# Python\n", "Everything that `import fedcluster` offers. Other modules may change without notice.\n"]
    for name in fedcluster.__all__:
        if not (getattr(fedcluster, name).__doc__ or "").strip():
            log.warning("fedcluster.%s has no docstring", name)
        options = f"    options:\n      heading: fedcluster.{name}\n      heading_level: 2\n"
        text.append(f"::: fedcluster.{fedcluster.HOME[name]}.{name}\n{options}")
    return "\n".join(text)
