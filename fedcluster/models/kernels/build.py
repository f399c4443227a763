"""Builds the compiled part once, with the machine's own C compiler, and keeps it in the cache.

A library that is damaged, or was made for another processor, ends the process that loads it without a word. So a new
one is synced before it gets its name and is first loaded by a child process; only then is its digest written beside it.
What has no digest, or another one, is built again.
"""

import os
import platform
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

from filelock import FileLock

from fedcluster.files import sync_folder, write_atomically

FLAGS = ["-O3", "-fno-math-errno", "-shared", "-fPIC"]
PATIENCE = 300  # seconds, for another process that is building

TRIAL = """
import ctypes, sys
library, count = ctypes.CDLL(sys.argv[1]), ctypes.c_int64(1000)
numbers, sums = (ctypes.c_float * 1000)(), (ctypes.c_double * 1000)()
library.accumulate(sums, numbers, count, ctypes.c_double(0.5), ctypes.c_double(6144.0))
sys.exit(0 if library.all_finite(numbers, count) else 1)
"""


class Unavailable(Exception):
    """There is no library, and this is why."""


def library_file(source: Path, cache: Path) -> Path:
    """The library for this source, compiler and processor, whole and tried."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        raise Unavailable("there is no C compiler (cc, gcc or clang)")
    sources = [path.read_text() for path in sorted(source.parent.glob("*.[ch]"))]
    identity = [sources, compiler, *FLAGS, platform.platform(), processor()]
    folder = cache / "compiled"
    path = folder / f"chain-{sha256(repr(identity).encode()).hexdigest()[:20]}.so"
    try:
        if not whole(path):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with FileLock(cache / "compiled.lock", timeout=PATIENCE):
                if not whole(path):
                    build(compiler, source, path)
        if not ours(path):
            raise Unavailable(f"others could have written {path}: remove it")
    except OSError as error:
        raise Unavailable(f"{error.filename or folder}: {error.strerror or error}") from None
    return path


def digest_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def whole(path: Path) -> bool:
    try:
        return digest_file(path).read_text() == sha256(path.read_bytes()).hexdigest()
    except (OSError, UnicodeDecodeError):
        return False


def build(compiler: str, source: Path, path: Path) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    command = [compiler, *FLAGS, str(source), "-o", str(beside), "-lm"]
    try:
        if not (succeeds([*command, "-march=native"]) or succeeds(command)):
            raise Unavailable(f"{compiler} does not compile {source}")
        beside.chmod(0o700)
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        if sys.executable and not succeeds([sys.executable, "-I", "-S", "-c", TRIAL, str(beside)]):
            raise Unavailable(f"what {compiler} makes of {source} does not run")
        digest = sha256(beside.read_bytes()).hexdigest()
        digest_file(path).unlink(missing_ok=True)
        os.replace(beside, path)
        sync_folder(path.parent)
        write_atomically(digest_file(path), digest)
    finally:
        beside.unlink(missing_ok=True)


def succeeds(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=120).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def processor() -> str:
    """What distinguishes machines that may share a cache: `-march=native` code runs only on its like."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor()


def ours(path: Path) -> bool:
    """What is loaded runs as we do: only what we alone can have written."""
    status = path.stat()
    return not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not status.st_mode & 0o022)
