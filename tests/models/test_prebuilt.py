"""The libraries of a wheel: chosen by the processor, the same bits as one that is built here, and never in the way."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedcluster.models.kernels import build, library, prebuilt
from fedcluster.models.kernels.prebuilt import GENERATIONS, file_name, prebuilt_library
from tests.models.test_build import weights
from tests.models.test_network import needs_compiler

ABLE = [name for name, needed in GENERATIONS.items() if needed <= prebuilt.features()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a wheel's libraries, for as if in a new process."""
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    library.load.cache_clear()
    yield tmp_path
    library.load.cache_clear()


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        (GENERATIONS["x86-64-v4"], "engine-x86-64-v4.so"),
        (GENERATIONS["x86-64-v4"] - {"avx512vl"}, "engine-x86-64-v3.so"),
        (GENERATIONS["x86-64-v3"] - {"fma"}, None),
        (frozenset(), None),
    ],
)
def test_the_best_library_that_the_processor_can_run(
    flags: frozenset[str], chosen: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prebuilt, "features", lambda: flags)
    assert prebuilt_library() is None  # a pure wheel
    for name in GENERATIONS:
        (folder / file_name(name)).touch()
    found = prebuilt_library()
    assert (found.name if found else None) == chosen


@needs_compiler
@pytest.mark.skipif(not ABLE, reason="this processor has no AVX2")
def test_every_generation_computes_the_bits_of_a_library_built_here(folder: Path) -> None:
    here = weights()
    for name in ABLE:
        path = build.build(folder, [f"-march={name}"], file_name(name))
        library.load.cache_clear()
        assert library.load()._name == str(prebuilt_library())
        assert torch.equal(weights(), here)
        path.unlink()


@needs_compiler
@pytest.mark.skipif(not ABLE, reason="this processor has no AVX2")
def test_a_library_that_does_not_load_gives_way_to_one_built_here(folder: Path) -> None:
    (folder / file_name(ABLE[0])).write_bytes(b"no library")
    loaded = library.load()
    assert loaded is not None
    assert not loaded._name.startswith(str(folder))
