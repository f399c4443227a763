"""Constrained types that the sections, and the options of parts, use for their keys."""

from datetime import date, time
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from fedcluster.experiment.messages import format_value

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, le=1e30)]  # float32 goes to 3e38
NonNegative = Annotated[float, Field(ge=0, le=1e30)]
AtLeastOne = Annotated[float, Field(ge=1, le=1e9)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Devices = Annotated[int, Field(ge=1, le=10**7)]  # a fleet is a few columns of this length
Samples = Annotated[int, Field(ge=1, le=10**7)]  # of one device: they are drawn at once
Steps = Annotated[int, Field(ge=1, le=10**6)]
Columns = Annotated[tuple[str, ...], Field(strict=False, min_length=1, max_length=100_000)]
Scale = Annotated[tuple[Annotated[float, Field(ge=-1e30, le=1e30)], Positive], Field(strict=False)]


def ascends(steps: int | tuple[int, int]) -> int | tuple[int, int]:
    if isinstance(steps, tuple) and steps[0] > steps[1]:
        raise ValueError(f"= {list(steps)} is not allowed: a range is [least, most], such as [10, 30]")
    return steps


StepsOrRange = Annotated[Steps | Annotated[tuple[Steps, Steps], Field(strict=False)], AfterValidator(ascends)]


def is_day(text: str) -> str:
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise ValueError(f"= {format_value(text)} is not allowed: write a day as YYYY-MM-DD") from None


Day = Annotated[str, AfterValidator(is_day)]


def is_path(text: str) -> str:
    """A text that the operating system can take for a path; whether there is a file is another question."""
    if not text or "\0" in text or not is_text(text):
        raise ValueError(f"= {text[:80]!r} is not allowed: write a path")
    return text


def is_text(text: str) -> bool:
    """Whether it is UTF-8: what is not comes from the command line as half characters."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


FilePath = Annotated[str, Field(max_length=4096), AfterValidator(is_path)]


def is_data(name: Any) -> Any:
    """A name, a path, data themselves, or a dict of columns or of splits."""
    if isinstance(name, str):
        return is_path(name)
    columns = isinstance(name, dict) and name and not any(isinstance(v, str | int | float) for v in name.values())
    if not columns and (name is None or isinstance(name, int | float | list | tuple | dict | date | time)):
        raise ValueError(
            f"= {format_value(name)} is not allowed: use a name, a path, package.module:callable, a Dataset, or "
            "a mapping of arrays with x_train and y_train"
        )
    return name


DataName = Annotated[Any, AfterValidator(is_data)]
