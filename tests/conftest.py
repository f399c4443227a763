import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from fedcluster.experiment import Algorithm, Local

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Here = Callable[..., tuple[int, str, str]]


# A shell that starts tests in the background lets them ignore SIGINT, and every process that they start would too.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No test sees, or leaves anything in, the user's caches."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, and what commands print would be cut to it;
    os.unsetenv("COLUMNS")  # readline sets it too, without Python knowing
    os.environ |= {"FEDCLUSTER_CACHE": str(folder), "HF_HOME": str(folder / "huggingface")}
    return folder


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with the full MNIST and CIFAR-10, where there is one."""
    root = Path(os.environ.get("FEDCLUSTER_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not (root / "mnist" / "train.parquet").exists():
        pytest.skip("no real data: set FEDCLUSTER_DATA to a folder with {mnist,cifar10}/{train,test}.parquet")
    return root


def blobs(seed: int = 0, devices: int = 7, features: int = 5, classes: int = 3) -> dict[str, Any]:
    """A small natural fleet: unequal devices whose class mixes differ."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(classes, features)) * 2
    sizes = rng.integers(4, 30, devices)
    y = np.concatenate([rng.choice(classes, n, p=rng.dirichlet(np.ones(classes))) for n in sizes])
    y[:classes] = np.arange(classes)
    y_test = rng.integers(classes, size=40)
    return {
        "x_train": (centres[y] + rng.normal(size=(len(y), features))).astype(np.float32),
        "y_train": y,
        "x_test": (centres[y_test] + rng.normal(size=(40, features))).astype(np.float32),
        "y_test": y_test,
        "device_train": np.repeat(np.arange(devices), sizes),
    }


def algorithm_and_local(keys: dict[str, Any]) -> dict[str, Any]:
    """The sections [algorithm] and [local] from keys of both; options of other algorithms are left out."""
    name = keys.get("algorithm", "fedavg")
    own = Algorithm(name=name).options_class().model_fields
    local = {key: value for key, value in keys.items() if key in Local.model_fields}
    return {"algorithm": {"name": name} | {key: keys[key] for key in own if key in keys}, "local": local}


@pytest.fixture
def write_experiment(tmp_path: Path) -> Callable[..., Path]:
    """An experiment file that trains in well under a second, with sections replaced by keyword."""

    def write(name: str = "experiment.toml", **sections: Any) -> Path:
        keys: dict[str, Any] = {
            "rounds": 3,
            "fleet": {"devices": 12, "samples": 20},
            "clusters": {"count": 3, "participation": 0.5},
            "model": {"name": "logistic"},
            "local": {"steps": 3, "batch": 5, "lr": 0.1},
        }
        path = tmp_path / name
        path.write_text(tomli_w.dumps(keys | sections))
        return path

    return write


@pytest.fixture
def cli(tmp_path: Path) -> Run:
    """The real command in a process of its own."""

    def call(*words: Any, **environment: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "fedcluster", *map(str, words)],
            cwd=tmp_path,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=600,
        )

    return call


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """The same command in this process, without the seconds that imports take: exit code, output, errors."""
    from fedcluster.cli.main import app

    monkeypatch.chdir(tmp_path)

    def call(*words: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            app([str(word) for word in words])
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return call


def until(condition: Callable[[], Any], seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)
