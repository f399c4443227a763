"""Compiles the C sources into a shared library. It imports the standard library only, for build hooks to load it."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
FLAGS = (
    "-O3",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-Wno-psabi",
    "-shared",
    "-fPIC",
)  # psabi: no vector is passed
NATIVE = ("-march=native",)
NAME = "engine.so"
TIMEOUT = 120  # seconds

# runs in a child process: a library made for another processor ends the process that calls it
TRIAL = """
import ctypes, sys
library, count = ctypes.CDLL(sys.argv[1]), ctypes.c_int64(1000)
numbers, sums = (ctypes.c_float * 1000)(), (ctypes.c_double * 1000)()
library.add_rounded(sums, numbers, count, ctypes.c_double(0.5), ctypes.c_double(6144.0))
sys.exit(0 if library.all_finite(numbers, count) else 1)
"""


class BuildFailed(Exception):
    """There is no library; the message says why."""


def build(out_dir: Path, flags: Sequence[str] = NATIVE, name: str = NAME, trial: bool = True) -> Path:
    """Compile the library into `out_dir`, try it, and return its path. Nothing else is written.

    The default flags make the fastest code for this processor, or portable code if the compiler does not know them. For
    a library that is to run on other machines, pass flags that all of them have, or none; without `trial` this machine
    need not be one of them.
    """
    compiler, path = find_compiler(), out_dir / name
    command = [compiler, *FLAGS, *map(str, sorted(SOURCES.glob("*.c"))), "-o", str(path), "-lm"]
    if not succeeds([*command, *flags]) and (flags != NATIVE or not succeeds(command)):
        raise BuildFailed(f"{compiler} does not compile {SOURCES}")
    if trial and sys.executable and not succeeds([sys.executable, "-I", "-S", "-c", TRIAL, str(path)]):
        raise BuildFailed(f"the library that {compiler} makes of {SOURCES} does not run")
    return path


def find_compiler() -> str:
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        raise BuildFailed("there is no C compiler (cc, gcc or clang)")
    return compiler


def succeeds(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=TIMEOUT).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
