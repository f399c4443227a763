"""Secure aggregation in simulation: the same model to the bit, and what is refused."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from numpy.random import Generator

import fedcluster
from fedcluster.errors import BadExperiment
from fedcluster.fleet.schedule import Cycle
from fedcluster.runs.ledger import Ledger
from fedcluster.runs.metrics import Record
from fedcluster.state import State, Tensors, Update
from fedcluster.training.executors.choice import choose_executor
from fedcluster.training.executors.in_process import DeviceStates, InProcess
from fedcluster.training.loop import train
from fedcluster.training.setup import Setup, prepare

BASE: dict[str, Any] = {
    "rounds": 2,
    "fleet": {"devices": 24, "samples": 20, "partition": "quantity", "test_share": 0.0},
    "clusters": {"count": 2, "participation": 0.5},
    "model": {"name": "logistic"},
    "local": {"steps": 3, "lr": 0.2},
}


def run(secure: bool, workers: int = 1, **keys: Any) -> fedcluster.Result:
    privacy = {"privacy": {"secure_aggregation": True}} if secure else {}
    return fedcluster.run(fedcluster.Experiment(**BASE | keys | privacy), workers=workers)


def same(one: fedcluster.Result, other: fedcluster.Result) -> bool:
    states = one.model.state_dict(), other.model.state_dict()
    return states[0].keys() == states[1].keys() and all(
        torch.equal(states[0][name], states[1][name]) for name in states[0]
    )


class Scale(fedcluster.UpdateTransform):
    """Different on every device, and again on the server."""

    def on_device(self, upload: Tensors, received: Tensors, rng: Generator) -> Tensors:
        return {name: tensor * float(rng.uniform(0.9, 1.1)) for name, tensor in upload.items()}

    def on_aggregate(self, aggregate: Tensors, received: Tensors, rng: Generator) -> Tensors:
        return {name: tensor * 0.5 for name, tensor in aggregate.items()}


def half_frozen(shape: tuple[int, ...], outputs: int) -> torch.nn.Module:
    """A model of which only the last layer is trained."""
    layers = torch.nn.Linear(64, 16), torch.nn.Linear(16, outputs)
    layers[0].requires_grad_(False)
    return torch.nn.Sequential(torch.nn.Flatten(), layers[0], torch.nn.ReLU(), layers[1])


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"algorithm": {"name": "scaffold"}, "server": {"optimizer": "adam"}},
        {"algorithm": {"name": "mime"}, "local": {"steps": 3, "lr": 0.2, "optimizer": "momentum"}},
        {"transforms": [Scale()]},
        {"server": {"optimizer": "round_momentum"}, "model": {"name": f"{__name__}:half_frozen"}},
        {"clusters": {"count": 2, "participation": 0.5, "weighting": "sample"}},
        {"clock": {"dropout": 0.2, "over_select": 1.3}, "fleet": {"devices": 24, "samples": 20}},
    ],
    ids=["fedavg", "scaffold", "mime", "transforms", "momentum, frozen", "weighting", "clock"],
)
def test_the_model_is_that_of_an_ordinary_run_to_the_bit(keys: dict[str, Any]) -> None:
    plain, secure = run(False, **keys), run(True, **keys)
    assert same(plain, secure)
    counts = [
        {key: line[key] for key in ("uploads", "downloads", "refused")}
        for line in (plain.history[-1], secure.history[-1])
    ]
    assert counts[0] == counts[1]
    assert plain.history[-1]["bytes_up"] < secure.history[-1]["bytes_up"]


def test_worker_processes_change_nothing() -> None:
    assert same(run(True), run(True, workers=2))


class Faulty:
    """Some devices of a cohort do not answer, and one sends what is not a number."""

    def __init__(self, here: InProcess, lost: int) -> None:
        self.here, self.lost = here, lost

    def train(self, cycle: Cycle, received: Tensors, phase: int, device_states: DeviceStates) -> Iterator[Update]:
        for position, update in enumerate(self.here.train(cycle, received, phase, device_states)):
            if position == self.lost:
                update.message["model"][3] = float("nan")
            if position >= self.lost:
                yield update

    def close(self) -> None:
        pass


def faulty(secure: bool, lost: int) -> tuple[State, Record]:
    keys: dict[str, Any] = BASE | {"rounds": 1, "privacy": {"secure_aggregation": secure, "threshold": 0.5}}
    setup: Setup = prepare(fedcluster.Experiment(**keys))
    assert isinstance(setup.executor, InProcess)
    setup = choose_executor(replace(setup, executor=setup.executor), 1, "sequential")
    broken = Faulty(setup.executor, lost)  # type: ignore[arg-type]
    setup = replace(setup, executor=broken)
    if setup.secure is not None:
        setup.secure.executor = broken  # type: ignore[attr-defined]
    record = Record(Ledger(setup.devices))
    return train(setup, record, setup.start), record


def test_devices_that_go_away_or_withdraw_are_missing_from_the_sum() -> None:
    (plain, before), (secure, record) = faulty(False, 1), faulty(True, 1)
    assert torch.equal(plain.model, secure.model)
    assert not torch.equal(plain.model, torch.zeros_like(plain.model))
    for ours, theirs in zip(record.cycles, before.cycles, strict=True):
        assert {key: ours[key] for key in ("missing", "reasons")} == {
            key: theirs[key] for key in ("missing", "reasons")
        }
        assert ours["reasons"][0][1] == "model: not finite"


def test_a_cycle_that_too_few_devices_finish_leaves_the_model_as_it_is() -> None:
    state, record = faulty(True, 3)  # of six, of whom four are necessary
    assert [line["no_sum"] for line in record.cycles] == [
        "no secure sum: 2 of 6 devices have sent masked updates, and a sum needs at least 4"
    ] * 2
    assert not any(line["changed"] for line in record.cycles)
    assert torch.equal(state.model, prepare(fedcluster.Experiment(**BASE)).start.model)


def test_a_device_that_would_be_most_of_the_sum_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    """The share of a device's weight is a limit of its own: with unequal samples a cohort may be too small for it."""
    unequal = {"devices": 24, "samples": 20, "partition": "quantity", "sigma": 3.0}
    run(True, fleet=unequal)
    assert "% of the sum's weight, and takes part up to 50%" in capsys.readouterr().err


class OnServer(fedcluster.UpdateTransform):
    def on_server(self, upload: Tensors, received: Tensors, rng: Generator) -> Tensors:
        return upload


class First:
    """An aggregator that takes the first update."""

    def __init__(self, spec: Tensors, options: object, rng: object) -> None:
        pass

    def accumulate(self, message: Tensors, weight: float, device: int = 0) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"aggregation": {"name": First}}, "compares them"),
        ({"algorithm": {"name": "fednova"}}, '"fednova" weights or scales each of them there'),
        ({"transforms": [OnServer()]}, "the transform OnServer changes each of them there"),
        ({"clusters": {"method": "balanced", "count": 2, "features": "gradients"}}, "needs the gradients of each"),
        ({"clusters": {"method": "major_class", "count": 2}, "fleet": {"devices": 24}}, "needs the labels of each"),
        ({"clusters": {"count": 8, "participation": 0.5}}, "the smallest has 1 .a sum of two tells each"),
        (
            {"privacy": {"secure_aggregation": True, "min_cohort": 7}},
            "at least 7 devices .privacy.min_cohort., and the",
        ),
        ({"method": "centralized"}, 'method = "centralized" has none'),
    ],
)
def test_what_needs_single_updates_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(BadExperiment, match=message):
        prepare(fedcluster.Experiment(**BASE | {"privacy": {"secure_aggregation": True}} | keys))


def test_it_is_not_possible_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = fedcluster.Experiment(**BASE, privacy={"secure_aggregation": True})
    monkeypatch.setattr("fedcluster.training.executors.choice.is_distributed", lambda: True)
    with pytest.raises(BadExperiment, match="not possible under torchrun"):
        choose_executor(prepare(experiment), 1, "sequential")
