"""Updates that are lost or refused and what server and devices then keep, and what becomes of running statistics."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedcluster
from fedcluster.algorithms.registry import ALGORITHMS
from fedcluster.algorithms.vrl_sgd import VrlSgd
from fedcluster.fleet.schedule import Cycle
from fedcluster.models.flat_model import Objective
from fedcluster.runs.ledger import Ledger
from fedcluster.runs.metrics import Record
from fedcluster.state import Accepted, State, Tensors, Update
from fedcluster.training import cycle
from fedcluster.training import loop as training
from fedcluster.training import setup as prepare
from fedcluster.training.acceptance import accept
from fedcluster.training.executors.in_process import DeviceStates, InProcess
from fedcluster.training.threads import repeatable
from tests.algorithms.test_algorithms import ALL, CLUSTERS, experiment, ours
from tests.conftest import blobs
from tests.reference_algorithms import softmax_regression

Lost = set[tuple[int, int, int]]  # round, exchange and device


class Lossy(InProcess):
    """Some updates never arrive, others are not finite."""

    def __init__(self, here: InProcess, lost: Lost, spoiled: Lost) -> None:
        self.__dict__.update(here.__dict__)
        self.lost, self.spoiled = lost, spoiled

    def train(self, cycle: Cycle, received: Tensors, phase: int, device_states: DeviceStates) -> Iterator[Update]:
        for update in super().train(cycle, received, phase, device_states):
            place = (cycle.round, phase, update.device)
            if place in self.spoiled:
                yield replace(update, message={name: tensor * torch.nan for name, tensor in update.message.items()})
            elif place not in self.lost:
                yield update


def trained(
    described: fedcluster.Experiment, lost: Lost | None = None, spoiled: Lost | None = None
) -> tuple[prepare.Setup, State, Ledger]:
    setup = prepare.prepare(described)
    assert isinstance(setup.executor, InProcess)
    setup = replace(setup, executor=Lossy(setup.executor, lost or set(), spoiled or set()))
    record = Record(Ledger(setup.devices))
    with repeatable():
        return setup, training.train(setup, record, setup.start), record.ledger


def mean_over_fleet(setup: prepare.Setup, state: State, name: str) -> Tensor:
    total = torch.zeros(18, dtype=torch.float64)
    for k, kept in state.devices.items():
        total += setup.fleet.weights[k] * kept[name].double()
    return total


@pytest.mark.parametrize("clusters", [CLUSTERS, ALL], ids=["M=3", "M=1"])
@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_counts_only_what_was_accepted(option: str, clusters: list[list[int]], tmp_path: Path) -> None:
    """c stays the weighted mean of the c_k, whoever is missing or refused; they keep the c_k they had."""
    lost, spoiled = {(0, 0, 3), (1, 0, 0), (2, 0, 1)}, {(0, 0, 6), (2, 0, 4)}
    setup, state, ledger = trained(experiment(tmp_path, "scaffold", clusters, option=option), lost, spoiled)
    c = state.server["variate"]
    assert c.abs().sum() > 0
    torch.testing.assert_close(c.double(), mean_over_fleet(setup, state, "variate"), rtol=1e-5, atol=1e-7)
    assert ledger.counts["refused"] == len(spoiled)
    _, first, _ = trained(experiment(tmp_path, "scaffold", clusters, option=option, rounds=1), lost, spoiled)
    assert set(first.devices) == {0, 1, 2, 4, 5}


@pytest.mark.parametrize("steps", [3, [1, 5]])
def test_vrl_sgd_keeps_the_sum_of_its_drifts(steps: Any, tmp_path: Path) -> None:
    """Also where updates are lost: the server never sees them, so nobody's drift may count on them."""
    described = experiment(tmp_path, "vrl_sgd", ALL, steps=steps)
    setup, state, _ = trained(described, lost={(0, 0, 3), (1, 0, 0)}, spoiled={(1, 0, 6)})
    assert min(kept["drift"].abs().max() for kept in state.devices.values()) > 0.01
    torch.testing.assert_close(
        mean_over_fleet(setup, state, "drift"), torch.zeros(18, dtype=torch.float64), rtol=0, atol=1e-6
    )


def test_a_device_that_misses_the_second_exchange_keeps_its_old_drift(tmp_path: Path) -> None:
    _, one, _ = trained(experiment(tmp_path, "vrl_sgd", ALL, rounds=1, steps=[1, 5]))
    described = experiment(tmp_path, "vrl_sgd", ALL, rounds=2, steps=[1, 5])
    _, two, ledger = trained(described, lost={(1, 1, 3)})
    _, all_there, _ = trained(described)
    assert torch.equal(two.devices[3]["drift"], one.devices[3]["drift"])
    for k in (0, 6):
        assert torch.equal(two.devices[k]["drift"], all_there.devices[k]["drift"])
    _, never, ledger = trained(experiment(tmp_path, "vrl_sgd", ALL, rounds=1), lost={(0, 0, 3)})
    assert 3 not in never.devices
    assert ledger.counts["downloads"] == 7 + 6, "who is missing in the first exchange is not sent the second"


class Ridge(VrlSgd):
    """A strictly convex objective, so that there is one optimum."""

    def objective(self, loss: Objective) -> Objective:
        def ridge(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return loss(module, x, y) + 0.25 * sum((p.square().sum() for p in module.parameters()), x.new_zeros(()))

        return ridge


def test_vrl_sgd_with_unequal_steps_finds_the_optimum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = experiment(tmp_path, "vrl_sgd", ALL, rounds=60, steps=[1, 6], batch="full", lr=0.1)
    found = ours(described.override(local={"algorithm": Ridge}))
    data, w = blobs(), np.zeros(18)
    for _ in range(400):
        w -= 0.3 * (softmax_regression(w, data["x_train"].astype(np.float64), data["y_train"]) + 0.5 * w)
    np.testing.assert_allclose(found, w, atol=2e-4)


def with_batch_norm(shape: tuple[int, ...], classes: int) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(shape[0], 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes))


@pytest.mark.parametrize(
    ("algorithm", "server"),
    [*((name, {}) for name in ALGORITHMS)]
    + [("fedavg", {"optimizer": name, "lr": 0.5}) for name in ("none", "avgm", "adagrad", "adam", "yogi")],
)
def test_running_statistics_are_averaged(
    algorithm: str, server: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Accepted] = []

    def tapped(*arguments: Any) -> Iterable[Accepted]:
        for update in accept(*arguments):
            sent.append(update)
            yield update

    monkeypatch.setattr(cycle, "accept", tapped)
    steps = [1, 9] if algorithm in ("fednova", "vrl_sgd") else 4
    described = experiment(tmp_path, algorithm, ALL, rounds=1, model=with_batch_norm, server=server, steps=steps)
    setup, state, _ = trained(described)
    models = [update for update in sent if "model" in update.message]
    statistics = sum(u.weight * u.message["model"][state.size :].double() for u in models)
    assert len(models) == 7
    assert state.model[state.size :].shape == (16,)
    assert not torch.equal(state.model[state.size :], setup.start.model[state.size :])
    torch.testing.assert_close(state.model[state.size :].double(), statistics, rtol=1e-6, atol=1e-7)
    assert (state.model[-8:] > 0).all(), "variances"


@pytest.mark.parametrize("algorithm", ["mime", "fedsvrg", "pr_spider"])
def test_who_misses_the_first_exchange_is_not_in_the_second(algorithm: str, tmp_path: Path) -> None:
    """The model of a cohort without device 3, to the bit."""
    lost = {(0, phase, 3) for phase in (0, 1)}
    _, missing, ledger = trained(experiment(tmp_path, algorithm, ALL, rounds=1), lost={(0, 0, 3)})
    assert (ledger.counts["downloads"], ledger.counts["uploads"]) == (7 + 6, 6 + 6)
    _, gone, _ = trained(experiment(tmp_path, algorithm, ALL, rounds=1), lost=lost)
    assert torch.equal(missing.model, gone.model)
    assert ledger.missing == [3]
