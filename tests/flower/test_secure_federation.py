"""Secure aggregation in federations of real processes on loopback: the simulation's model to the bit, and parties that
do not follow the protocol."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from safetensors.torch import save

import fedcluster
from fedcluster.errors import BadData, BadExperiment
from fedcluster.fleet.schedule import Cycle
from fedcluster.flower import certificates
from fedcluster.flower._compat import TaskIdentity
from fedcluster.flower.client_app import client_app
from fedcluster.flower.device import Identity
from fedcluster.flower.limits import Limits
from fedcluster.flower.messages import InvalidMessage, pack
from fedcluster.flower.secure_parts import SecureParts
from fedcluster.flower.server import check
from fedcluster.runs.ledger import Ledger
from fedcluster.runs.metrics import Record
from fedcluster.runs.progress import Display
from fedcluster.secure_aggregation.messages import Advertisement, ProtocolError
from fedcluster.secure_aggregation.server import Sum
from fedcluster.state import Tensors, Update
from fedcluster.training import loop as training
from fedcluster.training import setup as prepare
from fedcluster.training.executors.in_process import DeviceStates, InProcess
from fedcluster.training.threads import repeatable
from tests.conftest import blobs
from tests.federation import Federation
from tests.flower.test_federation import pooled
from tests.flower.test_flower import plan
from tests.secure_aggregation.cohort import SESSION

pytestmark = pytest.mark.xdist_group("federation")

PLAIN = fedcluster.Experiment(
    rounds=2,
    fleet={"devices": 9, "samples": 40, "partition": "quantity", "sigma": 0.3},
    clusters={"count": 1, "participation": 1.0},
    model={"name": "logistic"},
    local={"steps": 3, "batch": 10, "lr": 0.1},
)
SECURE = PLAIN.override(privacy={"secure_aggregation": True, "threshold": 0.5})
MODES = {"1": "lie", "5": "unmasked", "6": "replay", "8": "masked"}


@pytest.fixture(scope="module")
def nine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with Federation(tmp_path_factory.mktemp("nine"), SECURE) as federation:
        (federation.folder / "limits.toml").write_text("threshold = 0.5\n")
        for k in range(9):
            federation.join(k, "--limits", "limits.toml")
        yield federation


def test_a_federation_under_secure_aggregation_equals_a_plain_simulation(nine: Federation, tmp_path: Path) -> None:
    scaffold = {"algorithm": {"name": "scaffold"}}  # devices keep state, and an update has two parts
    server = nine.serve("secure", experiment=SECURE.override(**scaffold))
    fedcluster.run(pooled(nine, PLAIN.override(**scaffold), 9), tmp_path / "run", display=Display())
    nine.finish(server, "secure")
    assert nine.model("secure") == (tmp_path / "run" / "model.safetensors").read_bytes()
    assert all(line["missing"] == [] and line["changed"] for line in nine.lines("secure"))


def test_a_server_that_asks_for_both_kinds_of_share_or_invents_devices_is_refused(nine: Federation) -> None:
    file = nine.folder / "curious.toml"
    file.write_text(SECURE.override(rounds=1).to_toml())
    words = ("serve", file, "--listen", nine.server, "--certificates", "certificates", "--out", "curious")
    said = nine.finish(nine.module("tests.curious_server", "curious", *words, "--nodes", 9), "curious")
    assert re.search(r"device \d: it says: the keys of device zz for this cycle are not signed by it", said)
    assert "no secure sum: 0 of 9 devices have sent shares, and a sum needs at least 5" in said
    again = [line for line in said.splitlines() if line.startswith("asked")]
    assert len(again) == 17  # eight devices twice, and the ninth once
    for name in range(8):
        assert f"asked {name} again: it says: the server asks for 'confirm' a second time, or out of order" in again
        assert f"asked {name} again: it says: the server asks for 'unmask' a second time, or out of order" in again


class Leaving(InProcess):
    """The devices whose updates reach the sum."""

    def train(self, cycle: Cycle, received: Tensors, phase: int, device_states: DeviceStates) -> Iterator[Update]:
        gone = (5,) if cycle.round == 0 else (5, 6, 8)
        for update in super().train(cycle, received, phase, device_states):
            if update.device not in gone:
                yield update


def test_devices_that_leave_lie_or_replay_change_nothing(nine: Federation) -> None:
    for device, mode in MODES.items():
        nine.devices[device].terminate()
        nine.devices.pop(device).wait()
        nine.module("tests.secure_attacker", f"attacker-{mode}", mode, nine.server, device, nine.folder)
    said = nine.finish(nine.serve("attacked", experiment=SECURE, nodes=9, deadline=60), "attacked")
    for line in (
        "device 1: it sent a wrong share of device 0, unless that device had sent it a wrong one",
        "round 2: device 6: it sent keys that are not signed by it, or not for this cycle",
    ):
        assert line in said, said
    assert [line["missing"] for line in nine.lines("attacked")] == [[5], [5, 6, 8]]

    setup = prepare.prepare(pooled(nine, PLAIN, 9))
    old = setup.executor
    assert isinstance(old, InProcess)
    assert setup.partition is not None
    setup = replace(setup, executor=Leaving(old.trainer, old.dataset, setup.partition))
    with repeatable():
        state = training.train(setup, Record(Ledger(setup.devices)), setup.start)
    named = setup.flat_model.named(state.model).items()
    assert nine.model("attacked") == save({name: tensor.contiguous() for name, tensor in named})


def test_a_device_without_the_keys_of_the_others_refuses(tmp_path: Path) -> None:
    certificates.make(tmp_path / "all", 4, ["localhost"])
    parts = SecureParts("1", str(tmp_path / "all"), Limits())
    advertised = Advertisement.read(parts.answer("advertise", SESSION.write()))
    assert parts.current is not None
    assert parts.current.verify("1", advertised.signed(SESSION), bytes.fromhex(advertised.signature))
    assert not parts.current.verify("2", advertised.signed(SESSION), bytes.fromhex(advertised.signature))
    for stage in ("mask", "other"):
        with pytest.raises(InvalidMessage, match="an unknown stage"):
            parts.answer(stage, b"")
    with pytest.raises(InvalidMessage, match="in another cycle than keys were"):
        parts.mask(SESSION.model_copy(update={"round": 9}), b"", {})
    for other in ("0", "2", "3"):
        (tmp_path / "all/devices" / f"{other}.pub").unlink()
    with pytest.raises(BadData, match=r"needs the public keys of all devices, and .* has 1: copy ID.pub of each"):
        parts.answer("advertise", SESSION.write())
    with pytest.raises(BadData, match="join with --certificates"):
        SecureParts("1", "", Limits())


def test_a_device_that_sends_masked_updates_only_refuses_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_run_id", "_task_id", "_node_id"):  # as where Flower calls it
        monkeypatch.setattr(TaskIdentity, name, 1)
    np.savez(tmp_path / "own.npz", **blobs())
    (tmp_path / "limits.toml").write_text("unmasked = false\n")
    config = Identity("3", str(tmp_path / "own.npz"), limits=str(tmp_path / "limits.toml")).config()
    fields = {"round": 0, "cycle": 0, "device": 3, "phase": 0, "run": "r", "cycle_start": 0, "last": 0, "number": 1}
    message = Message(pack(fields | {"plan": plan()}, {"model": torch.zeros(18)}), 1, "train")
    with pytest.raises(BadExperiment, match="sends updates under secure aggregation only"):
        client_app(message, Context(1, 1, config, RecordDict(), {}))


def test_a_device_remembers_the_devices_of_a_sum(tmp_path: Path) -> None:
    """A server that makes a second sum of a cycle without one device would know what that device has sent."""
    certificates.make(tmp_path / "all", 9, ["localhost"])
    parts = {str(k): SecureParts(str(k), str(tmp_path / "all"), Limits(threshold=0.5)) for k in range(9)}

    def add_up(gone: str) -> None:
        verify = certificates.verify_by(parts["0"].keys())
        sum_ = Sum(SESSION, dict.fromkeys(parts, 1 / 9), 18, verify, 0.5, 3)

        def ask(requests: dict[str, bytes], stage: str) -> list[tuple[str, bytes]]:
            return [(name, parts[name].answer(stage, content)) for name, content in requests.items()]

        requests = sum_.ask_updates(ask(sum_.share_keys(ask(sum_.advertise(), "advertise")), "share"))
        for name, content in requests.items():
            if name != gone:
                sum_.add(name, parts[name].mask(SESSION, content, {"model": torch.ones(18)}))
        sum_.finish(ask(sum_.unmask(ask(sum_.confirm(), "confirm")), "unmask"))

    add_up(gone="")
    add_up(gone="")
    with pytest.raises(ProtocolError, match="a second sum of the same cycle, with nearly the same devices"):
        add_up(gone="4")


def test_it_needs_keys() -> None:
    with pytest.raises(BadExperiment, match="needs keys by which the devices know each other: use --certificates"):
        check(SECURE, with_keys=False)
    check(SECURE, with_keys=True)
