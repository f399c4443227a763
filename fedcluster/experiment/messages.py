"""Error messages for invalid keys: the first problem, by the key's path, with what is allowed."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError


def format_error(error: ValidationError, sections: Mapping[str, type[BaseModel]], keys: Iterable[str]) -> str:
    """The first problem of an experiment that has these sections and these keys of its own."""
    problems = error.errors()
    first = problems[0]
    if not first["loc"]:
        return str(first["ctx"]["error"])
    section = sections.get(str(first["loc"][0]))
    if section is None:
        return describe(problems, keys)
    inside = [problem | {"loc": problem["loc"][1:]} for problem in problems if problem["loc"][0] == first["loc"][0]]
    others = len({problem["loc"][:2] for problem in problems}) - 1
    if not inside[0]["loc"]:  # of the section as a whole
        if inside[0]["type"] == "value_error":
            return f"{first['loc'][0]} {inside[0]['ctx']['error']}{more(others)}".replace(" .", ".", 1)
        return f"{first['loc'][0]} = {format_value(first['input'])} is not allowed: {first['msg']}{more(others)}"
    return f"{first['loc'][0]}.{describe(inside, section.model_fields, others)}"


def describe(problems: Sequence[Any], known: Iterable[str], others: int | None = None) -> str:
    """The first problem with a section that has these keys."""
    first = problems[0]
    key = str(first["loc"][0])[:100] if first["loc"] else ""
    if others is None:
        others = len({problem["loc"][:1] for problem in problems}) - 1
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, known, n=1)
        meant = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(known) or 'none'}"
        return f"{key} is not a key; {meant}{more(others)}"
    if first["type"] == "value_error":
        return f"{key} {first['ctx']['error']}{more(others)}".replace(" .", ".", 1)
    own = [problem for problem in problems if problem["loc"][:1] == first["loc"][:1]]
    fitting = [problem for problem in own if not problem["type"].endswith("_type")]  # what a value of its type may be
    messages = dict.fromkeys(problem["msg"] for problem in fitting or own)
    return f"{key} = {format_value(first['input'])} is not allowed: {'; or '.join(messages)}{more(others)}"


def more(others: int) -> str:
    return f" (and {others} more)" if others else ""


def format_value(value: Any) -> str:
    """The repr of a value on one line, cut to 100 characters."""
    try:
        text = " ".join(repr(value).split("\n"))
    except (RecursionError, ValueError):  # too deep, or a number of thousands of digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:97]}..."
