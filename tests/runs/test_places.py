"""Where there is no home, no cache and no room: a sentence that names what to set or what is full."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import fedcluster
from fedcluster import files
from fedcluster.data import sources
from fedcluster.errors import BadRun
from fedcluster.files import cache_folder
from fedcluster.runs.progress import Display
from tests.cli.test_cli import Write
from tests.conftest import blobs
from tests.runs.test_resume import essence

HOMELESS = """
import pwd, sys
def getpwuid(user):
    raise KeyError(user)
pwd.getpwuid = getpwuid
from fedcluster.cli import main
main()
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.csv"
    rows = zip(blobs()["x_train"], blobs()["y_train"], strict=True)
    lines = [",".join([*(f"{value:.3f}" for value in x), str(y)]) for x, y in rows]
    path.write_text("\n".join(["a,b,c,d,e,label", *lines]))
    return path


def test_a_user_whom_the_system_does_not_know(write_experiment: Write, tmp_path: Path) -> None:
    """As in a container that is run with --user: no home, no cache, and digits, which need none."""
    unset = ("HOME", "FEDCLUSTER_CACHE", "XDG_CACHE_HOME", "USER", "LOGNAME")
    words = "run", str(write_experiment(rounds=1)), "--workers", "1", "--out", str(tmp_path / "out")
    done = subprocess.run(
        [sys.executable, "-c", HOMELESS, *words],
        env={name: value for name, value in os.environ.items() if name not in unset},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


def test_without_a_home(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    assert cache_folder() == Path(os.environ["FEDCLUSTER_CACHE"])
    monkeypatch.delenv("FEDCLUSTER_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(BadRun, match=r"this user has no home.*: set FEDCLUSTER_CACHE to a folder"):
        sources.open_dataset(str(table))
    assert len(sources.open_dataset("digits").y_test) == 359


def test_an_unwritable_cache_names_the_variable(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDCLUSTER_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(BadRun, match=r"file/cache.*: Not a directory\): set FEDCLUSTER_CACHE"):
        sources.open_dataset(str(table))
    assert len(sources.open_dataset("digits").y_test) == 359


def test_a_full_cache_names_the_variable(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCLUSTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BadRun, match=r"\.npz: No space left on device\): set FEDCLUSTER_CACHE"):
        sources.open_dataset(str(table))
    assert len(sources.open_dataset("digits").y_test) == 359


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_cache_that_is_filled_need_not_be_written(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDCLUSTER_CACHE", str(tmp_path / "cache"))
    before = sources.open_dataset(str(table)).digest()
    for lock in (tmp_path / "cache").glob("*.lock"):
        lock.unlink()
    monkeypatch.setattr("filelock.FileLock.acquire", full)
    assert sources.open_dataset(str(table)).digest() == before


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*thing\.json"):
        files.write_atomically(tmp_path / "thing.json", "text")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_runs_out_of_room_names_the_file_and_is_resumed(tmp_path: Path, write_experiment: Write) -> None:
    """The largest file allowed stands for a full disk: the write comes back with a part of the line, then fails."""
    path = write_experiment(rounds=40)
    command = [sys.executable, "-m", "fedcluster", "run", str(path), "--workers", "1", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, 9_000)),
    )
    assert done.returncode == 5
    name = str(tmp_path / "out" / "cycles.jsonl")
    assert done.stderr.splitlines()[-1] == (
        f"fedcluster: {name}: File too large; free some space and continue with --resume"
    )
    assert "Traceback" not in done.stderr
    fedcluster.run(fedcluster.load(path), tmp_path / "out", resume=True, display=Display())
    fedcluster.run(fedcluster.load(path), tmp_path / "whole", display=Display())
    assert essence(tmp_path / "out") == essence(tmp_path / "whole")
