"""Files that somebody else wrote: found by a name that may be anything, and read only up to a bearable size."""

import os
import stat
from pathlib import Path

from fedcluster.errors import BadData

MOST_BYTES = 4 * 2**30  # of a fleet file, a trace, a table of data
MOST_TEXT = 16 * 2**20  # of an experiment


def located(text: str, key: str) -> Path:
    """The path that a text stands for, `~` expanded; `key` asked for it."""
    if "\0" in text or not text:
        raise BadData(f"{key} = {text!r} is not a path")
    try:
        text.encode()
        return Path(text).expanduser()
    except (RuntimeError, UnicodeEncodeError):
        raise BadData(f"{key} = {text!r} is not a path: there is no such home folder, or it is not UTF-8") from None


def read_bytes(path: Path, key: str, most: int = MOST_BYTES) -> bytes:
    """The content of a regular file that is no larger than `most` and than half of the memory."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a device may have no end, and opening a pipe may wait for ever
            raise BadData(f"{key}: {path} is not a regular file")
        check_size(path, status.st_size, most)
        with path.open("rb") as file:
            return file.read(status.st_size)
    except (OSError, ValueError) as error:
        raise BadData(f"{key}: cannot read {path} ({getattr(error, 'strerror', None) or error})") from None


def check_size(path: Path | str, size: int, most: float = float("inf")) -> None:
    """Refuse what would not fit, before anything is allocated."""
    limit = min(most, memory() / 2)
    if size > limit:
        raise BadData(f"{path} stands for {size / 2**30:,.1f} GiB: at most {limit / 2**30:,.1f} GiB can be read here")


def memory() -> int:
    """The machine's, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
