"""Federations of real processes on loopback find what the simulation finds, to the bit; also when processes are killed,
and with hostile devices among them. Federated averaging itself is compared in test_strangers.py."""

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.torch import save

import fedcluster
from fedcluster.experiment import Fleet
from fedcluster.fleet.schedule import Cycle
from fedcluster.flower import certificates
from fedcluster.runs.ledger import Ledger
from fedcluster.runs.metrics import Record
from fedcluster.runs.progress import Display
from fedcluster.state import Tensors
from fedcluster.training import loop as training
from fedcluster.training import setup as prepare
from fedcluster.training.executors.in_process import DeviceStates, InProcess
from fedcluster.training.threads import repeatable
from tests.federation import Federation, kill, until

pytestmark = pytest.mark.xdist_group("federation")  # they share devices, and the machine is small

SLOW = "tests.slow:Slow"
EXPERIMENT = fedcluster.Experiment(
    rounds=2,
    fleet={"devices": 12, "samples": 40},
    clusters={"count": 3, "participation": 0.5},
    model={"name": "mlp"},
    local={"steps": 5, "batch": 10, "lr": 0.05},
)


@pytest.fixture(scope="module")
def twelve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Twelve devices that stay while servers come and go."""
    with Federation(tmp_path_factory.mktemp("twelve"), EXPERIMENT) as federation:
        for k in range(12):
            federation.join(k, "--allow", SLOW, "--evaluate")
        yield federation


SLIDING = {"optimizer": "round_momentum", "memory": "sliding"}
CASES: dict[str, dict[str, Any]] = {
    "fedprox": {"local.optimizer": "adam", "local.lr": 0.002, "server": SLIDING},
    "scaffold": {"server": {"optimizer": "round_momentum"}},
    "vrl_sgd": {"local.steps": [3, 6], "server": {"optimizer": "amplified"}},  # two phases
    "mime": {"local.optimizer": "momentum", "clusters.weighting": "sample"},  # the second does not send the model again
    "fedhbm": {
        "local.schedule": {"name": "cosine"},
        "clusters.participation": 1.0,
        "aggregation": {"name": "trimmed_mean", "beta": 0.25},
        "accept.cycle_bound": 1.0,
    },
    "local_ghbm": {"clusters.order": "balanced"},
    "ghbm": {"task": {"name": "regression", "loss": "huber"}, "clusters.overlap": 1},
}


@pytest.mark.parametrize("name", CASES)
def test_a_federation_equals_its_simulation(twelve: Federation, tmp_path: Path, name: str) -> None:
    experiment = EXPERIMENT.override(**{"local.algorithm": name} | CASES[name])
    server = twelve.serve(name, experiment=experiment)
    fedcluster.run(pooled(twelve, experiment, 12), tmp_path / name, display=Display())
    twelve.finish(server, name)
    assert twelve.model(name) == (tmp_path / name / "model.safetensors").read_bytes()
    last = twelve.lines(name, "metrics.jsonl")[-1]
    updates = round(24 * experiment.clusters.participation)
    assert (last["device_updates"], last["aggregations"], last["refused"]) == (updates, 6, 0)
    assert all(turn["missing"] == [] for turn in twelve.lines(name))
    ours = [json.loads(line) for line in (tmp_path / name / "cycles.jsonl").read_text().splitlines()]
    for what in ("discarded", "clipped"):
        assert [turn.get(what) for turn in twelve.lines(name)] == [turn.get(what) for turn in ours]


SCORED = EXPERIMENT.override(**{"fleet.test_share": 0.25, "eval.every": 1, "metrics": ["accuracy", "macro_f1"]})
PLURALISTIC = SCORED.override(pluralistic={"average": 0.8})


def summaries(lines: list[dict[str, Any]]) -> list[Any]:
    return [line["by_device"] for line in lines]


def test_devices_are_scored_as_in_simulation(twelve: Federation, tmp_path: Path) -> None:
    """On samples that they hold out, and do not train on, each with the model of its cluster."""
    server = twelve.serve("scored", "--live", experiment=PLURALISTIC)
    history = fedcluster.run(pooled(twelve, PLURALISTIC, 12), tmp_path / "run", display=Display()).history
    said = twelve.finish(server, "scored")
    assert "round 2: 12 of 12 devices have sent their scores" in said
    assert "Live report: http://127.0.0.1:" in said
    clusters = [f"cluster-{K}.safetensors" for K in range(3)]
    for name in ("model.safetensors", "devices.jsonl", "devices.parquet", *clusters):
        assert (twelve.folder / "scored" / name).read_bytes() == (tmp_path / "run" / name).read_bytes()
    assert summaries(twelve.lines("scored", "metrics.jsonl")) == summaries(history)
    assert (twelve.folder / "scored/devices.png").exists()


def test_a_federation_stops_by_its_rule_keeps_its_best_model_and_trains_longer(
    twelve: Federation, tmp_path: Path
) -> None:
    keep = EXPERIMENT.override(**{"eval.best": "test_loss"})
    stopping = keep.override(stop={"metric": "test_loss", "target": 100.0})
    twelve.finish(twelve.serve("stopping", experiment=stopping), "stopping")
    assert len(twelve.lines("stopping", "metrics.jsonl")) == 1
    assert "stopped after round 1: test_loss has reached" in twelve.log("stopping")
    twelve.finish(twelve.serve("stopping", "--resume", experiment=keep), "stopping")
    fedcluster.run(keep, tmp_path / "run", display=Display())
    for name in ("model.safetensors", "best.safetensors"):
        assert (twelve.folder / "stopping" / name).read_bytes() == (tmp_path / "run" / name).read_bytes()


def children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(word) for word in found.stdout.split()]


def test_a_killed_superlink_and_a_killed_server_are_resumed(twelve: Federation, tmp_path: Path) -> None:
    """With SCAFFOLD, whose devices keep something: a turn that is taken twice begins where it began the first time. The
    scores of devices are on record once. Three cohorts are under way at once."""
    experiment = SCORED.override(**{"local.algorithm": "scaffold", "rounds": 5, "clusters.overlap": 2})
    server = twelve.serve("killed", experiment=experiment)
    until(lambda: len(twelve.lines("killed")) >= 2)
    for pid in children(server.pid):
        os.kill(pid, signal.SIGKILL)
    assert server.wait(300) == 8
    said = twelve.log("killed")
    assert "fedcluster: Flower's SuperLink has ended" in said
    assert "Traceback" not in said
    before = len(twelve.lines("killed"))

    server = twelve.serve("killed", "--resume", experiment=experiment)
    until(lambda: len(twelve.lines("killed")) >= before + 3)
    orphans = children(server.pid)
    kill(server)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in orphans))  # the SuperLink goes with it

    twelve.finish(twelve.serve("killed", "--resume", experiment=experiment), "killed")
    fedcluster.run(pooled(twelve, experiment, 12), tmp_path / "run", display=Display())
    for name in ("model.safetensors", "devices.jsonl", "devices.parquet"):
        assert (twelve.folder / "killed" / name).read_bytes() == (tmp_path / "run" / name).read_bytes()
    turns = [(turn["round"], turn["cycle"]) for turn in twelve.lines("killed")]
    assert turns == [(round, cycle) for round in range(1, 6) for cycle in range(3)]
    assert twelve.lines("killed", "metrics.jsonl")[-1]["device_updates"] == 5 * 6


def test_killed_devices_are_missed_and_one_comes_back(twelve: Federation) -> None:
    """One device comes late. Then three of a cluster are killed in the middle of their cycle: it ends without them, and
    one is restarted and takes part again. Then the whole cluster is offline, and the others continue."""
    slow = {
        "local.algorithm": SLOW,
        "clusters.participation": 1.0,
        "clusters.order": "cyclic",
        "rounds": 1000,
        "eval.every": 1000,
    }
    twelve.devices.pop("11").terminate()
    server = twelve.serve("faults", experiment=EXPERIMENT.override(**slow))
    until(lambda: len(twelve.lines("faults")) >= 1)
    twelve.join(11, "--allow", SLOW)
    until(lambda: "device 11 joins cluster" in twelve.log("faults"))
    members = [entry["device"] for entry in registry(twelve, "faults") if entry["cluster"] == 1]
    killed, rest, numbers = members[:3], members[3:], [int(device) for device in members]

    def ours() -> list[dict[str, Any]]:
        return [cycle for cycle in twelve.lines("faults") if cycle["cluster"] == 1]

    for device in killed:
        os.kill(twelve.devices[device].pid, signal.SIGSTOP)  # so that the cycle cannot end before they are killed
    until(lambda: len(twelve.lines("faults")) % 3 == 1)  # theirs is the next one
    for device in killed:
        kill(twelve.devices[device])
    until(lambda: any(cycle["missing"] == numbers[:3] and cycle["changed"] for cycle in ours()))
    twelve.join(killed[0], "--allow", SLOW)  # only now: back in time, it would take part in that cycle
    until(lambda: ours()[-1]["missing"] == numbers[1:3])
    for device in (killed[0], *rest):
        twelve.devices[device].terminate()
    until(lambda: ours()[-1]["missing"] == numbers)
    round = ours()[-1]["round"]
    until(lambda: twelve.lines("faults", "metrics.jsonl")[-1]["round"] >= round)
    server.terminate()
    assert server.wait(300) == 143
    for device in members:
        twelve.join(device, "--allow", SLOW)
    last = twelve.lines("faults", "metrics.jsonl")[-1]
    cycles = [cycle for cycle in twelve.lines("faults") if cycle["round"] <= last["round"]]
    assert not ours()[-1]["changed"]
    assert all(cycle["changed"] and cycle["missing"] == [] for cycle in cycles if cycle["cluster"] != 1)
    asked, missing = (sum(len(cycle[name]) for cycle in cycles) for name in ("cohort", "missing"))
    unsent = re.findall(r"^round (\d+), .*it is not online$", twelve.log("faults"), re.M)
    sent = asked - sum(int(found) <= last["round"] for found in unsent)
    assert (last["downloads"], last["uploads"]) == (sent, asked - missing)


def registry(federation: Federation, out: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads((federation.folder / out / "devices.json").read_text())["devices"]
    return entries


MODES = {"3": "nan", "5": "shape", "6": "names", "8": "replay", "9": "hang", "10": "flood"}
LIAR = {"7": "scores"}  # trains as it should


class Honest(InProcess):
    """The simulation from which nothing of the attackers' is heard, but for what the replayer sends at first."""

    def train(self, cycle: Cycle, received: Tensors, phase: int, device_states: DeviceStates) -> Iterator[Any]:
        for update in super().train(cycle, received, phase, device_states):
            mode = MODES.get(str(update.device))
            if mode is None or (mode == "replay" and cycle.round == 0):
                yield update


def test_attackers_are_refused_by_name_and_change_nothing(twelve: Federation) -> None:
    experiment = EXPERIMENT.override(**{"clusters.participation": 1.0, "fleet.test_share": 0.25, "eval.every": 1})
    attackers = {}
    for device, mode in (MODES | LIAR).items():
        twelve.devices.pop(device).terminate()
        words = (mode, twelve.server, device, twelve.folder)
        attackers[mode] = twelve.module("tests.attacker", f"attacker-{mode}", *words)
    imposter = twelve.folder / "imposter"  # says that it is device 2, with the key of device 11
    shutil.copytree(twelve.folder / "certificates", imposter)
    twelve.devices.pop("11").terminate()
    shutil.copy(imposter / "devices/11.key", imposter / "devices/2.key")
    stranger = twelve.folder / "stranger"  # knows the server, which does not know it
    shutil.copytree(twelve.folder / "certificates", stranger)
    (stranger / "devices/2.key").unlink()
    certificates.add_device(stranger, "20")
    shutil.copy(stranger / "devices/20.key", stranger / "devices/2.key")
    other = twelve.folder / "other"  # of another federation
    certificates.make(other, 3, ["127.0.0.1"])

    server = twelve.serve("attacked", experiment=experiment, nodes=11, deadline=20)
    until(lambda: "listening for devices" in twelve.log("attacked"))
    common = ["join", "--server", twelve.server, "--device", "2", "--data", "2.npz", "--certificates"]
    twelve.start("imposter-says", *common, imposter)
    twelve.start("stranger-says", *common, stranger)
    distrusting = twelve.start("other-says", *common, other)
    plain(twelve.port)
    knock(twelve)
    until(lambda: "device 9: no answer in time" in twelve.log("attacked"))
    kill(attackers["hang"])  # once is enough
    said = twelve.finish(server, "attacked")

    assert distrusting.wait(300) == 3
    assert "does not have a certificate of" in twelve.log("other-says")
    for refused in (
        "proxy: refused a connection from 127.0.0.1 (it does not speak TLS)",
        "proxy: refused a connection from 127.0.0.1 (it does not trust our certificate",
        "'/v1/control/register-node' is not open to devices",
        "'/v1/control/start-run' is not open to devices",
        "'/v1/runtime/acquire-task' is not open to devices",
        "'/v1/fleet/register-node' is not open to devices",
        "not signed with the key of a device",
        "(key of device 11): it says that it is device 2, whose key it does not have",
        "refused the update of device 3 (model: not finite)",
        "refused the update of device 5 (model: wrong shape or type)",
        "refused the update of device 6 (wrong names)",
        "refused the update of device 8 (for round 0, cycle",
        "device 9: no answer in time",
        "round 2, scores: device 7: refused its scores (accuracy: out of range)",
        "round 2: 4 of 11 devices have sent their scores",
        "proxy: refused device 10 at 127.0.0.1: an upload of more than",
    ):
        assert refused in said, refused + "\n" + said
    assert "the server refuses device 2: it says that it is device 2, whose key it does not" in twelve.log(
        "imposter-says"
    )
    assert twelve.model("attacked") == simulated(twelve, experiment)
    assert [line["device"] for line in twelve.lines("attacked", "devices.jsonl")] == [[0, 1, 2, 4]] * 2


def plain(port: int) -> None:
    """No TLS at all."""
    with socket.create_connection(("127.0.0.1", port)) as line, suppress(ConnectionResetError):
        line.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        line.settimeout(10)
        while line.recv(1000):
            pass


def knock(federation: Federation) -> None:
    """The operators' and the apps' paths, and those by which nodes register themselves."""
    trusted = ssl.create_default_context(cafile=federation.folder / "certificates/ca.crt")
    with httpx.Client(base_url=f"https://{federation.server}", verify=trusted) as client:
        for path in ("control/register-node", "control/start-run", "runtime/acquire-task", "fleet/register-node"):
            assert client.post(f"/v1/{path}", content=b"").status_code == 403
        assert client.get("/docs").status_code == 403
        with suppress(httpx.TransportError):  # it hangs up on us before we have said it all
            assert client.post("/v1/fleet/push-object", content=b"x" * 2**21).status_code == 403


def pooled(federation: Federation, experiment: fedcluster.Experiment, devices: int) -> fedcluster.Experiment:
    """The experiment on the devices' data, in one place."""
    files = [np.load(federation.folder / f"{k}.npz") for k in range(devices)]
    arrays: dict[str, Any] = {
        name: np.concatenate([file[name] for file in files]) for name in ("x_train", "y_train", "x_test", "y_test")
    }
    owner = np.repeat(np.arange(devices), [len(file["y_train"]) for file in files])
    dataset = fedcluster.Dataset(**arrays, device_train=owner, classes=10)
    natural = Fleet(partition="natural", test_share=experiment.fleet.test_share)
    return experiment.override(data={"name": dataset}, fleet=natural)


def simulated(federation: Federation, experiment: fedcluster.Experiment) -> bytes:
    """The same on a fleet without device 11, which never got in."""
    setup = prepare.prepare(pooled(federation, experiment, 11))
    old = setup.executor
    assert isinstance(old, InProcess)
    assert setup.partition is not None
    executor = Honest(old.trainer, old.dataset, setup.partition)
    setup = replace(setup, executor=executor)
    with repeatable():
        state = training.train(setup, Record(Ledger(setup.devices)), setup.start)
    return save({name: tensor.contiguous() for name, tensor in setup.flat_model.named(state.model).items()})
