"""Trackers write what the run records, with their real libraries, and cannot end a run."""

import csv
import json
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

import fedcluster
from fedcluster.errors import BadExperiment
from fedcluster.runs.progress import Display
from tests.runs.test_resume import EXPERIMENT, essence


class Said(Display):
    def __init__(self) -> None:
        super().__init__()
        self.sentences: list[str] = []

    def say(self, message: str) -> None:
        self.sentences.append(message)


class Interrupt(fedcluster.Callback):
    def on_cycle_start(self, cycle: Any, state: Any) -> None:
        if (cycle.round, cycle.cycle) == (1, 2):
            raise KeyboardInterrupt


def interrupted_and_resumed(folder: Path, **track: Any) -> fedcluster.Result:
    """A run that is interrupted in its second round and resumed."""
    experiment = EXPERIMENT.override(track=track)
    with pytest.raises(KeyboardInterrupt):
        fedcluster.run(experiment, folder, display=Display(), callbacks=[Interrupt()])
    return fedcluster.run(experiment, folder, resume=True, display=Display())


def losses(result: fedcluster.Result) -> list[float]:
    return [line["test_loss"] for line in result.history]


def test_tensorboard_has_every_round_once_the_keys_and_the_curves(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    result = interrupted_and_resumed(tmp_path / "run", to="tensorboard")
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    scalars = events.Scalars("test_loss")
    assert [one.step for one in scalars] == list(range(1, len(result.history) + 1))
    assert [one.value for one in scalars] == pytest.approx(losses(result))
    assert events.Tags()["images"] == ["curves"]
    assert "_hparams_/experiment" in events.summary_metadata


@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_mlflow_has_one_run_with_every_round_the_keys_the_curves_and_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    result = interrupted_and_resumed(tmp_path / "run", to=["mlflow"], project="digits")
    client = mlflow.MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert (found.info.status, found.info.run_name) == ("FINISHED", "run")
    assert found.data.params["local.lr"] == json.dumps(EXPERIMENT.local.lr)
    logged = client.get_metric_history(found.info.run_id, "test_loss")
    assert [(one.step, one.value) for one in logged] == list(enumerate(losses(result), 1))
    assert {file.path for file in client.list_artifacts(found.info.run_id)} >= {"curves.png", "model.safetensors"}


@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_a_server_of_mlflow_that_is_away_is_given_up_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(name, "")  # is undone at the end
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    waits: list[float] = []
    monkeypatch.setattr("urllib3.util.retry.time.sleep", waits.append)
    said = Said()
    fedcluster.run(EXPERIMENT.override(track={"to": "mlflow"}), tmp_path / "run", display=said)
    assert [one for one in said.sentences if "mlflow no longer tracks this run" in one]
    assert sum(waits) < 20


@pytest.mark.filterwarnings("ignore")  # wandb's own
def test_wandb_writes_an_offline_run_and_resumes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    result = interrupted_and_resumed(tmp_path / "run", to=["wandb"])
    first, second = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_mtime)
    assert first.name.rpartition("-")[2] == second.name.rpartition("-")[2]
    rounds = logged_by_wandb(first) | logged_by_wandb(second)
    assert rounds == pytest.approx(dict(enumerate(losses(result), 1)))


def logged_by_wandb(folder: Path) -> dict[int, float]:
    """The test loss of every round in the file of an offline run."""
    from wandb.proto import wandb_internal_pb2

    Record: Any = vars(wandb_internal_pb2)["Record"]

    found = {}
    for data in records(next(folder.glob("*.wandb")).read_bytes()):
        items = {one.key or one.nested_key[0]: one.value_json for one in Record.FromString(data).history.item}
        if "test_loss" in items:
            found[int(items["round"])] = json.loads(items["test_loss"])
    return found


def records(content: bytes) -> Iterator[bytes]:
    """The records of LevelDB's log format, after 7 bytes that name the file: blocks of 32 KiB with parts of records,
    each after its checksum, length and kind (1 whole, 2 first, 3 middle, 4 last)."""
    at, parts = 7, b""
    while at + 7 <= len(content):
        if (left := -at % 32768) and left < 7:
            at += left
        _, length, kind = struct.unpack_from("<IHB", content, at)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def test_tables_have_a_row_for_every_round_of_a_resumed_run(tmp_path: Path) -> None:
    result = interrupted_and_resumed(tmp_path / "run", to=["csv", "parquet"])
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(int(float(row["round"])), float(row["test_loss"])) for row in rows] == [*enumerate(losses(result), 1)]
    table = pyarrow.parquet.read_table(tmp_path / "run" / "metrics.parquet")
    assert table["test_loss"].to_pylist() == losses(result)


class Broken:
    def __init__(self, project: str) -> None:
        self.rounds = 0

    def start(self, run: Any) -> int:
        return 0

    def log(self, round: int, numbers: dict[str, float]) -> None:
        self.rounds += 1
        if self.rounds == 2:
            raise ConnectionError("the server is away")

    def finish(self, files: Sequence[Path]) -> None:
        raise AssertionError("it was not forgotten")

    abort = finish


def test_a_tracker_that_fails_is_reported_once_and_the_run_goes_on(tmp_path: Path) -> None:
    fedcluster.run(EXPERIMENT, tmp_path / "plain", display=Display())
    said = Said()
    fedcluster.run(EXPERIMENT.override(track={"to": [Broken, "csv"]}), tmp_path / "run", display=said)
    assert [one for one in said.sentences if "tracks" in one] == [
        f"{Broken} no longer tracks this run (ConnectionError: the server is away); the run goes on"
    ]
    assert essence(tmp_path / "run") == essence(tmp_path / "plain")


def test_trackers_can_be_added_to_a_run_that_is_resumed(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fedcluster.run(EXPERIMENT, tmp_path / "run", display=Display(), callbacks=[Interrupt()])
    tracked = EXPERIMENT.override(track={"to": "csv"})
    result = fedcluster.run(tracked, tmp_path / "run", resume=True, display=Display())
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 1 + len(result.history)


def test_a_library_that_is_missing_and_a_tracker_that_is_unknown_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadExperiment, match=r"track.to.* is not allowed: use one of tensorboard, mlflow, wandb, csv"):
        EXPERIMENT.override(track={"to": ["tensorbord"]})
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(BadExperiment, match=r'mlflow is not installed; pip install "fedcluster\[track\]" installs it'):
        fedcluster.run(EXPERIMENT.override(track={"to": "mlflow"}), tmp_path / "run", display=Display())
    assert not (tmp_path / "run").exists()


def test_lists_and_nested_keys_become_numbers_with_names(tmp_path: Path) -> None:
    from fedcluster.training.tracking.registry import numbers_of

    line = {"round": 3, "test_loss": 1.5, "per_class": [0.5, None, 1], "devices": {"mean": 2}, "name": "x"}
    assert numbers_of(line) == {"test_loss": 1.5, "per_class.0": 0.5, "per_class.2": 1.0, "devices.mean": 2.0}
