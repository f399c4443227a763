"""Federations of real processes on loopback whose devices come late, leave, vanish, fail or are refused."""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedcluster
from tests.federation import Federation, kill, until

pytestmark = pytest.mark.xdist_group("federation")

SLOW = "tests.slow:Slow"
EXPERIMENT = fedcluster.Experiment(
    rounds=4,
    data={"name": "devices"},
    fleet={"devices": 5, "samples": 40},
    clusters={"count": 2, "participation": 1.0, "order": "cyclic"},
    model={"name": "logistic"},
    local={"steps": 2, "batch": 10, "lr": 0.05},
)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Devices 0 to 4, none of them started, each with bytes for data, and data for the server."""
    folder = tmp_path_factory.mktemp("few")
    with Federation(folder, EXPERIMENT.override(data={"name": "digits"})) as federation:
        for k in range(5):
            arrays = dict(np.load(folder / f"{k}.npz"))
            pictures = {name: (arrays[name] * (250 - 40 * k)).astype(np.uint8) for name in ("x_train", "x_test")}
            np.savez(folder / f"{k}.npz", **arrays | pictures)
        yield federation


def stop(federation: Federation, *devices: int) -> None:
    for device in devices:
        process = federation.devices.pop(str(device))
        process.terminate()
        process.wait()


def everyone(federation: Federation, out: str) -> dict[str, dict[str, Any]]:
    entries = json.loads((federation.folder / out / "devices.json").read_text())["devices"]
    return {entry["device"]: entry for entry in entries}


def test_late_devices_second_experiments_and_finished_runs(few: Federation) -> None:
    """The same nodes train one experiment, then another, then the first again. A device that comes while the server is
    stopped joins when the run is resumed. A finished run needs no devices."""
    pictures = EXPERIMENT.override(rounds=1)
    few.join(0, "--allow", SLOW)
    few.join(1, "--allow", SLOW)
    few.finish(few.serve("before", experiment=pictures), "before")

    slow = EXPERIMENT.override(data={"name": str(few.folder / "4.npz")}, **{"local.algorithm": SLOW})
    server = few.serve("late", experiment=slow)
    until(lambda: len(few.lines("late")) >= 3)  # in the middle of the second round
    kill(server)
    few.join(2, "--allow", SLOW)
    said = few.finish(few.serve("late", "--resume", experiment=slow, nodes=3), "late")
    assert "resuming" in said
    newcomer = everyone(few, "late")["2"]
    assert newcomer["since"] >= 1
    assert f"device 2 joins cluster {newcomer['cluster']} in round {newcomer['since'] + 1}" in said
    turns = few.lines("late")
    assert [(turn["round"], turn["cycle"]) for turn in turns] == list(product(range(1, 5), range(2)))
    took_part = [turn["round"] for turn in turns if 2 in turn["cohort"]]
    assert took_part == list(range(newcomer["since"] + 1, 5))

    stop(few, 2)
    few.finish(few.serve("after", experiment=pictures), "after")
    assert few.model("after") == few.model("before")

    stop(few, 0, 1)
    said = few.finish(few.serve("late", "--resume", experiment=slow, nodes=3, wait=1), "late")
    assert "late is finished: nothing to do" in said


def test_devices_that_vanish_leave_fail_or_are_refused(few: Federation) -> None:
    """Of five devices one has a later version and is told that it is refused, one sends values that are not finite, and
    two are lost after they have started to upload: one is killed, one signs off. The cycle ends long before its
    deadline."""
    modes = (("nan", 1), ("vanish", 2), ("leave", 3))
    attackers = [few.module("tests.attacker", mode, mode, few.server, device, few.folder) for mode, device in modes]
    later = few.module("tests.later", "later", few.server, 0, few.folder)
    one = EXPERIMENT.override(**{"clusters.count": 1, "rounds": 1})
    server = few.serve("lost", experiment=one, nodes=4, deadline=3600)
    until(lambda: "the server refuses device 0" in few.log("later"))  # before the round can begin
    few.join(4)
    said = few.finish(server, "lost", seconds=900)
    skew = f"it runs fedcluster 9.9.9, this server {fedcluster.__version__}: install the same version on both"
    assert f"refused a node (key of device 0): battery: Extra inputs are not permitted; {skew}" in said
    assert f"the server refuses device 0: battery: Extra inputs are not permitted; {skew}" in few.log("later")
    assert "refused the update of device 1 (model: not finite)" in said
    assert "device 2: it went offline" in said
    assert "device 3: it went offline" in said
    (turn,) = few.lines("lost")
    assert (turn["cohort"], turn["missing"], turn["changed"]) == ([0, 1, 2, 3], [1, 2], True)
    stop(few, 4)
    for process in (*attackers, later):
        kill(process)  # they have the keys of devices that come later


def test_rounds_wait_for_devices(few: Federation) -> None:
    """Rounds fail while devices answer with errors or are offline. The server gives up with a run that can be resumed,
    and waits for devices that leave."""
    slow = EXPERIMENT.override(**{"local.algorithm": SLOW, "clusters.count": 1})
    few.join(0)
    few.join(1)
    server = few.serve("again", experiment=slow, wait=10)
    assert server.wait(600) == 8
    said = few.log("again")
    assert "device 0: it says: the server asks for tests.slow:Slow, which this device does not allow" in said
    assert "round 1 failed: too few updates from 2 devices online; waiting" in said
    assert "fedcluster: round 1: too few updates from 2 devices online for" in said
    assert (few.lines("again"), few.lines("again", "metrics.jsonl")) == ([], [])

    stop(few, 0, 1)
    few.join(0, "--allow", SLOW)
    few.join(1, "--allow", SLOW)
    server = few.serve("again", "--resume", "--min-updates", 2, experiment=slow)
    until(lambda: len(few.lines("again")) >= 2)
    stop(few, 0, 1)
    until(lambda: "no device is online" in few.log("again"))
    done = len(few.lines("again"))
    few.join(0, "--allow", SLOW)
    until(lambda: "device 1: it is not online" in few.log("again"))
    assert len(few.lines("again")) == done
    few.join(1, "--allow", SLOW)
    said = few.finish(server, "again")
    assert [(turn["round"], turn["changed"], turn["missing"]) for turn in few.lines("again")] == [
        (round, True, []) for round in range(1, 5)
    ]
    lost = said.count("it went offline") + said.count("it says: ")
    last = few.lines("again", "metrics.jsonl")[-1]
    assert last["downloads"] - last["uploads"] == lost
    assert last["aggregations"] == 4
    stop(few, 0, 1)


def test_finite_poison_is_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    """One of six devices sends its model times a million, once; another numbers that are nearly infinite, always. The
    server is killed on the way."""
    experiment = EXPERIMENT.override(**{"data.name": "digits", "fleet.devices": 8, "local.algorithm": SLOW})
    with Federation(tmp_path, experiment) as federation:
        for device in (2, 3, 4, 6):
            federation.join(device, "--allow", SLOW)
        for mode, device in (("scaled", 5), ("huge", 7)):
            federation.module("tests.attacker", mode, mode, federation.server, device, tmp_path)
        server = federation.serve("out", experiment=experiment, nodes=6)
        until(lambda: len(federation.lines("out")) >= 3)
        kill(server)
        said = federation.finish(federation.serve("out", "--resume", experiment=experiment, nodes=6), "out")
        assert "refused the update of device 5 (model: moved by" in said  # number 3 of the registry
        assert "refused the update of device 7 (model: moved by 3.3e+38" in said
        turns, lines = federation.lines("out"), federation.lines("out", "metrics.jsonl")
    refused = {(turn["round"], device) for turn in turns for device, _ in turn["reasons"]}
    assert refused == {(1, 3), (1, 5), (2, 5), (3, 5), (4, 5)}
    assert all(turn["changed"] for turn in turns)
    losses = [line["test_loss"] for line in lines]
    assert losses == sorted(losses, reverse=True)
