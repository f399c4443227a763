"""Files that the user names: the name may be anything, and only files of a bearable size are read."""

import os
import stat
from pathlib import Path

from fedcluster.errors import BadData

MOST_BYTES = 4 * 2**30  # of a fleet file, a trace, a table of data
MOST_TEXT = 16 * 2**20  # of an experiment


def located(text: str, key: str) -> Path:
    """The path that the text names, with `~` expanded. `key` is the option that holds the text."""
    if "\0" in text or not text:
        raise BadData(f"{key} = {text!r} is not a path")
    try:
        text.encode()
        return Path(text).expanduser()
    except (RuntimeError, UnicodeEncodeError):
        raise BadData(f"{key} = {text!r} is not a path: there is no such home folder, or it is not UTF-8") from None


def check_file(path: Path, key: str, max_bytes: int = MOST_BYTES) -> int:
    """The size of a regular file that is no larger than `max_bytes` and than half of the memory."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise unreadable(path, key, error) from None
    if not stat.S_ISREG(status.st_mode):  # a device may have no end, and opening a pipe may block forever
        raise BadData(f"{key}: {path} is not a regular file")
    check_size(path, status.st_size, max_bytes)
    return status.st_size


def read_bytes(path: Path, key: str, max_bytes: int = MOST_BYTES) -> bytes:
    """The content of a file that passes `check_file`."""
    size = check_file(path, key, max_bytes)
    try:
        with path.open("rb") as file:
            return file.read(size)
    except (OSError, ValueError) as error:
        raise unreadable(path, key, error) from None


def unreadable(path: Path, key: str, error: Exception) -> BadData:
    return BadData(f"{key}: cannot read {path} ({getattr(error, 'strerror', None) or error})")


def check_size(path: Path | str, size: int, max_bytes: float = float("inf")) -> None:
    """Refuse what does not fit, before anything is allocated."""
    limit = min(max_bytes, total_memory() / 2)
    if size > limit:
        raise BadData(f"{path} stands for {size / 2**30:,.1f} GiB: at most {limit / 2**30:,.1f} GiB can be read here")


def total_memory() -> int:
    """The machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
