"""The distributions, and what is said where an extra is missing."""

import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import fedcluster
from tests.conftest import Here

ROOT = Path(fedcluster.__file__).parents[1]
COMPILES = sys.platform == "linux" and platform.machine() == "x86_64" and bool(shutil.which("cc"))


def build(out: Path, target: str, **environment: str) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = out.iterdir()
    return built


def metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as file:
        return file.read(f"fedcluster-{fedcluster.__version__}.dist-info/METADATA").decode()


def test_a_wheel_has_the_kernels_and_a_readme_without_dead_links(tmp_path: Path) -> None:
    wheel = build(tmp_path, "wheel", FEDCLUSTER_REPOSITORY="none")
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    kernels = {name for name in names if name.endswith(".so")}
    generations = ("x86-64-v3", "x86-64-v4")
    folder = "fedcluster/models/kernels/prebuilt"
    assert kernels == ({f"{folder}/engine-{name}.so" for name in generations} if COMPILES else set())
    assert ("linux_x86_64" if COMPILES else "none-any") in wheel.name
    assert {"fedcluster/models/kernels/csrc/engine.c", "fedcluster/cli/demo.toml", "fedcluster/py.typed"} <= names
    assert "fedcluster/data/digits.npz" in names
    text = metadata(wheel)
    assert "](docs/" not in text
    assert "![" not in text
    assert "Project-URL: Paper" in text
    assert "Project-URL: Homepage" not in text


def test_a_wheel_of_a_known_repository_links_to_it(tmp_path: Path) -> None:
    address = "https://user:secret@github.com/owner/name.git"
    wheel = build(tmp_path, "wheel", FEDCLUSTER_REPOSITORY=address, FEDCLUSTER_PURE="1")
    assert "none-any" in wheel.name
    text = metadata(wheel)
    version = f"v{fedcluster.__version__}"
    assert f"](https://github.com/owner/name/raw/{version}/docs/images/demo.png)" in text
    assert f"](https://github.com/owner/name/blob/{version}/CONTRIBUTING.md)" in text
    assert f"](https://github.com/owner/name/tree/{version}/examples)" in text
    assert "Project-URL: Issues, https://github.com/owner/name/issues" in text
    assert "secret" not in text


def test_the_source_distribution_can_build_wheels(tmp_path: Path) -> None:
    with tarfile.open(build(tmp_path, "sdist")) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    needed = {"hatch_build.py", "fedcluster/models/kernels/csrc/engine.c", "README.md", "LICENSE", "CHANGELOG.md"}
    assert needed | {"tests/golden.json", "constraints.txt", "CITATION.cff"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


@pytest.mark.parametrize(
    ("library", "words", "extra"),
    [
        ("flwr", ("serve", "experiment.toml", "--insecure"), "flower"),
        ("flwr", ("join", "--server", "127.0.0.1:1", "--data", "x", "--device", "0", "--insecure"), "flower"),
        ("flwr", ("certificates", "new"), "flower"),
        ("transformers", ("run", "experiment.toml", "-o", "model.name=transformers:x"), "text"),
        ("tokenizers", ("run", "experiment.toml", "-o", "data.name=t.csv", "-o", "data.tokenizer=tok.json"), "text"),
        ("tensorboard", ("run", "experiment.toml", "--out", "out", "-o", 'track.to=["tensorboard"]'), "track"),
        ("mlflow", ("run", "experiment.toml", "--out", "out", "-o", 'track.to=["mlflow"]'), "track"),
        ("wandb", ("run", "experiment.toml", "--out", "out", "-o", 'track.to=["wandb"]'), "track"),
    ],
)
def test_a_missing_extra_is_named_in_a_sentence(
    library: str,
    words: tuple[str, ...],
    extra: str,
    here: Here,
    write_experiment: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_experiment()
    (tmp_path / "tok.json").write_text("{}")
    (tmp_path / "t.csv").write_text("text,label\n" + "a b c,0\nd e f,1\n" * 20)
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)  # importing it fails
    code, _, err = here(*words)
    assert code == 2, err
    assert f"fedcluster[{extra}]" in err
    assert "Traceback" not in err
