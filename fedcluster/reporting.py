"""What computations report while they run: sentences, and how far they are. `runs/progress.py` shows both."""

from collections.abc import Callable, Iterable, Sequence

Say = Callable[[str], None]
"""Takes a sentence for the user."""

Track = Callable[[Sequence[int], str, str], Iterable[int]]
"""track(items, what, unit) yields the items one by one and shows how many are done."""


def silent(text: str) -> None:
    """A `Say` that shows nothing."""


def untracked(items: Sequence[int], what: str, unit: str) -> Iterable[int]:
    """A `Track` that shows nothing."""
    return items
