"""Scores by device: on samples that it does not train on, the same however the work is shared or interrupted."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import fedcluster
from fedcluster.data import sources
from fedcluster.errors import BadExperiment
from fedcluster.fleet import fleet
from fedcluster.runs.devices import distribution
from fedcluster.runs.progress import Display
from fedcluster.training import checkpoints
from fedcluster.training.setup import prepare
from tests.conftest import blobs

KEYS: dict[str, Any] = {
    "rounds": 6,
    "fleet": {"devices": 20, "samples": 30, "rho_device": 0.9, "test_share": 0.3},
    "clusters": {"count": 4, "participation": 0.5},
    "model": {"name": "mlp"},
    "local": {"steps": 5, "batch": 8, "lr": 0.1},
    "eval": {"every": 2},
}
EXPERIMENT = fedcluster.Experiment(**KEYS)
FILES = ("devices.jsonl", "devices.parquet")


def lines(folder: Path, name: str = "devices.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("devices") / "run"
    fedcluster.run(EXPERIMENT, folder, display=Display())
    return folder


@pytest.mark.parametrize("partition", ["major_class", "iid", "dirichlet"])
def test_no_device_trains_on_what_it_is_tested_on(partition: str) -> None:
    """Also where a device holds copies of a sample: 300 samples, nine tenths of a class of 143."""
    dataset = sources.open_dataset("digits")
    keys = {"devices": 6, "samples": 300, "partition": partition}
    _, everything = fleet.build(fedcluster.Experiment(fleet=keys).fleet, dataset, 3)
    options = fedcluster.Experiment(fleet=keys | {"test_share": 0.25}).fleet
    devices, rest = fleet.build(options, dataset, 3)
    assert rest.held_out is not None
    assert (rest.held_out.sizes == 75).all()
    assert (devices.sizes == 225).all()
    for k in range(6):
        rows = rest.sample_indices(k)
        x, y = rest.held_out.samples(k)
        assert (len(rows), len(x), len(y)) == (225, 75, 75)
        trained = {tuple(sample.flatten().tolist()) for sample in dataset.x_train[rows]}
        assert not any(tuple(sample.flatten().tolist()) in trained for sample in x)
        assert set(rows.tolist()) <= set(everything.sample_indices(k).tolist())


def test_a_share_that_holds_nothing_out_is_refused() -> None:
    with pytest.raises(BadExperiment, match=r"fleet\.test_share = 0\.01 holds out no sample of any device: raise it"):
        prepare(EXPERIMENT.override(**{"fleet.test_share": 0.01}))


def test_what_is_recorded_of_devices(whole: Path) -> None:
    found, rounds = lines(whole), lines(whole, "metrics.jsonl")
    assert [line["round"] for line in found] == [2, 4, 6]
    assert [line["round"] for line in rounds if "by_device" in line] == [2, 4, 6]
    assert found[0]["device"] == list(range(20))
    assert set(found[0]["samples"]) == {9}
    accuracy = np.array(found[-1]["accuracy"])
    assert np.allclose(accuracy * 9, np.round(accuracy * 9))
    summary = rounds[-1]["by_device"]
    worst = np.sort(accuracy)[:2].mean()
    assert summary["accuracy"] == pytest.approx(
        {"mean": accuracy.mean(), "worst_decile": worst, "variance": accuracy.var()}
    )
    assert summary["loss"]["worst_decile"] == pytest.approx(np.sort(found[-1]["loss"])[-2:].mean())
    clusters = np.array(found[-1]["cluster"])
    assert [one["cluster"] for one in summary["clusters"]] == [0, 1, 2, 3]
    for one in summary["clusters"]:
        assert one["accuracy"] == pytest.approx(accuracy[clusters == one["cluster"]].mean())
    table = pq.read_table(whole / "devices.parquet").to_pydict()
    assert list(table) == ["round", "device", "cluster", "samples", "loss", "accuracy"]
    assert table["round"] == [2] * 20 + [4] * 20 + [6] * 20
    assert table["accuracy"][40:] == found[-1]["accuracy"]
    assert (whole / "devices.png").read_bytes()[:4] == b"\x89PNG"


def test_a_score_is_that_of_the_model_on_the_device(whole: Path) -> None:
    """By the plain module, without the evaluator."""
    setup = prepare(EXPERIMENT)
    model = fedcluster.load_model(whole)
    assert setup.partition is not None
    assert setup.partition.held_out is not None
    for k in (0, 7):
        x, y = setup.partition.held_out.samples(k)
        right = model(setup.dataset.inputs(x)).argmax(1) == y if setup.dataset else None
        assert right is not None
        assert lines(whole)[-1]["accuracy"][k] == pytest.approx(float(right.float().mean()))


@pytest.mark.parametrize("options", [{"workers": 3}, {"cohorts": "stacked"}])
def test_sharing_the_work_changes_nothing(options: dict[str, Any], whole: Path, tmp_path: Path) -> None:
    fedcluster.run(EXPERIMENT, tmp_path, display=Display(), **options)
    if "workers" in options:
        assert [(tmp_path / name).read_bytes() for name in FILES] == [(whole / name).read_bytes() for name in FILES]
    else:
        assert lines(tmp_path)[-1]["loss"] == pytest.approx(lines(whole)[-1]["loss"], rel=1e-3)


def test_resumed_and_extended_runs_leave_the_same_files(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "SAVE_EVERY", 0.0)
    monkeypatch.setattr(checkpoints, "SAVE_SHARE", 0)

    class Stop(fedcluster.Callback):
        """After the devices of round 4 are on record, and before the round is."""

        def on_devices_evaluated(self, line: Any, state: Any) -> None:
            if line["round"] == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedcluster.run(EXPERIMENT, tmp_path / "run", display=Display(), callbacks=[Stop()])
    assert [line["round"] for line in lines(tmp_path / "run")] == [2, 4]
    fedcluster.run(EXPERIMENT, tmp_path / "run", resume=True, display=Display())
    fedcluster.run(EXPERIMENT.override(rounds=3), tmp_path / "longer", display=Display())
    fedcluster.run(EXPERIMENT, tmp_path / "longer", resume=True, display=Display())
    for name in FILES:
        assert (tmp_path / "run" / name).read_bytes() == (whole / name).read_bytes()
        assert (tmp_path / "longer" / name).read_bytes() == (whole / name).read_bytes()


def test_altered_scores_are_refused(whole: Path, tmp_path: Path) -> None:
    fedcluster.run(EXPERIMENT, tmp_path, display=Display())
    path = tmp_path / "devices.jsonl"
    path.write_text(path.read_text().replace('"samples": [9', '"samples": [8'))
    with pytest.raises(fedcluster.FedClusterError, match=r"devices\.jsonl was altered after the run had finished"):
        fedcluster.run(EXPERIMENT, tmp_path, resume=True, display=Display())
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(fedcluster.FedClusterError, match=r"devices\.jsonl was altered after the run had written it"):
        fedcluster.run(EXPERIMENT, tmp_path, resume=True, display=Display())


def test_a_sample_of_devices_is_the_same_in_every_round(tmp_path: Path) -> None:
    fedcluster.run(EXPERIMENT.override(**{"eval.devices": 5}), tmp_path, display=Display())
    found = [line["device"] for line in lines(tmp_path)]
    assert len(found[0]) == 5
    assert found[0] == found[1] == found[2] == sorted(found[0])


def test_names_of_devices_and_metrics_without_one_value(tmp_path: Path) -> None:
    data = blobs()
    data["device_train"] = np.array([f"phone {k}" for k in data["device_train"]])
    keys = KEYS | {"data": {"name": fedcluster.Dataset(**data)}, "model": {"name": "logistic"}, "rounds": 2}
    keys |= {"fleet": {"partition": "natural", "test_share": 0.5}, "clusters": {"count": 2, "participation": 1.0}}
    fedcluster.run(fedcluster.Experiment(**keys, metrics=["top5_accuracy", "accuracy"]), tmp_path, display=Display())
    table = pq.read_table(tmp_path / "devices.parquet").to_pydict()
    assert table["name"] == [f"phone {k}" for k in range(7)]
    assert list(table)[-3:] == ["loss", "top5_accuracy", "accuracy"]


def test_metrics_with_several_values_are_in_the_table(tmp_path: Path) -> None:
    """Each class of each device; a device without samples of a class has none. Summaries are of single values."""
    keys = {"fleet.partition": "pathological", "fleet.samples": 60, "fleet.classes": 2, "rounds": 1, "eval.every": 1}
    experiment = EXPERIMENT.override(**keys)
    setup = prepare(experiment)
    assert setup.partition is not None
    assert setup.partition.held_out is not None
    experiment = fedcluster.Experiment(**experiment.to_dict() | {"metrics": ["accuracy", "per_class_accuracy"]})
    result = fedcluster.run(experiment, tmp_path, display=Display())
    table = pq.read_table(tmp_path / "devices.parquet").to_pydict()
    names = [f"per_class_accuracy/{c}" for c in range(10)]
    assert list(table)[-12:] == ["loss", "accuracy", *names]
    for k in range(20):
        _, y = setup.partition.held_out.samples(k)
        count = {c: int((y == c).sum()) for c in range(10)}
        assert [table[name][k] is None for name in names] == [count[c] == 0 for c in range(10)]
        right = sum(table[names[c]][k] * count[c] for c in range(10) if count[c])
        assert right == pytest.approx(table["accuracy"][k] * len(y))
    assert set(result.history[-1]["by_device"]["clusters"][0]) == {"cluster", "devices", "loss", "accuracy"}


def test_centralized_training_is_scored_by_device_too(tmp_path: Path) -> None:
    fedcluster.run(EXPERIMENT.override(method="centralized", rounds=2), tmp_path, display=Display())
    assert len(lines(tmp_path)[0]["device"]) == 20
    assert set(lines(tmp_path)[0]["cluster"]) == {0, 1, 2, 3}


def test_the_distribution_of_few_and_of_unknown_scores() -> None:
    three = np.array([0.5, np.nan, 1.0, 0.0])
    assert distribution(three, True) == {"mean": 0.5, "worst_decile": 0.0, "variance": pytest.approx(1 / 6)}
    assert distribution(three, False)["worst_decile"] == 1.0
    assert distribution(np.array([np.nan]), True) == {"mean": None, "worst_decile": None, "variance": None}


def test_rows_that_the_data_give_to_a_device_test_it(tmp_path: Path) -> None:
    """Instead of a share of its training samples. One device has no test rows, and some rows are of nobody."""
    data = blobs()
    rng = np.random.default_rng(1)
    data["device_test"] = rng.choice([0, 1, 2, 3, 4, 5, 99], len(data["y_test"]))
    np.savez(tmp_path / "data.npz", **data)
    keys = KEYS | {"data": {"name": str(tmp_path / "data.npz")}, "model": {"name": "logistic"}, "rounds": 2}
    keys |= {"fleet": {"partition": "natural", "test_share": 0.5}, "clusters": {"count": 2, "participation": 1.0}}
    setup = prepare(fedcluster.Experiment(**keys))
    assert (setup.fleet.sizes == np.bincount(data["device_train"])).all()
    assert setup.partition is not None
    assert setup.partition.held_out is not None
    x, _ = setup.partition.held_out.samples(3)
    counted = np.bincount(data["device_test"], minlength=6)[:6].tolist()
    assert np.array_equal(x.numpy(), data["x_test"][data["device_test"] == 3])
    fedcluster.run(fedcluster.Experiment(**keys), tmp_path / "run", display=Display())
    (line,) = lines(tmp_path / "run")
    assert line["device"] == [0, 1, 2, 3, 4, 5]
    data["device_test"][:] = 99
    with pytest.raises(fedcluster.FedClusterError, match="no test row is of a device that has training rows"):
        prepare(fedcluster.Experiment(**keys | {"data": {"name": fedcluster.Dataset(**data)}}))
    assert line["samples"] == counted


def test_test_devices_must_be_named_for_every_row() -> None:
    with pytest.raises(fedcluster.FedClusterError, match="device_test must name one device for each of the 40 rows"):
        fedcluster.Dataset(**blobs(), device_test=np.zeros(3))
