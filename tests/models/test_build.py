"""Building the compiled library, keeping it in the cache, checking it, and running without it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fedcluster
from fedcluster.models.kernels import build, library
from fedcluster.models.kernels.cache import cached_library, digest_file
from fedcluster.runs.progress import Display
from tests.models.test_network import needs_compiler

EXPERIMENT = fedcluster.Experiment(
    rounds=2,
    fleet={"devices": 20, "samples": 30},
    clusters={"count": 2, "participation": 0.5},
    model={"name": "mlp"},
    local={"steps": 5, "batch": 8, "lr": 0.1},
)


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """As in a new process with an empty cache. Without optimisation, building takes a second."""
    monkeypatch.setattr(build, "FLAGS", ("-O0", *build.FLAGS[1:]))
    monkeypatch.setenv("FEDCLUSTER_CACHE", str(tmp_path / "cache"))
    library.load.cache_clear()
    yield tmp_path / "cache"
    library.load.cache_clear()


def weights(**how: object) -> Tensor:
    model = fedcluster.run(EXPERIMENT, display=Display(), **how).model  # type: ignore[arg-type]
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@needs_compiler
def test_without_a_compiler_torch_does_the_work(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = weights()
    monkeypatch.setenv("PATH", "/nowhere")
    library.load.cache_clear()
    assert library.load() is None
    slow = weights()
    assert not torch.equal(slow, fast), "it was the same code"
    torch.testing.assert_close(slow, fast, rtol=1e-5, atol=1e-6)


def test_a_compiler_that_fails_is_not_used(anew: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "bin" / "cc"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(broken.parent))
    assert library.load() is None
    assert not list(anew.glob("compiled/*"))


@needs_compiler
def test_a_wrong_result_is_not_used(anew: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for path in build.SOURCES.glob("*.[ch]"):
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert library.load() is not None
    for name, right, wrong in [
        ("engine.c", "-lr / batch", "-2 * lr / batch"),
        ("engine.c", "offsetof(network_spec, window)", "offsetof(network_spec, kernel)"),
        ("pool.c", "other > best", "other < best"),
        ("overlap_backward.c", "grad[o] != 0", "grad[o] > 0"),
        ("normalise.c", "1.5f", "1.4f"),
    ]:
        text = (tmp_path / name).read_text()
        assert right in text
        (tmp_path / name).write_text(text.replace(right, wrong))
        library.load.cache_clear()
        assert library.load() is None
        assert "the compiled code" in library.unavailable_reason()
        (tmp_path / name).write_text(text)


@needs_compiler
def test_a_library_that_other_users_could_have_written_is_not_loaded(anew: Path) -> None:
    assert library.load() is not None
    (file,) = anew.glob("compiled/*.so")
    os.chmod(file, 0o777)
    library.load.cache_clear()
    assert library.load() is None


def damaged(content: bytes, how: str) -> bytes:
    if how == "torn":
        return content[:4096]
    if how == "empty":
        return b""
    altered = bytearray(content)
    for place in range(64, len(altered), 4096):
        altered[place] ^= 0x10
    return bytes(altered)


@needs_compiler
@pytest.mark.parametrize("how", ["torn", "empty", "flipped", "without its digest"])
def test_a_damaged_library_is_built_again(anew: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    path = cached_library(anew)
    good, inode = path.read_bytes(), path.stat().st_ino
    assert cached_library(anew).stat().st_ino == inode
    if how == "without its digest":
        digest_file(path).unlink()
    else:
        path.write_bytes(damaged(good, how))
    assert cached_library(anew).read_bytes() == good
    assert sorted(file.suffix for file in path.parent.iterdir()) == [".sha256", ".so"]


@needs_compiler
def test_a_damaged_library_changes_no_result(anew: Path, tmp_path: Path) -> None:
    """In a child process: loading a torn file ends with SIGBUS."""
    code = """
import sys
from pathlib import Path
import fedcluster
from fedcluster.models.kernels import build, library
from fedcluster.runs.progress import Display
build.FLAGS = ("-O0", *build.FLAGS[1:])
from tests.models.test_build import EXPERIMENT, damaged
for run in sys.argv[2:]:
    fedcluster.run(EXPERIMENT, run, display=Display())
    assert library.load() is not None
    (file,) = Path(sys.argv[1]).glob("compiled/*.so")
    content = file.read_bytes()
    file.unlink()  # what is loaded stays whole
    file.write_bytes(damaged(content, "torn"))
    library.load.cache_clear()
"""
    runs = [tmp_path / "good", tmp_path / "after"]
    command = [sys.executable, "-c", code, str(anew), *map(str, runs)]
    assert subprocess.run(command, cwd=Path(__file__).parents[2]).returncode == 0
    models = [(run / "model.safetensors").read_bytes() for run in runs]
    assert models[0] == models[1]


@needs_compiler
def test_a_library_that_does_not_run_is_not_used(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child process tries the library, and dies instead of us."""
    monkeypatch.setattr(build, "TRIAL", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    with pytest.raises(build.BuildFailed, match="does not run"):
        cached_library(anew)
    assert not list(anew.glob("compiled/*"))


def test_one_line_reports_that_torch_does_the_work(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(Display, "say", lambda self, text: said.append(text))
    monkeypatch.setenv("PATH", "/nowhere")
    weights()
    assert said == ["training with torch, which is slower for this model: there is no C compiler (cc, gcc or clang)"]


@needs_compiler
def test_resuming_with_other_arithmetic_is_reported(
    anew: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Listen(Display):
        said: list[str] = []  # noqa: RUF012

        def say(self, text: str) -> None:
            self.said.append(text)

    fedcluster.run(EXPERIMENT, tmp_path / "run", display=Display())
    (tmp_path / "run" / "model.safetensors").unlink()
    monkeypatch.setenv("PATH", "/nowhere")
    library.load.cache_clear()
    fedcluster.run(EXPERIMENT, tmp_path / "run", resume=True, display=Listen())
    assert any("started with compiled steps, continued with torch ones" in text for text in Listen.said)


@needs_compiler
def test_building_writes_nothing_but_the_library(anew: Path, tmp_path: Path) -> None:
    """As a build hook does: portable code, no cache, and no package but the standard library."""
    out = tmp_path / "out"
    out.mkdir()
    code = (
        "import runpy, sys; from pathlib import Path; "
        "print(runpy.run_path(sys.argv[1])['build'](Path(sys.argv[2]), flags=()))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, build.__file__, str(out)], capture_output=True, text=True
    )
    assert done.stdout.strip() == str(out / build.NAME), done.stderr
    assert list(out.iterdir()) == [out / build.NAME]
    assert not anew.exists()
    assert library.open_library(out / build.NAME).all_finite(None, 0)


@needs_compiler
def test_the_sources_compile_without_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-Wall", "-Wextra", "-Werror"))
    build.build(tmp_path)
