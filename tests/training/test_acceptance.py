"""Nothing unfit reaches the average."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedcluster
from fedcluster.errors import BudgetExceeded, Diverged
from fedcluster.fleet.schedule import Cycle
from fedcluster.runs.ledger import Ledger
from fedcluster.runs.metrics import Record, read_lines
from fedcluster.state import Tensors, Unsent, Update
from fedcluster.training import loop as training
from fedcluster.training import setup as prepare
from fedcluster.training.acceptance import accept
from fedcluster.training.callbacks import CallbackList
from fedcluster.training.executors.in_process import DeviceStates, InProcess
from fedcluster.training.recorder import Recorder

CYCLE = Cycle(
    round=4,
    cycle=1,
    cluster=0,
    cohort=np.array([2, 5, 7]),
    weights=np.array([0.1, 0.2, 0.3]),
    samples=np.array([1, 2, 3]),
)
FORM = {"model": torch.zeros(3)}


def update(device: int = 2, round: int = 4, cycle: int = 1, **message: Any) -> Update:
    return Update(device, round, cycle, message or {"model": torch.ones(3)})


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (update(device=3), "not of this cohort"),
        (update(round=3), "for round 3, cycle 1"),
        (update(cycle=0), "for round 4, cycle 0"),
        (update(model=torch.tensor([1.0, float("nan"), 0])), "not finite"),
        (update(model=torch.tensor([1.0, float("-inf"), 0])), "not finite"),
        (update(model=torch.ones(1)), "wrong shape or type"),
        (update(model=torch.ones(3, 1)), "wrong shape or type"),
        (update(model=torch.ones(3, dtype=torch.float64)), "wrong shape or type"),
        (update(model=np.ones(3, np.float32)), "wrong shape or type"),
        (update(model=torch.ones(3), more=torch.ones(3)), "wrong names"),
        (update(weights=torch.ones(3)), "wrong names"),
    ],
)
def test_bad_updates_are_refused_with_a_reason(bad: Update, reason: str) -> None:
    refused: list[str] = []
    accepted = list(accept([bad, update(5)], CYCLE, FORM, lambda _, why, diverged: refused.append(why)))
    assert [a.device for a in accepted] == [5]
    assert accepted[0].weight == pytest.approx(0.2 / 0.6)
    assert len(refused) == 1
    assert reason in refused[0]


def test_an_update_counts_once_and_a_bad_one_may_be_followed_by_a_good_one() -> None:
    refused: list[str] = []
    bad = update(model=torch.full((3,), float("inf")))
    accepted = list(accept([bad, update(), update()], CYCLE, FORM, lambda _, why, diverged: refused.append(why)))
    assert [a.device for a in accepted] == [2]
    assert refused == ["model: not finite", "a second time"]


class Attacked(InProcess):
    """Some devices send nonsense, some send nothing."""

    nonsense: tuple[int, ...] = (0, 1, 2)
    silent: tuple[int, ...] = (3, 4)

    def train(self, cycle: Cycle, received: Tensors, phase: int, device_states: DeviceStates) -> Iterator[Update]:
        for honest in super().train(cycle, received, phase, device_states):
            if honest.device in self.nonsense:
                yield Update(
                    honest.device, honest.round, honest.cycle, {"model": honest.message["model"] * float("nan")}
                )
                yield Update(99, honest.round, honest.cycle, honest.message)
            elif honest.device not in self.silent:
                yield honest
                yield honest


def experiment(**clusters: Any) -> fedcluster.Experiment:
    return fedcluster.Experiment(
        rounds=2,
        fleet={"devices": 10, "samples": 20},
        clusters={"count": 2, "participation": 1.0, "order": "cyclic"} | clusters,
        model={"name": "logistic"},
        local={"steps": 2},
    )


def attacked(described: fedcluster.Experiment, kind: type[InProcess]) -> tuple[torch.Tensor, Record]:
    setup = prepare.prepare(described)
    old = setup.executor
    assert isinstance(old, InProcess)
    assert setup.partition is not None
    executor = kind(old.trainer, old.dataset, setup.partition)
    setup = replace(setup, executor=executor)
    record = Record(Ledger(setup.devices))
    return training.train(setup, record, setup.start).model, record


def test_the_model_is_the_average_of_those_who_are_left() -> None:
    class OnlyHonest(InProcess):
        def train(self, cycle: Cycle, received: Tensors, phase: int, device_states: DeviceStates) -> Iterator[Update]:
            gone = Attacked.nonsense + Attacked.silent
            return (u for u in super().train(cycle, received, phase, device_states) if u.device not in gone)

    model, record = attacked(experiment(), Attacked)
    honest, _ = attacked(experiment(), OnlyHonest)
    assert torch.equal(model, honest)
    counts = record.history[-1]
    assert counts["refused"] == 2 * (3 * 2 + 5)  # a round: three times nonsense and a stranger, five times twice
    assert counts["downloads"] == 20
    assert counts["uploads"] == 2 * 8
    reasons = {why for turn in record.cycles for _, why in turn["reasons"]}
    assert reasons == {"model: not finite", "not of this cohort", "a second time"}


def test_a_cycle_without_updates_leaves_the_model() -> None:
    class DarkCluster(InProcess):
        def train(self, cycle: Cycle, received: Tensors, phase: int, device_states: DeviceStates) -> Iterator[Update]:
            return super().train(cycle, received, phase, device_states) if cycle.cluster == 0 else iter(())

    _, record = attacked(experiment(), DarkCluster)
    assert record.history[-1]["aggregations"] == 2  # of four cycles


def test_a_round_in_which_every_cycle_fails_is_taken_again_from_where_it_began(tmp_path: Path) -> None:
    """With SCAFFOLD, whose devices keep something. In the second round one device answers where two are needed, and the
    others cannot be reached; then all are back."""

    class ServerUnavailable(InProcess):
        left = 2  # cycles

        def train(self, cycle: Cycle, received: Tensors, phase: int, device_states: DeviceStates) -> Iterator[Any]:
            if cycle.round != 1 or not self.left:
                yield from super().train(cycle, received, phase, device_states)
                return
            self.left -= 1
            here = cycle.cohort[: 1 - cycle.cycle]
            for k in cycle.cohort[len(here) :].tolist():
                yield Unsent(k)
            yield from super().train(replace(cycle, cohort=here), received, phase, device_states)

    described = experiment().override(**{"local.algorithm": "scaffold"})
    states, records = [], []
    for kind in (InProcess, ServerUnavailable):
        setup = replace(prepare.prepare(described), min_updates=2)
        old = setup.executor
        assert isinstance(old, InProcess)
        assert setup.partition is not None
        executor = kind(old.trainer, old.dataset, setup.partition)
        (tmp_path / kind.__name__).mkdir()
        records.append(Record(Ledger(setup.devices)))
        with closing(Recorder(tmp_path / kind.__name__, repeats=True)) as recorder:
            setup = replace(setup, executor=executor)
            states.append(training.train(setup, records[-1], setup.start, CallbackList([recorder])))
    assert torch.equal(states[0].model, states[1].model)
    kept = [[one["variate"] for _, one in sorted(state.devices.items())] for state in states]
    assert torch.equal(torch.stack(kept[0]), torch.stack(kept[1]))
    turns = [[(turn["round"], turn["cycle"], turn["changed"]) for turn in one.cycles] for one in records]
    assert turns[1] == turns[0] == [(1, 0, True), (1, 1, True), (2, 0, True), (2, 1, True)]
    assert read_lines(tmp_path / "ServerUnavailable/cycles.jsonl") == records[1].cycles
    plain, disturbed = (one.history[-1] for one in records)
    assert (disturbed["downloads"], disturbed["uploads"]) == (plain["downloads"] + 1, plain["uploads"] + 1)
    assert disturbed["bytes_down"] == plain["bytes_down"] * 21 // 20


def test_a_round_of_nonsense_ends_the_run() -> None:
    class Broken(Attacked):
        nonsense = tuple(range(10))

    with pytest.raises(Diverged, match=r"round 1: every update was refused .* lower local\.lr"):
        attacked(experiment(), Broken)


def test_the_ledger_refuses_a_second_download_or_upload() -> None:
    ledger = Ledger(10)
    ledger.send(CYCLE, FORM)
    list(ledger.receive([update(5)], CYCLE, FORM))
    later = Cycle(4, 2, 1, np.array([5, 8]), np.array([0.1, 0.1]), np.ones(2))
    with pytest.raises(BudgetExceeded, match="device 5 would download a second time in round 5"):
        ledger.send(later, FORM)
    with pytest.raises(BudgetExceeded, match="device 5 would upload a second time"):
        list(ledger.receive([update(5, cycle=2)], later, FORM))
    ledger.send(Cycle(5, 0, 1, np.array([5]), np.array([0.1]), np.ones(1)), FORM)
    assert ledger.downloads[5] == 2
    assert ledger.counts["bytes_down"] == 4 * 12
