"""Scores by device in a federation, in one process: what a device sends, and what the server accepts of it."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import fedcluster
from fedcluster.data.sources import open_dataset
from fedcluster.errors import BadData, BadExperiment
from fedcluster.fleet import fleet
from fedcluster.flower.device import Device, Identity, own_partition
from fedcluster.flower.evaluation import RemoteEvaluation, expected_sums
from fedcluster.flower.messages import InvalidMessage, pack_sums
from fedcluster.flower.registry import Registry, read_registration
from fedcluster.training import setup as prepare
from fedcluster.training.evaluation import values
from tests.conftest import blobs
from tests.flower.test_flower import entry, plan
from tests.models.test_tasks import LABELS, NUMBERS, TOKENS, X, dataset, experiment

SUMS = {"loss": torch.tensor([5.0, 10.0]), "accuracy": torch.tensor([4.0, 10.0])}
HONEST = {"round": 2, "device": 3, "samples": 10} | pack_sums(SUMS)


def own(tmp_path: Path, **identity: Any) -> Device:
    np.savez(tmp_path / "own.npz", **blobs())
    return Device(Identity("3", str(tmp_path / "own.npz"), **identity))


@pytest.fixture(scope="module")
def server() -> RemoteEvaluation:
    setup = prepare.prepare(fedcluster.Experiment(model={"name": "logistic"}))
    return RemoteEvaluation(SimpleNamespace(grid=None, notifier=None), setup, "", 0, 0)  # type: ignore[arg-type]


def test_honest_scores(server: RemoteEvaluation) -> None:
    assert server.scores(HONEST, 2, 3, 10) == {"loss": 0.5, "accuracy": 0.4}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"round": 1}, "another round"),
        ({"round": True}, "without round"),
        ({"device": 4}, "another round or device"),
        ({"samples": 11}, "not on the 10 samples"),
        ({"samples": None}, "without samples"),
        ({"sums/other": [1.0, 1.0]}, "wrong names"),
        ({"sums/loss": "5"}, "loss: wrong shape or type"),
        ({"sums/loss": [5.0]}, "loss: wrong shape or type"),
        ({"sums/loss": [5.0, True]}, "loss: wrong shape or type"),
        ({"sums/loss": [5.0] * 1000}, "loss: wrong shape or type"),
        ({"sums/loss": [float("nan"), 10.0]}, "loss: not finite"),
        ({"sums/accuracy": [float("inf"), 10.0]}, "accuracy: not finite"),
        ({"sums/loss": [1e300, 10.0]}, r"loss: more than 1e\+30"),
        ({"sums/loss": [1e20, 1e-20]}, "loss: out of range"),
        ({"sums/accuracy": [11.0, 10.0]}, "accuracy: out of range"),
        ({"sums/accuracy": [-1.0, 10.0]}, "accuracy: out of range"),
    ],
)
def test_scores_that_are_refused(server: RemoteEvaluation, given: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidMessage, match=why):
        server.scores(HONEST | given, 2, 3, 10)


def test_sums_that_make_a_metric_fail_are_refused() -> None:
    """The square root of a negative mean is not a number."""
    setup = prepare.prepare(experiment(dataset(X, NUMBERS)))
    server = RemoteEvaluation(SimpleNamespace(grid=None, notifier=None), setup, "", 0, 0)  # type: ignore[arg-type]
    given = pack_sums(expected_sums(setup)) | {"sums/rmse": [-1.0, 1.0], "round": 2, "device": 3, "samples": 10}
    with pytest.raises(InvalidMessage, match="sums that no samples have"):
        server.scores(given, 2, 3, 10)


@pytest.mark.parametrize(
    ("x", "y", "metrics"),
    [
        (X, LABELS[:, 0], ["macro_f1", "per_class_accuracy"]),
        (X, NUMBERS, ["rmse", "r2"]),
        (X, LABELS, ["micro_f1", "map"]),
        (TOKENS[:, :-1], TOKENS[:, 1:], ["perplexity"]),
    ],
    ids=["class", "number", "multilabel", "token"],
)
def test_the_server_expects_the_sums_that_samples_have(x: Any, y: Any, metrics: list[str]) -> None:
    model = {"name": "lstm" if x.dtype == np.int64 else "logistic"}
    setup = prepare.prepare(experiment(dataset(x, y), metrics=metrics, model=model))
    assert setup.dataset is not None
    setup.evaluate.load(setup.start.model)
    found = setup.evaluate.sums(map, setup.dataset.x_test, setup.dataset.y_test, setup.evaluate.metrics)
    expected = expected_sums(setup)
    assert {name: one.shape for name, one in found.items()} == {name: one.shape for name, one in expected.items()}


def test_a_device_scores_a_model_as_the_simulator_does(tmp_path: Path) -> None:
    """On the samples that it holds out, else on its own test samples."""
    data = blobs()
    described = fedcluster.Experiment(
        data={"name": fedcluster.Dataset(**data)},
        fleet={"partition": "natural", "test_share": 0.3},
        clusters={"count": 1},
        model={"name": "logistic"},
    )
    setup = prepare.prepare(described)
    assert setup.evaluate_devices is not None
    w = torch.linspace(-1, 1, setup.start.model.numel())
    line, _ = setup.evaluate_devices.measure(w, 1)
    mine = {name: data[name][data["device_train"] == 3] for name in ("x_train", "y_train")}
    np.savez(tmp_path / "3.npz", **data | mine | {"device_train": np.zeros(len(mine["y_train"]))})
    device = Device(Identity("3", str(tmp_path / "3.npz"), evaluate=True))
    assert device.registration().test_samples == 40
    samples, sums = device.evaluate(plan(test_share=0.3), 3, {"model": w})
    assert samples == line["samples"][3]
    assert values(sums, setup.evaluate.metrics) == {name: line[name][3] for name in ("loss", "accuracy")}
    assert device.evaluate(plan(), 3, {"model": w})[0] == 40


@pytest.mark.parametrize("partition", ["major_class", "iid"])
def test_a_device_holds_out_what_the_simulator_holds_out(partition: str) -> None:
    """Also where it holds copies of a sample: 300 samples, nine tenths of a class of 143. It knows its samples by their
    values, the simulator by their rows."""
    digits, keys = open_dataset("digits"), {"devices": 6, "samples": 300, "partition": partition}
    _, everything = fleet.build(fedcluster.Experiment(fleet=keys).fleet, digits, 3)
    _, rest = fleet.build(fedcluster.Experiment(fleet=keys | {"test_share": 0.25}).fleet, digits, 3)
    assert rest.held_out is not None
    for k in (0, 5):
        rows = everything.sample_indices(k)
        mine = (digits.x_train[rows].numpy(), digits.y_train[rows].numpy())
        data = fedcluster.Dataset(*mine, digits.x_test[:1], digits.y_test[:1], classes=10)
        own = own_partition(data, 0.25, 3)
        assert own.held_out is not None
        pairs = zip(own.held_out.samples(k), rest.held_out.samples(k), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
        assert torch.equal(data.x_train[own.sample_indices(k)], digits.x_train[rest.sample_indices(k)])


def test_a_device_decides_itself_whether_it_is_scored(tmp_path: Path) -> None:
    model = {"model": torch.zeros(18)}
    silent = own(tmp_path)
    assert silent.registration().test_samples is None
    with pytest.raises(BadExperiment, match="does not let the server ask for its scores"):
        silent.evaluate(plan(), 3, model)
    device = own(tmp_path, evaluate=True)
    with pytest.raises(BadExperiment, match="asks for os:system, which this device does not allow"):
        device.evaluate(plan(metrics=["os:system"]), 3, model)
    device.prepare(plan(metrics=["os:system"]))  # it trains all the same
    for wrong in ({"model": torch.zeros(17)}, {"other": torch.zeros(18)}):
        with pytest.raises(InvalidMessage, match="not the model of the plan"):
            device.evaluate(plan(), 3, wrong)
    one = {name: blobs()[name][:1] for name in ("x_train", "y_train")}
    np.savez(tmp_path / "one.npz", **blobs() | one | {"device_train": np.zeros(1)})
    with pytest.raises(BadData, match="holds out no samples"):
        Device(Identity("3", str(tmp_path / "one.npz"), evaluate=True)).evaluate(plan(test_share=0.3), 3, model)


def test_weights_count_what_is_trained_on() -> None:
    registry = Registry(fedcluster.Experiment(clusters={"count": 1}, fleet={"test_share": 0.25}))
    for device, samples, test in (("0", 10, 5), ("1", 20, None), ("2", 1, 5)):
        told = {} if test is None else {"test_samples": test}
        assert registry.register(read_registration(entry(device, samples=samples, **told))) is None
    registry.admit(0, print)
    assert registry.fleet().sizes.tolist() == [7, 15, 1]
    assert registry.test_sizes(0).tolist() == [3, 0, 0]
    assert registry.capped_claims() == []
    registry.register(read_registration(entry("1", samples=20, test_samples=4)))  # it has come back with --evaluate
    assert registry.test_sizes(0).tolist() == [3, 5, 0]
    registry.experiment = registry.experiment.override(**{"fleet.test_share": 0})
    assert registry.test_sizes(0).tolist() == [5, 4, 5]


def test_a_device_says_that_the_compiled_engine_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fedcluster.models.flat_model.network_for", lambda module: None)
    with caplog.at_level(logging.WARNING, "flwr"):
        logging.getLogger("flwr").addHandler(caplog.handler)  # Flower's logger does not propagate
        own(tmp_path).prepare(plan())
        logging.getLogger("flwr").removeHandler(caplog.handler)
    assert "training with torch, which is slower for this model" in caplog.text
