"""The algorithm against independent readings of it."""

import csv
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

import fedcluster
from fedcluster import prepare
from fedcluster.display import Display
from fedcluster.executor import InProcess
from fedcluster.rng import stream
from tests.conftest import blobs
from tests.reference import algorithm_1

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
        local=options,
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
    dataset, fleet, model = setup.dataset, setup.fleet, deepcopy(setup.learner.module)
    assert dataset is not None
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
            rows = fleet.draw(k)
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
    expected = fedavg(prepare.prepare(experiment, Display()), 3, devices=5, steps=5, batch=8, lr=0.1)
    torch.set_num_threads(threads)
    result = fedcluster.run(experiment, display=Display())
    for ours, theirs in zip(result.model.parameters(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)  # devices have a compiled loop of their own


def test_centralized_spends_the_same_samples() -> None:
    experiment = fedcluster.Experiment(method="centralized")
    setup = prepare.prepare(experiment.with_(**{"model.name": "logistic"}), Display())
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
        ),
        Display(),
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
