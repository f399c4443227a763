"""The compiled library in the cache folder, built once per machine.

A library that is damaged or was made for another processor ends the process that loads it. So it is built beside its
place, tried in a child process, synced and renamed, and only then its digest is written next to it. A library without
its digest, or with another one, is built again.
"""

import os
import platform
import tempfile
from hashlib import sha256
from pathlib import Path

from filelock import FileLock

from fedcluster.files import sync_folder, write_atomically
from fedcluster.models.kernels import build

PATIENCE = 300  # seconds to wait for another process that is building


def cached_library(cache: Path) -> Path:
    """The library for these sources, this compiler and this processor. Raises build.BuildFailed."""
    sources = [path.read_text() for path in sorted(build.SOURCES.glob("*.[ch]"))]
    identity = [sources, build.find_compiler(), *build.FLAGS, *build.NATIVE, platform.platform(), processor()]
    folder = cache / "compiled"
    path = folder / f"engine-{sha256(repr(identity).encode()).hexdigest()[:20]}.so"
    try:
        if not intact(path):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with FileLock(cache / "compiled.lock", timeout=PATIENCE):
                if not intact(path):
                    install(path)
        if not written_by_us(path):
            raise build.BuildFailed(f"other users could have written {path}: remove it")
    except OSError as error:
        raise build.BuildFailed(f"{error.filename or folder}: {error.strerror or error}") from None
    return path


def install(path: Path) -> None:
    """Build the library and move it to its place."""
    with tempfile.TemporaryDirectory(prefix=".", dir=path.parent) as folder:
        built = build.build(Path(folder))
        built.chmod(0o700)
        with built.open("rb") as file:
            os.fsync(file.fileno())
        digest = sha256(built.read_bytes()).hexdigest()
        digest_file(path).unlink(missing_ok=True)
        os.replace(built, path)
    sync_folder(path.parent)
    write_atomically(digest_file(path), digest)


def digest_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def intact(path: Path) -> bool:
    try:
        return digest_file(path).read_text() == sha256(path.read_bytes()).hexdigest()
    except (OSError, UnicodeDecodeError):
        return False


def processor() -> str:
    """What distinguishes machines that may share a cache: code for this processor runs only on one like it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor()


def written_by_us(path: Path) -> bool:
    """Whether no other user can have written the library, which runs with our rights."""
    status = path.stat()
    return not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not status.st_mode & 0o022)
