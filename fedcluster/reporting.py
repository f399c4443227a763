"""What computations report while they run: sentences, and how far they are. `runs/progress.py` shows both."""

import os
import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import IO

Say = Callable[[str], None]
"""Takes a sentence for the user."""

Track = Callable[[Sequence[int], str, str], Iterable[int]]
"""track(items, what, unit) yields the items one by one and shows how many are done."""


def silent(text: str) -> None:
    """A `Say` that shows nothing."""


def untracked(items: Sequence[int], what: str, unit: str) -> Iterable[int]:
    """A `Track` that shows nothing."""
    return items


def line_width(stream: IO[str]) -> int | None:
    """The number of characters in a line of the terminal that the stream writes to, or $COLUMNS; None for a file or a
    pipe, where a line may have any length."""
    return shutil.get_terminal_size().columns if stream.isatty() or "COLUMNS" in os.environ else None


def wrapped(text: str, stream: IO[str]) -> str:
    """The text with its lines broken between words where the terminal is narrower. Paths are never broken."""
    width = line_width(stream)
    if width is None:
        return text
    lines = (textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) for line in text.split("\n"))
    return "\n".join("\n".join(parts) for parts in lines)
