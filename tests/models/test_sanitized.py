"""The C sources, built with AddressSanitizer and UndefinedBehaviorSanitizer, on networks that hypothesis draws."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedcluster.models.kernels import build

SANITIZERS = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
EXAMPLES = 60


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The library and the runtime that must be loaded before it."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("there is no C compiler")
    path = tmp_path_factory.mktemp("sanitized") / build.NAME
    command = [compiler, *build.FLAGS, *SANITIZERS, *map(str, build.SOURCES.glob("*.c")), "-o", str(path), "-lm"]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode:
        pytest.skip(f"{compiler} has no sanitizers: {built.stderr[-200:]}")
    found = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"{compiler} has no libasan.so to load before Python's own memory allocator")
    return path, Path(found)


def run(sanitized: tuple[Path, Path], *words: str) -> subprocess.CompletedProcess[str]:
    library, runtime = sanitized
    child = Path(__file__).with_name("sanitized_engine.py")
    return subprocess.run(
        [sys.executable, str(child), str(library), *words],
        env=os.environ | {"LD_PRELOAD": str(runtime), "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def test_no_access_outside_and_no_undefined_behaviour(sanitized: tuple[Path, Path]) -> None:
    done = run(sanitized, str(EXAMPLES))
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"{EXAMPLES} networks" in done.stdout


def test_a_write_between_two_arrays_is_noticed(sanitized: tuple[Path, Path]) -> None:
    done = run(sanitized, "fault")
    assert done.returncode != 0
    assert "AddressSanitizer: use-after-poison" in done.stderr
