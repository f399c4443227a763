"""Completion in the shell: keys and values of an experiment, methods, data sets. It answers at once: the names of parts
are read from the source of their registries, because importing them imports torch."""

import ast
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path

from fedcluster.analysis.names import METHODS


def override(incomplete: str) -> list[str]:
    """KEY=VALUE: the keys of the sections, then the values that a key may have. Where one key is left, its values come
    with it, so that a shell does not put a space behind the =."""
    key, equals, _ = incomplete.partition("=")
    if equals:
        return [text for text in (f"{key}={value}" for value in values(key)) if text.startswith(incomplete)]
    names = [name for name in keys() if name.startswith(incomplete)]
    if len(names) == 1:
        return [f"{names[0]}=", *(f"{names[0]}={value}" for value in values(names[0]) or default(names[0]))]
    return [f"{name}=" for name in names]


def answer_bash(app: Callable[..., object]) -> None:
    """Answer bash, which splits words at = and completes only what follows it."""
    begin = join_words()
    with redirect_stdout(io.StringIO()) as out, suppress(SystemExit):
        app(prog_name="fedcluster")
    print("\n".join(line.removeprefix(begin) for line in out.getvalue().splitlines()))


def join_words() -> str:
    """Put the words of COMP_WORDS together that bash has split at =, and return what is before the last part."""
    words, last = os.environ.get("COMP_WORDS", "").split("\n"), int(os.environ.get("COMP_CWORD", "0"))
    if last < 2 or last >= len(words) or "=" not in (words[last], words[last - 1]):
        return ""
    first = last - 1 if words[last] == "=" else last - 2
    os.environ["COMP_WORDS"] = "\n".join([*words[:first], "".join(words[first : last + 1])])
    os.environ["COMP_CWORD"] = str(first)
    return f"{words[first]}="


def default(key: str) -> Sequence[str]:
    """The default of a key, where it is a number or a text."""
    from fedcluster.experiment import SECTIONS, Experiment

    section, _, name = key.rpartition(".")
    field = (SECTIONS[section] if section else Experiment).model_fields[name]
    return [str(field.default)] if isinstance(field.default, int | float | str) else []


def methods(incomplete: str) -> list[str]:
    """Names separated by commas, each once."""
    *before, _ = incomplete.split(",")
    found = [",".join([*before, name]) for name in METHODS if name not in before]
    return [text for text in found if text.startswith(incomplete)]


def data(incomplete: str) -> list[str]:
    """Known data sets, folders of $FEDCLUSTER_DATA, and files and folders here."""
    names = [*data_sets(), *paths(incomplete)]
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


def data_sets() -> list[str]:
    from fedcluster.experiment.sections import DATASETS

    root = Path(os.environ.get("FEDCLUSTER_DATA") or "/nowhere")
    return list(dict.fromkeys([*DATASETS, *(path.name for path in sorted(root.glob("*")) if path.is_dir())]))


def paths(incomplete: str) -> Iterator[str]:
    folder, _, name = incomplete.rpartition("/")
    begin = f"{folder}/" if "/" in incomplete else ""
    for path in sorted(Path(begin or ".").glob(f"{name}*")):
        yield f"{begin}{path.name}{'/' if path.is_dir() else ''}"


def keys() -> Iterator[str]:
    """Every key of an experiment."""
    from fedcluster.experiment import SECTIONS, Experiment

    for name in Experiment.model_fields:
        section = SECTIONS.get(name)
        yield from (f"{name}.{key}" for key in section.model_fields) if section else (name,)


def values(key: str) -> Sequence[str]:
    """What a key may be, where that is one of a few names."""
    from typing import Literal, get_args, get_origin

    from fedcluster.experiment import SECTIONS, Part

    if key == "data.name":
        return data_sets()
    section, _, name = key.partition(".")
    known = SECTIONS.get(section)
    if known and issubclass(known, Part) and name == known.key:
        return registered(known.registry)
    if key == "model.name":
        return registered("fedcluster.models.zoo:ZOO")
    field = known.model_fields.get(name) if known else None
    if field is None:
        return ()
    kinds = [field.annotation, *get_args(field.annotation)]
    if bool in kinds:
        return ("true", "false")
    return [str(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]


def registered(registry: str) -> list[str]:
    """The names in a registry `module:table`, which is a dict with names as keys, from the module's source."""
    module, _, table = registry.partition(":")
    source = Path(__file__).parents[1].joinpath(*module.split(".")[1:]).with_suffix(".py").read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == table and isinstance(node.value, ast.Dict):
            return [str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)]
    return []
