"""The clock: one small cycle by hand, bookkeeping that adds up, and runs that repeat and resume to the bit."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedcluster
from fedcluster.errors import BadExperiment
from fedcluster.experiment import Clusters, Fleet, Local, sections
from fedcluster.fleet import fleet as fleets
from fedcluster.fleet.availability import build
from fedcluster.fleet.clock import Clock, busy
from fedcluster.fleet.fleet_file import DeviceTable
from fedcluster.fleet.schedule import Cycle
from fedcluster.runs import checkpoint
from fedcluster.runs.metrics import Record
from fedcluster.runs.progress import Display
from fedcluster.state import Time
from fedcluster.training import checkpoints
from fedcluster.training.setup import prepare
from tests.fleet.test_fleet import dataset
from tests.runs.test_resume import Remember, essence

MEGABYTE = 1_000_000


def clock(known: DeviceTable, devices: int, local: Local | None = None, **options: Any) -> Clock:
    fleet, _ = fleets.build(Fleet(devices=devices, samples=50), dataset(), 0)
    given = local or Local(steps=10, batch=5)
    return Clock(sections.Clock(**options), replace(fleet, known=known), given, seed=3, down=MEGABYTE, up=2 * MEGABYTE)


def cycle(devices: int, wanted: int, j: int = 0) -> Cycle:
    return Cycle(j, 0, 0, np.arange(devices), np.full(devices, 1 / devices), np.full(devices, 50), wanted)


def test_a_turn_is_download_training_and_upload() -> None:
    known = DeviceTable(
        seconds_per_sample=np.array([0.1, 0.2]), down_mbps=np.array([8.0, 4.0]), up_mbps=np.array([16.0, 1.0])
    )
    assert clock(known, 2).work(0, np.arange(2)).tolist() == [1000 + 5000 + 1000, 2000 + 10_000 + 16_000]
    assert clock(known, 2, Local(steps=2, batch="full")).work(0, np.arange(2)).tolist() == [12_000, 38_000]
    assert clock(DeviceTable(), 2).work(0, np.arange(2)).tolist() == [0, 0]  # what is not known takes no time
    turn = clock(known, 2).outcome(cycle(2, wanted=2), Time(now=500))
    assert (turn.time.now, turn.reported.cohort.tolist()) == (28_500, [0, 1])  # as long as its slowest member


DAY_OF_THREE = (
    DeviceTable(  # seconds of work: 10, 20, 30, 40, 50; free: always, from 100 s, until 25 s, from 200 s, never
        seconds_per_sample=np.array([0.2, 0.4, 0.6, 0.8, 1.0]),
        availability=build(
            np.array([0, 1, 2, 3]),
            np.array([0, 100, 0, 200]) * 1000,
            np.array([1000, 1000, 25, 1000]) * 1000,
            np.full(5, 1_000_000),
        ),
    )
)


@pytest.mark.parametrize(
    ("wanted", "options", "over", "back", "lost", "late", "idle"),
    [
        (1, {}, 10, [0], [], [1, 2, 3, 4], 0),
        (2, {}, 120, [0, 1], [2], [3, 4], 75),  # device 2 was at it until 25 s, device 1 from 100 s on
        (3, {}, 240, [0, 1, 3], [2], [4], 155),
        (4, {}, 240, [0, 1, 3], [2], [4], 155),  # nobody is left to wait for
        (4, {"deadline": 130.0}, 130, [0, 1], [2], [3, 4], 85),
        (4, {"deadline": 500.0}, 500, [0, 1, 3], [2], [4], 415),  # the server waits for device 4
        (4, {"deadline": 20.0}, 20, [0], [], [1, 2, 3, 4], 0),
        (4, {"deadline": 500.0, "min_updates": 4}, 500, [], [2], [4], 415),  # failed, and on it goes
    ],
)
def test_a_cycle_by_hand(
    wanted: int, options: dict[str, Any], over: int, back: list[int], lost: list[int], late: list[int], idle: int
) -> None:
    turn = clock(DAY_OF_THREE, 5, **options).outcome(cycle(5, wanted), Time())
    assert turn.dropped is not None
    assert turn.stragglers is not None
    assert (turn.time.now, turn.time.idle) == (over * 1000, idle * 1000)
    assert (turn.reported.cohort.tolist(), turn.dropped.tolist(), turn.stragglers.tolist()) == (back, lost, late)
    assert (turn.time.dropped, turn.time.late) == (len(lost), len(late))
    assert turn.failed == (not back) == bool(turn.time.failed)
    assert turn.reported.weights.tolist() == [0.2] * len(back)


def test_time_goes_on_from_where_it_was() -> None:
    turn = clock(DAY_OF_THREE, 5).outcome(cycle(5, wanted=2), Time(now=1_000_000 + 190_000, idle=7, dropped=1))
    assert turn.reported.cohort.tolist() == [0, 1]  # in the second period, when device 2 has left again
    assert (turn.opened, turn.time) == (1_190_000, Time(now=1_210_000, idle=7, dropped=1, late=3))


def test_drop_outs_are_drawn_at_the_rate_asked_for() -> None:
    known = DeviceTable(seconds_per_sample=np.full(2000, 0.1))
    timed = clock(known, 2000, dropout=0.3)
    turns = [timed.outcome(cycle(2000, wanted=2000, j=j), Time()) for j in range(3)]
    shares = [turn.time.dropped / 2000 for turn in turns]
    assert all(0.27 < share < 0.33 for share in shares)
    assert len({tuple(turn.reported.cohort) for turn in turns}) == 3
    again = timed.outcome(cycle(2000, wanted=2000, j=1), Time())
    assert again.reported.cohort.tolist() == turns[1].reported.cohort.tolist()
    at_once = clock(DeviceTable(), 2000, dropout=0.3).outcome(cycle(2000, wanted=2000), Time())
    assert (at_once.time.dropped, at_once.time.now) == (turns[0].time.dropped, 0)  # work that takes no time is work


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 999),
    devices=st.integers(1, 12),
    wanted=st.integers(1, 12),
    deadline=st.one_of(st.none(), st.floats(0.5, 60)),
    now=st.integers(0, 200_000),
    dropout=st.sampled_from([0.0, 0.4]),
)
def test_everyone_asked_is_accounted_for(
    seed: int, devices: int, wanted: int, deadline: float | None, now: int, dropout: float
) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, 3 * devices + 1))
    owner, start = rng.integers(devices, size=count), rng.integers(0, 50_000, count)
    trace = build(owner, start, start + rng.integers(1, 30_000, count), np.full(devices, 50_000))
    known = DeviceTable(seconds_per_sample=rng.random(devices) * 0.3, availability=trace)
    timed = clock(known, devices, deadline=deadline, dropout=dropout)
    asked = cycle(devices, min(wanted, devices))
    turn = timed.outcome(asked, Time(now=now))
    assert turn.dropped is not None
    assert turn.stragglers is not None
    ended = turn.time.now
    groups = [turn.reported.cohort, turn.dropped, turn.stragglers]
    assert sorted(np.concatenate(groups)) == list(range(devices))
    assert len(turn.reported.cohort) <= asked.wanted
    assert now <= ended
    assert deadline is None or ended <= now + round(deadline * 1000)
    work = timed.work(0, np.arange(devices))
    for (
        k
    ) in turn.reported.cohort:  # free from its beginning to its end, by a search through all milliseconds that matter
        begin = int(trace.next_free(np.array([k]), now)[0])
        assert begin + work[k] <= ended
        assert trace.free_until(np.array([k]), begin)[0] >= begin + work[k]
        assert k in turn.started.cohort
    assert set(turn.dropped) <= set(turn.started.cohort)
    at_work = np.zeros(ended - now + 1, bool)
    leaves = np.minimum(trace.free_until(np.arange(devices), trace.next_free(np.arange(devices), now)), 2**60)
    if dropout == 0:
        for k in range(devices):
            begin = int(trace.next_free(np.array([k]), now)[0])
            if begin < ended:
                at_work[begin - now : min(ended, begin + int(work[k]), int(leaves[k])) - now] = True
        assert turn.time.idle == (ended - now) - at_work.sum()


def test_busy_is_the_length_of_the_union() -> None:
    assert busy(np.array([5, 0, 2, 20]), np.array([6, 3, 4, 25])) == 4 + 1 + 5
    assert busy(np.array([9]), np.array([4])) == 0


KEYS: dict[str, Any] = {
    "rounds": 5,
    "fleet": {"devices": 60, "samples": 30, "world": "diurnal"},
    "clusters": {"count": 4, "method": "timezone", "participation": 0.4, "order": "cyclic"},
    "model": {"name": "logistic"},
    "local": {"steps": 5, "batch": 8},
    "clock": {"dropout": 0.3, "deadline": 20_000.0, "min_updates": 3},
}
EXPERIMENT = fedcluster.Experiment(**KEYS)
SOFT = EXPERIMENT.override(
    **{"clusters.method": "availability", "clusters.soft": True, "local.algorithm": "scaffold", "local.steps": [3, 6]}
)


@pytest.fixture(scope="module", params=["timezone", "soft slots"])
def whole(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[fedcluster.Experiment, Path]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    experiment = EXPERIMENT if request.param == "timezone" else SOFT
    fedcluster.run(experiment, folder, display=Display())
    return experiment, folder


def test_metrics_tell_the_time(whole: tuple[fedcluster.Experiment, Path]) -> None:
    _, rounds, cycles = essence(whole[1])
    assert all(line["dropped"] > 0 and line["late"] > 0 for line in rounds)
    times = [line["simulated_seconds"] for line in rounds]
    assert times == sorted(times)
    assert 0 < rounds[-1]["idle_seconds"] < times[-1]
    assert rounds[-1]["simulated_seconds"] == cycles[-1]["simulated_seconds"]
    for key in ("dropped", "late"):
        assert rounds[-1][key] == sum(len(line[key]) for line in cycles)
    assert rounds[-1]["failed_cycles"] == sum(line["failed"] for line in cycles)
    assert rounds[-1]["aggregations"] == sum(line["changed"] for line in cycles)
    assert rounds[-1]["uploads"] == sum(len(line["cohort"]) for line in cycles) < rounds[-1]["downloads"]
    for before, after in pairwise(cycles):
        assert after["opened"] == before["simulated_seconds"]
        assert after["failed"] == (not after["changed"])


def test_reruns_and_resumes_are_bit_identical(
    whole: tuple[fedcluster.Experiment, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, folder = whole
    monkeypatch.setattr(checkpoints, "SAVE_EVERY", 0.0)
    monkeypatch.setattr(checkpoints, "SAVE_SHARE", 0)
    fedcluster.run(experiment, tmp_path / "again", display=Display(), workers=2)
    assert essence(tmp_path / "again") == essence(folder)

    class Stop(Display):
        def cycle(self, round: int, cycle: int, devices_per_second: float) -> None:
            if (round, cycle) == (3, 2):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedcluster.run(experiment, tmp_path / "stopped", display=Stop())
    position = json.loads(checkpoint.names(tmp_path / "stopped" / "checkpoint")[0].read_text())
    assert position["time"]["now"] > 0
    display = Remember()
    fedcluster.run(experiment, tmp_path / "stopped", resume=True, display=display)
    assert any("after 3 of 5 rounds" in said for said in display.said)
    assert essence(tmp_path / "stopped") == essence(folder)


def test_a_changed_fleet_file_is_refused_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "fleet.csv"
    path.write_text("up_mbps\n" + "1\n" * 10)
    given = Fleet(path=str(path), samples=20), Clusters(count=2), sections.Clock()
    experiment = EXPERIMENT.override(**dict(zip(("fleet", "clusters", "clock"), given, strict=True)))
    monkeypatch.setattr(Record, "round", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fedcluster.run(experiment, tmp_path / "run", display=Display())
    path.write_text("up_mbps\n" + "1\n" * 9 + "2\n")
    with pytest.raises(fedcluster.FedClusterError, match="started with different fleet"):
        fedcluster.run(experiment, tmp_path / "run", resume=True, display=Display())


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_without_losses_the_clock_changes_nothing_but_the_time() -> None:
    off = EXPERIMENT.override(**{"clusters.method": "random"}).sections()
    off.pop("clock")
    plain = fedcluster.Experiment(**off)
    assert "clock" not in plain.to_dict()
    timed = plain.override(**{"clock.over_select": 1.0, "fleet.world": None})
    one, two = fedcluster.run(plain, display=Display()), fedcluster.run(timed, display=Display())
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))
    assert "simulated_seconds" not in one.history[-1]
    assert two.history[-1]["simulated_seconds"] == 0


def test_every_message_of_an_algorithm_takes_time() -> None:
    sizes = {}
    for algorithm in ("fedavg", "mime", "scaffold"):
        setup = prepare(EXPERIMENT.override(**{"local.algorithm": algorithm}))
        assert setup.clock is not None
        sizes[algorithm] = (setup.clock.down // 2600, setup.clock.up // 2600)
    assert sizes == {"fedavg": (1, 1), "mime": (2, 2), "scaffold": (2, 2)}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"over_select": 0.5}, r"clock\.over_select = 0\.5 is not allowed"),
        ({"deadline": 0.0}, r"clock\.deadline = 0\.0 is not allowed"),
        ({"dropout": 1.0}, r"clock\.dropout = 1\.0 is not allowed"),
        ({"patience": 1}, r"clock\.patience is not a key; allowed: deadline"),
        ({"min_updates": 50}, r"clock\.min_updates = 50, but a cycle asks for as few as 6 updates"),
    ],
)
def test_bad_clocks_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(BadExperiment, match=said):
        prepare(fedcluster.Experiment(**KEYS | {"clock": keys}))


def test_centralized_training_has_no_clock() -> None:
    result = fedcluster.run(EXPERIMENT.override(method="centralized", rounds=1), display=Display())
    assert "simulated_seconds" not in result.history[-1]


def test_epochs_take_the_time_of_the_devices_own_samples() -> None:
    known = DeviceTable(seconds_per_sample=np.array([0.1, 0.2]))
    timed = clock(known, 2, Local(epochs=3, batch=20))
    timed.fleet = replace(timed.fleet, sizes=np.array([50, 7]))
    assert timed.work(0, np.arange(2)).tolist() == [3 * 5000, 3 * 1400]
