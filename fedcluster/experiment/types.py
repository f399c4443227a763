"""Constrained types that the sections, and the options of parts, use for their keys."""

from typing import Annotated

from pydantic import AfterValidator, Field

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


def is_path(text: str) -> str:
    """A text that the operating system can take for a path; whether there is a file is another question."""
    if not text or "\0" in text or not is_text(text):
        raise ValueError(f"= {text[:80]!r} is not allowed: write a path")
    return text


def is_text(text: str) -> bool:
    """Whether it is UTF-8: what is not comes from the command line as half characters."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


FilePath = Annotated[str, Field(max_length=4096), AfterValidator(is_path)]
