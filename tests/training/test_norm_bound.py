"""Finite poison: updates that move much too far are refused by name, and what they could still do is undone."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedcluster
from fedcluster.errors import Diverged
from fedcluster.fleet.schedule import Cycle
from fedcluster.models.kernels import vectors
from fedcluster.runs import checkpoint
from fedcluster.runs.ledger import Ledger
from fedcluster.runs.metrics import Record
from fedcluster.runs.progress import Display
from fedcluster.state import NORM_WINDOW, State, Tensors, Update
from fedcluster.training import checkpoints
from fedcluster.training import loop as training
from fedcluster.training import setup as prepare
from fedcluster.training.callbacks import CallbackList, Progress
from fedcluster.training.executors.in_process import DeviceStates, InProcess
from fedcluster.training.norm_bound import Norms
from fedcluster.training.threads import repeatable

EXPERIMENT = fedcluster.Experiment(
    rounds=4,
    fleet={"devices": 6, "samples": 40},
    clusters={"count": 2, "participation": 1.0, "order": "cyclic"},
    model={"name": "logistic"},
    local={"steps": 5, "batch": 10, "lr": 0.1},
)


class Remember(Display):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def test_a_regression_in_large_units_is_not_refused_in_its_first_cycle() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 4)).astype(np.float32)
    y = (x @ np.array([30.0, -20, 10, 5]) + 40).astype(np.float32)  # minutes, say
    devices = np.repeat(np.arange(6), 40)
    data = fedcluster.Dataset(x[:240], y[:240], x[240:], y[240:], device_train=devices, target="number")
    keys = {"data": {"name": data}, "fleet": {"partition": "natural"}, "rounds": 5}
    history = fedcluster.run(EXPERIMENT.override(**keys), display=Display()).history
    assert history[-1]["refused"] == 0
    assert history[-1]["test_rmse"] < 10


@pytest.mark.parametrize("compiler", [True, False])
def test_squares(compiler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiler:
        monkeypatch.setattr(vectors, "fits", lambda _: False)
    for n in (0, 1, 31, 4097, 10_000):
        v, origin = torch.randn(n), torch.randn(n)
        assert vectors.sum_of_squares(v, origin) == pytest.approx(float((v.double() - origin).square().sum()), rel=1e-5)
        assert vectors.sum_of_squares(v) == pytest.approx(float(v.double().square().sum()), rel=1e-5)
    for huge in (3.3e38, -3.3e38):
        v = torch.tensor([1.0, huge] * 3000)
        assert vectors.sum_of_squares(v, -v) == pytest.approx(3000 * (2 * 3.3e38) ** 2, rel=1e-5)
    for bad in (math.nan, math.inf, -math.inf):
        assert not math.isfinite(vectors.sum_of_squares(torch.tensor([1.0] * 50 + [bad]), torch.ones(51)))


def bounds(model: Tensors, past: dict[str, tuple[float, ...]], bound: float = 10.0) -> Norms:
    return Norms(bound, State(model["model"], norms=past), model, model, lr=0.5, steps=4)


def test_the_bound_is_ten_times_the_median_and_never_below_the_length_of_the_model() -> None:
    model = {"model": torch.tensor([3.0, 4.0]), "gradient": torch.zeros(2)}
    first = 5 + 0.5 * 4 * math.sqrt(2)  # ||W|| + lr E sqrt(n)
    assert bounds(model, {}).limits == pytest.approx({"model": 10 * first, "gradient": 10 * first / 0.5})
    past = {"model": (1.0, 2.0, 900.0), "gradient": (0.1, 0.2)}
    assert bounds(model, past).limits == {"model": 20.0, "gradient": 10.0}
    assert bounds(model, {"model": (0.0, 0.01)}).limits["model"] == pytest.approx(10 * first)  # nobody has moved
    assert bounds(model, {"model": (0.01,)}).limits["model"] == 5.0
    assert bounds(model, past, math.inf).limits == {"model": math.inf, "gradient": math.inf}
    own = {"model": torch.ones(2), "of one's own": torch.ones(1)}
    assert bounds(own, {}).limits["of one's own"] == math.inf  # its scale is not known yet

    found = bounds(model, past)
    far = model["model"] + torch.tensor([30.0, 0.0])
    assert found.fault(7, {"model": far, "gradient": torch.zeros(2)}) == (
        "model: moved by 30, more than the 20 that accept.norm_bound allows"
    )
    near = {"model": model["model"] + torch.tensor([0.0, 6.0]), "gradient": torch.tensor([0.3, 0.4])}
    assert found.fault(8, near) is None
    bad = {"model": model["model"], "gradient": torch.tensor([0.0, math.nan])}
    assert found.fault(9, bad) == "gradient: not finite"
    assert found.kept == {8: pytest.approx({"model": 6.0, "gradient": 0.5})}
    after = found.after(found.kept)
    assert after == {"model": (*past["model"], 6.0), "gradient": pytest.approx((0.1, 0.2, 0.5))}
    assert len(bounds(model, {"model": (1.0,) * NORM_WINDOW}).after(found.kept)["model"]) == NORM_WINDOW
    assert found.furthest({8: {"model": 6.0, "gradient": 0.25}}) == [(3.0, 8)]


class Poisoned(InProcess):
    """Devices of which some do what `poison` does to their messages."""

    poison: Any = None

    def train(self, cycle: Cycle, received: Tensors, phase: int, device_states: DeviceStates) -> Iterator[Update]:
        for honest in super().train(cycle, received, phase, device_states):
            message = type(self).poison(honest, cycle) or honest.message
            yield Update(honest.device, honest.round, honest.cycle, message)


def poisoned(experiment: fedcluster.Experiment, poison: Any) -> tuple[State, Record, list[str]]:
    setup, display = prepare.prepare(experiment), Remember()
    old = setup.executor
    assert isinstance(old, InProcess)
    kind = type("Kind", (Poisoned,), {"poison": staticmethod(poison)})
    assert setup.partition is not None
    executor = kind(old.trainer, old.dataset, setup.partition)
    setup = replace(setup, executor=executor)
    record = Record(Ledger(setup.devices))
    with repeatable():
        state = training.train(setup, record, setup.start, CallbackList([Progress(display)]))
        return state, record, display.said


def scaled(round: int, *names: str) -> Any:
    """Device 3 sends these parts times a million, once."""

    def poison(honest: Update, cycle: Cycle) -> Tensors | None:
        if honest.device != 3 or cycle.round != round:
            return None
        return honest.message | {name: honest.message[name] * 1e6 for name in names if name in honest.message}

    return poison


def huge(honest: Update, cycle: Cycle) -> Tensors | None:
    """Device 3 sends the largest numbers that there are, in the second round."""
    model = torch.full_like(honest.message["model"], 3.3e38)
    return {"model": model} if honest.device == 3 and cycle.round == 1 else None


@pytest.mark.parametrize("round", [0, 2])
@pytest.mark.parametrize(
    ("local", "part"),
    [
        ({}, "model"),
        ({"optimizer": "adam", "lr": 0.01}, "model"),
        ({"algorithm": "scaffold"}, "variate"),
        ({"algorithm": "fedsvrg"}, "gradient"),
    ],
)
def test_a_millionfold_update_is_refused_and_harms_nothing(round: int, local: dict[str, Any], part: str) -> None:
    experiment = EXPERIMENT.override(**{f"local.{key}": value for key, value in local.items()})
    _, record, said = poisoned(experiment, scaled(round, part))
    honest = fedcluster.run(experiment, display=Display()).history
    ((found, ((device, why),)),) = [(turn["round"], turn["reasons"]) for turn in record.cycles if turn["refused"]]
    assert (found, device) == (round + 1, 3)
    assert why.startswith(f"{part}: moved by")
    assert any("refused the update of device 3" in text for text in said)
    assert record.history[-1]["train_loss"] == pytest.approx(honest[-1]["train_loss"], rel=0.1)


def test_alone_in_its_round_a_device_that_is_refused_does_not_end_the_run() -> None:
    experiment = EXPERIMENT.override(**{"clusters.count": 1, "clusters.participation": 0.1, "rounds": 12})

    def poison(honest: Update, cycle: Cycle) -> Tensors | None:
        return {"model": torch.full_like(honest.message["model"], 3.3e38)} if honest.device == 3 else None

    _, record, _ = poisoned(experiment, poison)
    turns = [turn["changed"] for turn in record.cycles if turn["cohort"] == [3]]
    assert turns
    assert not any(turns)
    assert record.history[-1]["train_loss"] < record.history[0]["train_loss"]


def test_without_a_bound_a_cycle_whose_result_is_not_finite_is_undone() -> None:
    """The server's optimizer squares the movement, which float32 cannot hold."""
    experiment = EXPERIMENT.override(**{"accept.norm_bound": "off", "server.optimizer": "adam", "server.lr": 0.1})
    state, record, said = poisoned(experiment, huge)
    (turn,) = [turn for turn in record.cycles if "undone" in turn]
    assert (turn["round"], turn["changed"], turn["refused"]) == (2, False, 0)
    (text,) = [text for text in said if "undone" in text]
    expected = f"round 2, cycle {turn['cycle']}: the new model is not finite, so the cycle is undone; the update of "
    assert text.startswith(f"{expected}device 3 in cycle {turn['cycle']} moved furthest")
    assert torch.isfinite(state.model).all()
    assert record.history[-1]["train_loss"] < record.history[0]["train_loss"]


def test_honest_devices_are_not_refused_when_most_have_nothing_left_to_learn() -> None:
    """Near convergence some move hundreds of times as far as the median."""
    experiment = EXPERIMENT.override(
        **{
            "rounds": 60,
            "fleet": {"devices": 60, "samples": 5, "partition": "iid"},
            "clusters": {"count": 6, "participation": 0.3},
            "model.name": "mlp",
            "local.lr": 0.3,
        }
    )
    history = fedcluster.run(experiment, display=Display()).history
    assert history[-1]["refused"] == 0
    assert history[-1]["train_loss"] < 0.01


def test_what_was_stored_of_a_diverged_round_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Poison that the bound would have stopped leaves a finite model whose loss is not: the run ends, names the device,
    and resumed it begins that round anew. This time the device is honest."""
    monkeypatch.setattr(checkpoints, "SAVE_EVERY", 0.0)
    monkeypatch.setattr(checkpoints, "SAVE_SHARE", 0)
    experiment = EXPERIMENT.override(**{"accept.norm_bound": "off", "clusters.count": 3, "model.name": "mlp"})
    train = InProcess.train

    def bad(self: InProcess, cycle: Cycle, *arguments: Any) -> Iterator[Update]:
        for honest in train(self, cycle, *arguments):
            factor = 1e38 if honest.device == 3 and cycle.round == 2 else 1
            yield Update(honest.device, honest.round, honest.cycle, {"model": honest.message["model"] * factor})

    with monkeypatch.context() as patch:
        patch.setattr(InProcess, "train", bad)
        with pytest.raises(
            Diverged, match=r"round 3: the loss is not finite.*; the update of device 3 in cycle \d moved furthest"
        ):
            fedcluster.run(experiment, tmp_path / "run", display=Display())
    stored = checkpoint.names(tmp_path / "run" / "checkpoint")
    assert stored
    assert max(path.stem for path in stored) <= "00000002-000000"
    fedcluster.run(experiment, tmp_path / "run", resume=True, display=Display())
    fedcluster.run(experiment, tmp_path / "whole", display=Display())
    finished = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "whole")]
    assert finished[0] == finished[1]
