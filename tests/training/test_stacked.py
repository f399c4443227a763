"""A cohort in one stack learns what its devices learn one after the other, up to rounding."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedcluster
from fedcluster.algorithms.registry import ALGORITHMS
from fedcluster.runs.progress import Display
from fedcluster.training import setup as prepare
from fedcluster.training.executors import stacked
from fedcluster.training.executors.in_process import InProcess
from tests.algorithms.test_algorithms import CLUSTERS, experiment, network, ours


class Listen(Display):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def described(model: Any = "cnn", **local: Any) -> fedcluster.Experiment:
    return fedcluster.Experiment(
        rounds=2,
        fleet={"devices": 24, "samples": 40},
        clusters={"count": 2, "participation": 0.5},
        model={"name": model},
        local={"steps": 5, "batch": 10, "lr": 0.05} | local,
    )


@pytest.mark.parametrize("model", ["logistic", "mlp", "cnn"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_within_the_tolerance_of_one_after_the_other(model: str, optimizer: str) -> None:
    lr = 0.05 if optimizer == "sgd" else 0.002
    one, stack = (
        fedcluster.run(described(model, optimizer=optimizer, lr=lr, eps=1e-3), display=Display(), cohorts=how)
        for how in ("sequential", "stacked")
    )
    for found, expected in zip(stack.model.parameters(), one.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert stack.history[-1]["bytes_up"] == one.history[-1]["bytes_up"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_can_be_stacked(algorithm: str, tmp_path: Path) -> None:
    """Unequal devices: those with as many samples and steps share a stack."""
    plain = experiment(tmp_path, algorithm, CLUSTERS, model=network, steps=[3, 4] if algorithm == "fednova" else 4)
    np.testing.assert_allclose(ours(plain, cohorts="stacked"), ours(plain), rtol=1e-4, atol=1e-5)


def test_stacks_are_cut_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fedcluster.run(described(), display=Display(), cohorts="stacked")
    counts: list[int] = []
    real = stacked.Stacked.flat_model

    def flat_model(self: stacked.Stacked, count: int) -> stacked.StackedModel:
        counts.append(count)
        return real(self, count)

    setup = prepare.prepare(described())
    assert isinstance(setup.executor, InProcess)
    monkeypatch.setattr(stacked, "MEMORY", 4 * stacked.bytes_per_device(setup.executor))
    monkeypatch.setattr(stacked.Stacked, "flat_model", flat_model)
    cut = fedcluster.run(described(), display=Display(), cohorts="stacked")
    assert set(counts) == {4, 2}  # cohorts of six
    for found, expected in zip(cut.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def noisy(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, classes))


def normed(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, classes))


@pytest.mark.parametrize("model", [noisy, normed])
def test_what_cannot_be_stacked_is_not(model: Any) -> None:
    display = Listen()
    result = fedcluster.run(described(model), display=display, cohorts="stacked")
    assert any("cannot be stacked" in text for text in display.said)
    plain = fedcluster.run(described(model), display=Display())
    assert result.history[-1]["train_loss"] == plain.history[-1]["train_loss"]


def test_auto_chooses_and_keeps_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    display = Listen()
    monkeypatch.setattr(stacked, "seconds", lambda executor, *_: 1.0 if isinstance(executor, stacked.Stacked) else 9.0)
    fedcluster.run(described("logistic"), tmp_path / "run", display=display, cohorts="auto")
    assert "cohorts are trained in stacks, which is faster here" in display.said
    (tmp_path / "run" / "model.safetensors").unlink()
    again = Listen()
    monkeypatch.setattr(stacked, "seconds", lambda executor, *_: 9.0 if isinstance(executor, stacked.Stacked) else 1.0)
    fedcluster.run(described("logistic"), tmp_path / "run", resume=True, display=again, cohorts="auto")
    assert not any("faster here" in text for text in again.said)  # a resumed run goes on as it began


def test_auto_measures() -> None:
    display = Listen()
    fedcluster.run(described("logistic"), display=display, cohorts="auto")
    assert len([text for text in display.said if "which is faster here" in text]) == 1


def test_a_device_that_is_not_there_is_named(here: Any, write_experiment: Any) -> None:
    code, _, said = here("run", write_experiment(), "--device", "cuda")
    if not torch.cuda.is_available():
        assert code == 2
        assert "--device cuda cannot be used here" in said
    code, _, said = here("run", write_experiment(), "--device", "toaster")
    assert code == 2
    assert "--device toaster cannot be used here" in said
