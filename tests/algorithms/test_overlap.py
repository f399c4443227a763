"""Overlapping cycles: against an independent reading in NumPy, on the clock, and when a run is interrupted."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedcluster
from fedcluster.algorithms import overlap
from fedcluster.errors import BadExperiment
from fedcluster.experiment import Fleet, Local, sections
from fedcluster.fleet import fleet as fleets
from fedcluster.fleet.clock import Clock
from fedcluster.fleet.fleet_file import DeviceTable
from fedcluster.fleet.schedule import Cycle
from fedcluster.rng import stream
from fedcluster.runs.ledger import Ledger
from fedcluster.runs.metrics import Record
from fedcluster.runs.progress import Display
from fedcluster.state import Aggregate, State, Time
from fedcluster.training.loop import train as train_all
from fedcluster.training.setup import prepare
from tests.algorithms.test_algorithms import softmax
from tests.algorithms.test_round_momentum import DATA, LR, SLIDING, STEPS, experiment, lines, run
from tests.fleet.test_fleet import dataset
from tests.reference_algorithms import softmax_regression
from tests.reference_overlap import train, version
from tests.runs.test_resume import essence, stop_and_resume

ROWS = {k: np.flatnonzero(DATA["device_train"] == k) for k in range(10)}
BATCH = 6


def overlapping(folder: Path, depth: int, order: str = "reshuffle", **keys: Any) -> fedcluster.Experiment:
    return experiment(folder, clusters_keys={"overlap": depth, "order": order}, **keys)


def read_again(method: str, out: Path, depth: int, steps: tuple[int, int] = (STEPS, STEPS)) -> np.ndarray:
    cohorts = [line["cohort"] for line in lines(out)]

    def batches(t: int, k: int) -> list[Any]:
        j, K = divmod(t, 3)
        E = steps[0] if steps[0] == steps[1] else int(stream(0, "steps", round=j, device=k).integers(*steps) + 0)
        return list(ROWS[k][stream(0, "batch", j, K, k).integers(len(ROWS[k]), size=(E, BATCH))])

    def gradient(k: int, w: np.ndarray, batch: Any) -> np.ndarray:
        return softmax_regression(w, DATA["x_train"][batch].astype(np.float64), DATA["y_train"][batch])

    start = torch.cat([p.detach().flatten() for p in softmax((5,), 3).parameters()]).double().numpy()
    weight = {k: float(len(rows)) for k, rows in ROWS.items()}
    return train(method, cohorts, depth, start, gradient, batches, ROWS.__getitem__, weight, LR)[-1]


METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "scaffold": {"algorithm": {"name": "scaffold"}},
    "fednova": {"algorithm": {"name": "fednova"}, "local": {"steps": [2, 6], "batch": BATCH, "lr": LR}},
    "avgm": {"server": {"optimizer": "avgm", "betas": [0.5, 0.9]}},
    "ghbm": {"algorithm": {"name": "ghbm", "beta": 0.5}},
    "mimelite": {"algorithm": {"name": "mimelite"}, "local": {"optimizer": "momentum", "momentum": 0.5}},
}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_agrees_with_numpy(method: str, depth: int, tmp_path: Path) -> None:
    described = overlapping(tmp_path, depth).override(**METHODS[method])
    ours = run(described, tmp_path / "run")
    steps = (2, 7) if method == "fednova" else (STEPS, STEPS)
    np.testing.assert_allclose(ours, read_again(method, tmp_path / "run", depth, steps), rtol=2e-5, atol=2e-6)
    fresh = read_again(method, tmp_path / "run", 0, steps)
    assert not np.allclose(ours, fresh, rtol=1e-3), "staleness changes the result"


def test_a_device_takes_part_in_one_cycle_at_a_time(tmp_path: Path) -> None:
    run(overlapping(tmp_path, 2, rounds=20), tmp_path / "run")
    found = lines(tmp_path / "run")
    cohorts = [line["cohort"] for line in found]
    versions = [t - line.get("staleness", 0) for t, line in enumerate(found)]
    assert versions == [version(cohorts, t, 2) for t in range(len(cohorts))]
    waited = [t for t in range(2, len(cohorts)) if versions[t] > t - 2]
    assert waited, "clusters come again within two cycles of the next round"
    for p, t in combinations(range(len(cohorts)), 2):
        assert versions[t] > p or not set(cohorts[p]) & set(cohorts[t])


def test_without_shared_devices_every_cycle_is_as_stale_as_asked(tmp_path: Path) -> None:
    run(overlapping(tmp_path, 2, order="cyclic"), tmp_path / "run")
    assert [line.get("staleness", 0) for line in lines(tmp_path / "run")] == [0, 1] + [2] * 16


def test_running_statistics_are_averages() -> None:
    """A difference could make a variance negative."""
    state, old = State(torch.tensor([5.0, 0.1]), size=1), torch.tensor([2.0, 9.0])
    nobody = np.zeros(0, np.int64)
    cycle = Cycle(0, 1, 0, nobody, np.zeros(0), nobody, staleness=1)
    moved = overlap.move(Aggregate({"model": torch.tensor([3.0, 1.0])}, 1.0), state, cycle, {"model": old})
    assert moved.message["model"].tolist() == [6.0, 1.0]


# On the clock


def test_cycles_on_the_clock_by_hand() -> None:
    """Devices need 10, 20, 40 and 5 seconds. Cycle 1 starts with cycle 0, cycle 2 when cycle 0 is over, cycle 3 when
    cycle 1 is; cycle 3 is ready at 25 s and is applied after cycle 2."""
    fleet, _ = fleets.build(Fleet(devices=4, samples=50), dataset(), 0)
    known = DeviceTable(seconds_per_sample=np.array([0.2, 0.4, 0.8, 0.1]))
    timed = Clock(sections.Clock(), replace(fleet, known=known), Local(steps=10, batch=5), seed=0, down=0, up=0)
    time, opened, over = Time(past=(0,)), [], []
    for t in range(4):
        cohort = np.array([t])
        cycle = Cycle(0, t, t, cohort, np.ones(1), np.full(1, 50), wanted=1, staleness=min(t, 1))
        outcome = timed.outcome(cycle, time)
        time = outcome.time
        opened.append(outcome.opened / 1000)
        over.append(time.now / 1000)
    assert opened == [0, 0, 10, 20]
    assert over == [10, 20, 50, 50]
    assert time.idle == 0


def test_overlap_saves_time_and_runs_no_more_than_asked_at_once(tmp_path: Path) -> None:
    seconds = {}
    for depth in (0, 2, 9):
        keys = {
            "data": {"name": "digits"},
            "fleet": {"world": "diurnal", "devices": 60, "samples": 20},
            "clusters": {"overlap": depth, "participation": 0.3},
            "model": {"name": "logistic"},
            "local": {"steps": 1, "batch": 5},
        }
        out = tmp_path / str(depth)
        fedcluster.run(fedcluster.Experiment(rounds=3, clock={}, **keys), out, display=Display())
        found = lines(out)
        seconds[depth] = found[-1]["simulated_seconds"]
        begun = [line["opened"] for line in found]
        ended = [line["simulated_seconds"] for line in found]
        assert ended == sorted(ended)
        for t, line in enumerate(found):
            version = t - line.get("staleness", 0)
            assert begun[t] == (ended[version - 1] if version else 0.0)
            running = [p for p in range(len(found)) if begun[p] < ended[t] and begun[t] < ended[p] and p < t]
            assert len([p for p in running if p >= version]) <= depth
    assert seconds[9] < seconds[2] < seconds[0]


# Where devices are elsewhere


class Elsewhere:
    """Trains in this process when it is asked for the updates, with what the cohort was sent when it began."""

    def __init__(self, here: Any) -> None:
        self.here, self.under_way, self.most = here, dict[int, Any](), list[int]()

    def begin(self, cycle: Cycle, received: Any, device_states: Any) -> None:
        t = 3 * cycle.round + cycle.cycle
        if t not in self.under_way:
            busy = {k for other, _ in self.under_way.values() for k in other.cohort}
            assert not busy & set(cycle.cohort)
            self.under_way[t] = cycle, {name: tensor.clone() for name, tensor in received.items()}

    def train(self, cycle: Cycle, received: Any, phase: int, device_states: Any) -> Any:
        self.most.append(len(self.under_way))
        _, sent = self.under_way[3 * cycle.round + cycle.cycle]
        assert all(torch.equal(sent[name], tensor) for name, tensor in received.items())
        yield from self.here.train(cycle, sent, phase, device_states)
        del self.under_way[3 * cycle.round + cycle.cycle]

    def close(self) -> None: ...


@pytest.mark.parametrize("order", ["cyclic", "reshuffle"])
def test_cohorts_begin_as_soon_as_their_model_is_there(order: str, tmp_path: Path) -> None:
    described = overlapping(tmp_path, 2, order=order, algorithm={"name": "scaffold"})
    setup = prepare(described)
    elsewhere = Elsewhere(setup.executor)
    early = train_all(replace(setup, executor=elsewhere), Record(Ledger(setup.devices)), setup.start)
    assert early.model.tolist() == run(described, tmp_path / "run").tolist()
    last = [2, 1]  # no cohort of a seventh round begins
    if order == "cyclic":
        assert elsewhere.most == [3] * 16 + last
    else:
        assert max(elsewhere.most) == 3
        assert min(elsewhere.most[:16]) < 3


# What is kept survives


KEEPING: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "scaffold": {"algorithm": {"name": "scaffold"}},
    "ghbm and round momentum": {"algorithm": {"name": "ghbm"}, "server": SLIDING},
    "local_ghbm": {"algorithm": {"name": "local_ghbm"}},
    "clock": {"clock": {"dropout": 0.3}, "algorithm": {"name": "scaffold"}},
}


@pytest.mark.parametrize("name", KEEPING)
def test_a_run_stopped_within_a_round_ends_at_the_same_bytes(name: str, tmp_path: Path) -> None:
    described = overlapping(tmp_path, 2, **KEEPING[name])
    fedcluster.run(described, tmp_path / "whole", display=Display())
    stop_and_resume(described, tmp_path / "stopped", after=8)
    assert essence(tmp_path / "stopped") == essence(tmp_path / "whole")


def test_a_secure_sum_is_applied_as_a_mean_is(tmp_path: Path) -> None:
    plain = fedcluster.Experiment(
        rounds=2,
        data={"name": "digits"},
        fleet={"devices": 12, "samples": 20},
        clusters={"count": 3, "participation": 1.0, "overlap": 2},
        model={"name": "logistic"},
        local={"steps": 2, "batch": 5},
    )
    masked = plain.override(privacy={"secure_aggregation": True, "min_cohort": 3})
    one, other = (fedcluster.run(described, display=Display()).history for described in (plain, masked))
    assert [line["train_loss"] for line in one] == [line["train_loss"] for line in other]


@pytest.mark.parametrize("workers", [2, 4])
def test_workers_change_nothing(workers: int, tmp_path: Path) -> None:
    described = overlapping(tmp_path, 2, algorithm={"name": "scaffold"}, clock={"dropout": 0.2})
    fedcluster.run(described, tmp_path / "one", display=Display())
    fedcluster.run(described, tmp_path / "several", display=Display(), workers=workers)
    assert essence(tmp_path / "several") == essence(tmp_path / "one")


# What cannot overlap


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"clusters.overlap": 3}, "at most 2 of 3 clusters"),
        ({"privacy": {"noise_multiplier": 1.0, "delta": 0.01, "clip": 1.0}}, "accounting of"),
        ({"clusters.order": "balanced"}, "follows from all movements"),
        ({"algorithm.name": "mime"}, "mime exchanges messages 2 times"),
        ({"algorithm.name": "vrl_sgd"}, "vrl_sgd exchanges messages 2 times"),
        ({"algorithm": {"name": "scaffold", "reset": "round"}}, 'use "never"'),
        ({"algorithm.name": "mimelite", "local": {"optimizer": "momentum", "weight_decay": 0.1}}, "weight_decay"),
    ],
)
def test_what_cannot_overlap_is_refused(keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(BadExperiment, match=said):
        fedcluster.run(overlapping(tmp_path, 2).override(**keys), display=Display())


def test_centralized_training_does_not_overlap(tmp_path: Path) -> None:
    both = [overlapping(tmp_path, depth).override(method="centralized", rounds=2) for depth in (0, 2)]
    one, other = (fedcluster.run(described, display=Display()).history for described in both)
    assert one[-1]["train_loss"] == other[-1]["train_loss"]
