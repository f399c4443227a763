"""The algorithm against independent readings of it."""

import csv
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

import fedcluster
from fedcluster.algorithms import FedAvg
from fedcluster.errors import BadExperiment
from fedcluster.experiment import Local, Section
from fedcluster.rng import stream
from fedcluster.runs.progress import Display
from fedcluster.training import setup as prepare
from fedcluster.training.executors.in_process import InProcess
from tests.conftest import algorithm_and_local, blobs
from tests.reference import algorithm_1
from tests.runs.test_resume import essence

LOCAL: dict[str, Any] = {
    "steps": 4,
    "lr": 0.2,
    "momentum": 0.5,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "mu": 0.3,
    "batch": "full",
}
CLUSTERS = [[0, 3, 5], [1], [2, 4, 6]]


@pytest.mark.parametrize(
    ("algorithm", "optimizer"),
    [("fedavg", "sgd"), ("fedavg", "momentum"), ("fedavg", "adam"), ("fedprox", "sgd"), ("fedprox", "adam")],
)
@pytest.mark.parametrize("clusters", [CLUSTERS, [list(range(7))]], ids=["M=3", "M=1"])
def test_agrees_with_numpy(algorithm: str, optimizer: str, clusters: list[list[int]], tmp_path: Path) -> None:
    data = blobs()
    np.savez(tmp_path / "data.npz", **data)
    rng = np.random.default_rng(1)
    start = {"linear.weight": rng.normal(size=(3, 5)), "linear.bias": rng.normal(size=3)}
    save_file({k: torch.tensor(v, dtype=torch.float32) for k, v in start.items()}, tmp_path / "start.safetensors")
    with (tmp_path / "clusters.csv").open("w", newline="") as file:
        rows = [(device, cluster) for cluster, devices in enumerate(clusters) for device in devices]
        csv.writer(file).writerows([("device", "cluster"), *rows])
    options = LOCAL | {"algorithm": algorithm, "optimizer": optimizer, "lr": 0.02 if optimizer == "adam" else 0.2}
    experiment = fedcluster.Experiment(
        rounds=3,
        data={"name": str(tmp_path / "data.npz")},
        fleet={"partition": "natural"},
        clusters={
            "method": "file",
            "path": str(tmp_path / "clusters.csv"),
            "order": "cyclic",
            "participation": 1.0,
        },
        model={"name": "logistic", "init": str(tmp_path / "start.safetensors")},
        **algorithm_and_local(options),
    )
    fedcluster.run(experiment, tmp_path / "run", display=Display())
    ours = load_file(tmp_path / "run" / "model.safetensors")
    first = [start[name].astype(np.float32).astype(np.float64) for name in ("linear.weight", "linear.bias")]
    weight, bias = algorithm_1(data, clusters, first, 3, options)
    np.testing.assert_allclose(ours["linear.weight"], weight, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(ours["linear.bias"], bias, rtol=2e-5, atol=2e-6)


def fedavg(setup: prepare.Setup, rounds: int, devices: int, steps: int, batch: int, lr: float) -> list[torch.Tensor]:
    """FedAvg as one would write it by hand: modules, torch.optim and a weighted average, its terms rounded to
    2^-40 as `aggregate` has it."""
    dataset, fleet, model = setup.dataset, setup.fleet, deepcopy(setup.flat_model.module)
    assert dataset is not None
    assert setup.partition is not None
    grid = torch.tensor(1.5 * 2**12, dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.data = p.data.clone()
            p.grad = None
    for j in range(rounds):
        cohort = np.sort(stream(0, "cohort", j, 0).choice(len(fleet), devices, replace=False, shuffle=False))
        total = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
        for k in cohort.tolist():
            local = deepcopy(model)
            optimizer = torch.optim.SGD(local.parameters(), lr=lr)
            rows = setup.partition.sample_indices(k)
            drawn = rows[stream(0, "batch", j, 0, k).integers(len(rows), size=(steps, batch))]
            for t in range(steps):
                index = torch.from_numpy(drawn[t])
                optimizer.zero_grad()
                F.cross_entropy(local(dataset.x_train[index]), dataset.y_train[index]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            share = fleet.weights[k] / fleet.weights[cohort].sum()
            for sum_, p in zip(total, local.parameters(), strict=True):
                sum_.add_(torch.add(grid, p.detach().double(), alpha=share) - grid)
        with torch.no_grad():
            for p, sum_ in zip(model.parameters(), total, strict=True):
                p.copy_(sum_ / (devices * round(share * 2**40) / 2**40))
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_one_cluster_is_fedavg(model: str) -> None:
    experiment = fedcluster.Experiment(
        rounds=3,
        fleet={"devices": 20, "samples": 30},
        clusters={"count": 1, "participation": 0.25},
        model={"name": model},
        local={"steps": 5, "batch": 8, "lr": 0.1},
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = fedavg(prepare.prepare(experiment), 3, devices=5, steps=5, batch=8, lr=0.1)
    torch.set_num_threads(threads)
    result = fedcluster.run(experiment, display=Display())
    for ours, theirs in zip(result.model.parameters(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)  # devices have a compiled loop of their own


def test_centralized_spends_the_same_samples() -> None:
    experiment = fedcluster.Experiment(method="centralized")
    setup = prepare.prepare(experiment.override(**{"model.name": "logistic"}))
    assert isinstance(setup.executor, InProcess)
    assert (setup.executor.options.steps, setup.executor.options.batch) == (1000, 60)
    assert setup.fleet.sizes.tolist() == [500_000]


def test_centralized_sends_nothing() -> None:
    experiment = fedcluster.Experiment(
        method="centralized", rounds=2, fleet={"devices": 5, "samples": 9}, clusters={"count": 2}, model={"name": "mlp"}
    )
    last = fedcluster.run(experiment, display=Display()).history[-1]
    assert [last[key] for key in ("device_updates", "downloads", "uploads", "bytes_up", "bytes_down")] == [0] * 5


def test_unequal_devices_weigh_by_their_samples() -> None:
    data = blobs(3)
    dataset = fedcluster.Dataset(**data)
    setup = prepare.prepare(
        fedcluster.Experiment(
            data={"name": dataset}, fleet={"partition": "natural"}, clusters={"count": 2}, model={"name": "logistic"}
        )
    )
    sizes = np.bincount(data["device_train"])
    np.testing.assert_allclose(setup.fleet.weights, sizes / sizes.sum())


def test_a_model_with_running_statistics_learns() -> None:
    """Floating-point buffers are averaged along with the parameters, counters are not."""

    def with_batch_norm(shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        nn = torch.nn
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, classes))

    experiment = fedcluster.Experiment(
        rounds=4,
        fleet={"devices": 40, "samples": 60},
        clusters={"count": 4, "participation": 0.5},
        model={"name": with_batch_norm},
        local={"lr": 0.1},
    )
    result = fedcluster.run(experiment, display=Display())
    norm = result.model[2]  # type: ignore[index]
    assert not torch.equal(norm.running_mean, torch.zeros(32))
    assert result.history[-1]["test_accuracy"] > 0.8


def natural(**local: Any) -> fedcluster.Experiment:
    return fedcluster.Experiment(
        rounds=2,
        data={"name": fedcluster.Dataset(**blobs())},
        fleet={"partition": "natural"},
        clusters={"count": 2, "participation": 1.0},
        model={"name": "logistic"},
        local={"steps": 3, "batch": 4, "lr": 0.1} | local,
    )


def weights(experiment: fedcluster.Experiment) -> torch.Tensor:
    model = fedcluster.run(experiment, display=Display()).model
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_local_rule_may_return_the_gradient() -> None:
    def in_place(gradient: torch.Tensor, w: torch.Tensor, received: torch.Tensor) -> None:
        gradient.mul_(0.5).add_(w)

    def returned(gradient: torch.Tensor, w: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        return gradient * 0.5 + w

    def both(gradient: torch.Tensor, w: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        return gradient.mul_(0.5).add_(w)

    expected = weights(natural(algorithm=in_place))
    assert not torch.equal(expected, weights(natural()))
    assert torch.equal(weights(natural(algorithm=returned)), expected)
    assert torch.equal(weights(natural(algorithm=both)), expected)


@pytest.mark.parametrize("returned", [0.5, torch.zeros(1), "g"], ids=["number", "shape", "text"])
def test_a_local_rule_that_returns_something_else_is_refused(returned: Any) -> None:
    with pytest.raises(BadExperiment, match=r"the local rule returned .*; return a gradient of shape"):
        weights(natural(algorithm=lambda gradient, w, received: returned))


class Scaled(FedAvg):
    def __init__(self, local: Local, options: Section | None = None, seed: int = 0, factor: float = 1.0) -> None:
        super().__init__(local, options, seed)
        self.factor = factor

    def correct(self, gradient: torch.Tensor, w: torch.Tensor, received: torch.Tensor) -> None:
        gradient.mul_(self.factor)


def test_a_partial_of_an_algorithm_is_an_algorithm() -> None:
    half = natural(algorithm=partial(Scaled, factor=0.5))
    torch.testing.assert_close(weights(half), weights(natural(lr=0.05)), rtol=1e-5, atol=1e-7)
    assert half.to_dict()["algorithm"]["name"] == "tests.algorithms.test_algorithm:Scaled(factor=0.5)"
    assert half.digest() != natural(algorithm=partial(Scaled, factor=0.25)).digest()
    rule = partial(lambda gradient, w, received, factor: gradient.mul_(factor), factor=0.5)
    torch.testing.assert_close(weights(natural(algorithm=rule)), weights(half))


def centralized(optimizer: str, rounds: int, steps: int, **keys: Any) -> fedcluster.Experiment:
    lr = 0.02 if optimizer == "adam" else 0.2
    return natural(optimizer=optimizer, lr=lr).override(
        method="centralized", rounds=rounds, centralized={"steps": steps, "batch": "full"} | keys
    )


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_centralized_training_is_one_optimizer_over_all_rounds(optimizer: str) -> None:
    """Full batches: two rounds of three steps are one round of six, and those are torch's."""
    data = blobs()
    x, y = torch.tensor(data["x_train"]), torch.tensor(data["y_train"])
    setup = prepare.prepare(centralized(optimizer, 2, 3))
    model = deepcopy(setup.flat_model.module)
    for p in model.parameters():
        p.data, p.grad = p.data.clone(), None
    if optimizer == "adam":
        theirs: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    else:
        theirs = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5 if optimizer == "momentum" else 0.0)
    for _ in range(6):
        theirs.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        theirs.step()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(weights(centralized(optimizer, 2, 3)), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights(centralized(optimizer, 1, 6)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_a_resumed_centralized_run_goes_on_with_its_moments(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = centralized(optimizer, 4, 3, batch=5)
    fedcluster.run(described, tmp_path / "whole", display=Display())

    class Stop(Display):
        def round(self, line: dict[str, Any]) -> None:
            if line["round"] == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedcluster.run(described, tmp_path / "stopped", display=Stop())
    fedcluster.run(described, tmp_path / "stopped", resume=True, display=Display())
    assert essence(tmp_path / "stopped") == essence(tmp_path / "whole")


def test_centralized_training_says_when_whole_steps_cannot_spend_the_same_samples() -> None:
    said: list[str] = []

    def budget(**keys: Any) -> int:
        setup = prepare.prepare(natural(batch="full", steps=3).override(method="centralized", **keys), said.append)
        assert isinstance(setup.executor, InProcess)
        assert isinstance(setup.executor.options.steps, int)
        return setup.executor.options.steps

    total = len(blobs()["y_train"])  # all seven take part, each with all of its data
    assert budget(centralized={"batch": "full"}) == 3
    assert not any("centralized training takes" in text for text in said)
    steps = budget(centralized={"batch": 5})
    assert steps == round(3 * total / 5)
    assert f"centralized training takes {steps} steps of 5 samples a round, {5 * steps} in all" in said[-1]
    assert said[-1].endswith(f"the fleet's cohorts use {3 * total} on average")
