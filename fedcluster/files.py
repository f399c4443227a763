"""Atomic writes: a file is written under a temporary name, synced, then renamed."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def write_atomically(path: Path, content: bytes | str | Callable[[IO[bytes]], object]) -> None:
    """A reader of `path` finds the old content or the new one, at any moment and after any crash."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with named(path):
            with temporary.open("wb") as file:
                if callable(content):
                    content(file)
                else:
                    file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Add the file's name to errors without one: on a full disk, write() and fsync() give none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


def sync_folder(folder: Path) -> None:
    """Make a rename durable: on POSIX the folder has a buffer of its own."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def cache_folder() -> Path:
    """$FEDCLUSTER_CACHE, or fedcluster's part of the user's cache folder; OSError where there is neither."""
    if own := os.environ.get("FEDCLUSTER_CACHE"):
        return Path(own)
    try:
        users = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # neither HOME nor an entry in the list of users
        raise FileNotFoundError(errno.ENOENT, "this user has no home, and FEDCLUSTER_CACHE is not set") from None
    return Path(users, "fedcluster")
