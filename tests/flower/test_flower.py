"""The parts of a federation one by one: messages, registry, schedule, certificates, and what a device refuses to do."""

import json
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

import fedcluster
from fedcluster.errors import BadData, BadExperiment, BadRun, LostServer
from fedcluster.fleet.timezones import HOUR, daily_hours
from fedcluster.flower import certificates
from fedcluster.flower._compat import TaskIdentity
from fedcluster.flower.client_app import client_app
from fedcluster.flower.device import Device, Identity, add_received, load_state, store_state
from fedcluster.flower.messages import InvalidMessage, get_int, pack, unpack
from fedcluster.flower.registry import Registry, RegistrySchedule, read_registration
from fedcluster.flower.round_start import RoundStart
from fedcluster.flower.transport import unpacked_bytes
from fedcluster.state import State
from fedcluster.training import setup as prepare
from tests.conftest import Here, blobs

SOFT = ("-o", "clusters.method=availability", "-o", "clusters.soft=true")
EXPERIMENT = fedcluster.Experiment(clusters={"count": 2, "participation": 1.0})


def test_a_message_comes_back_as_it_was() -> None:
    facts, tensors = unpack(pack({"round": 3, "plan": "p"}, {"model": torch.arange(5.0), "none": torch.zeros(0)}))
    assert (facts["round"], facts["plan"]) == (3, "p")
    assert torch.equal(tensors["model"], torch.arange(5.0))
    assert tensors["none"].shape == (0,)


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"other": ConfigRecord({"round": 1})}),
        RecordDict({"fedcluster": ConfigRecord({"round": 1}), "more": ArrayRecord({"w": Array(np.zeros(3))})}),
        RecordDict({"fedcluster": ArrayRecord({"w": Array(np.zeros(3))})}),
        RecordDict({"fedcluster": ConfigRecord({"model": b"12345"})}),
    ],
)
def test_what_is_not_ours_is_not_read(content: RecordDict) -> None:
    with pytest.raises(InvalidMessage):
        unpack(content)


@pytest.mark.parametrize("value", [None, "1", 1.0, True, [1]])
def test_a_fact_is_of_its_type(value: Any) -> None:
    with pytest.raises(InvalidMessage, match="without round"):
        get_int({"round": value}, "round")


def test_an_array_that_names_a_chunk_many_times_is_weighed_as_it_unpacks() -> None:
    array = Array(np.zeros(1000, np.float32))
    chunks = {name: chunk.deflate() for name, chunk in array.slice_array()}
    content = array.deflate()
    honest = json.dumps([0]).encode()
    assert unpacked_bytes({"array": content, **chunks}) == pytest.approx(4000, abs=300)
    greedy = content.replace(b'"arraychunk_ids": ' + honest, b'"arraychunk_ids": ' + json.dumps([0] * 999).encode())
    assert len(greedy) < 5000
    assert unpacked_bytes({"array": greedy, **chunks}) > 3_900_000


def entry(device: str, **more: Any) -> str:
    return json.dumps({"device": device, "samples": 10, "shape": [5], "outputs": 3} | more)


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        entry("../../etc"),
        entry("3", samples=0),
        entry("3", samples=10**12),
        entry("3", samples="many"),
        entry("3", samples=1.5),
        entry("3", shape=[]),
        entry("3", timezone="x" * 100),
        entry("3", timezone="\u001b[2J"),
        entry("3", timezone="Mars/Olympus"),
        entry("3", slots="at night"),
        entry("3", slots="22-6,25-26"),
        entry("3", slots="8-8"),
        entry("3", labels=[1, 2]),
        entry("3", weight=1e12),
    ],
)
def test_a_registration_is_checked(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_registration(text)


class Directory:
    """Stands for a NodeDirectory whose devices are there already; it keeps what is printed."""

    def __init__(self, registry: Registry) -> None:
        self.registry, self.lines = registry, list[str]()
        self.devices: dict[int, str] = {}
        self.say = self.lines.append

    def update(self) -> None: ...


def round_start(registry: Registry, seconds: float = 0.0) -> tuple[RegistrySchedule, RoundStart, Directory]:
    schedule, directory = RegistrySchedule(registry), Directory(registry)
    callback = RoundStart(directory, schedule, seconds, "--resume")  # type: ignore[arg-type]
    return schedule, callback, directory


def state(round: int, cycle: int = 0) -> State:
    return State(torch.zeros(1), round=round, cycle=cycle)


def cohorts(schedule: RegistrySchedule, j: int) -> list[int]:
    return sorted(k for cycle in schedule.round(j) for k in cycle.cohort.tolist())


def test_devices_keep_their_number_and_late_ones_join_the_smallest_cluster(tmp_path: Path) -> None:
    registry = Registry(EXPERIMENT, tmp_path / "devices.json")
    for device in ("10", "b", "2", "a", "0"):
        assert registry.register(read_registration(entry(device))) is None
    registry.admit(0, print)
    assert [one.device for one in registry.entries] == ["0", "2", "10", "a", "b"]
    schedule, callback, directory = round_start(registry)
    callback.on_run_start(None, state(0), [])  # type: ignore[arg-type]
    callback.on_round_start(state(0))
    assert cohorts(schedule, 0) == [0, 1, 2, 3, 4]

    assert registry.register(read_registration(entry("1"))) is None
    assert "samples are [4]" in str(registry.register(read_registration(entry("3", shape=[4]))))
    assert "had 10 samples and now says 99" in str(registry.register(read_registration(entry("2", samples=99))))
    smallest = int(np.bincount([one.cluster for one in registry.entries]).argmin())
    assert cohorts(schedule, 1) == [0, 1, 2, 3, 4]  # the schedule itself admits nobody
    callback.on_round_start(state(1))
    assert cohorts(schedule, 1) == cohorts(schedule, 1) == [0, 1, 2, 3, 4, 5]
    assert directory.lines == [f"device 1 joins cluster {smallest} in round 2"]

    again = Registry(EXPERIMENT, tmp_path / "devices.json")
    assert (again.run, again.entries) == (registry.run, registry.entries)
    assert len(again.fleet(0)) == 5
    (tmp_path / "devices.json").write_text("{}")
    with pytest.raises(BadRun, match="damaged"):
        Registry(EXPERIMENT, tmp_path / "devices.json")


def test_what_a_run_began_with_stays_whoever_comes_and_whenever_it_is_resumed() -> None:
    registry = Registry(EXPERIMENT.override(**{"data.name": "devices"}))
    for device in ("0", "1", "2"):
        registry.register(read_registration(entry(device)))
    registry.admit(0, print)
    began = registry.clusters(0).digest()
    schedule, callback, _ = round_start(registry)

    def resume(device: str, at: State) -> int:
        """A device comes while the run is resumed; the first round that it takes part in."""
        registry.register(read_registration(entry(device)))
        callback.on_run_start(None, at, [])  # type: ignore[arg-type]
        callback.on_round_start(at)
        return registry.entries[-1].since

    assert (resume("a", state(0)), registry.clusters(0).digest()) == (1, began)
    assert resume("b", state(7, cycle=1)) == 8  # some of round 7's cycles are done
    assert cohorts(schedule, 7) == [0, 1, 2, 3]
    assert resume("c", state(3)) == 8  # from a checkpoint before that
    assert "20 classes, but the federation learns 3" in str(
        registry.register(read_registration(entry("d", outputs=20)))
    )


def test_a_failed_round_is_repeated_with_other_cohorts_until_the_time_is_up() -> None:
    registry = Registry(EXPERIMENT.override(**{"clusters.participation": 0.5}))
    for device in range(20):
        registry.register(read_registration(entry(str(device))))
    registry.admit(0, print)
    schedule, callback, directory = round_start(registry, seconds=60)
    first = cohorts(schedule, 4)
    directory.update = lambda: directory.devices.update({1: "0"}) if directory.lines else None  # type: ignore[method-assign]
    callback.on_round_failed(state(4))  # nobody was online, then one came
    assert directory.lines == ["round 5 failed: no device is online; waiting for at most 60 s"]
    assert cohorts(schedule, 4) != first
    callback.on_round_end({}, state(5))
    assert cohorts(schedule, 4) == first
    callback.seconds = 0
    with pytest.raises(LostServer, match="round 5: too few updates from 1 devices online for 0 s"):
        callback.on_round_failed(state(4))


@pytest.mark.parametrize(("cap", "counts"), [(None, [10, 20, 100]), (2.5, [10, 20, 50]), ("off", [10, 20, 10**9])])
def test_nobody_counts_for_more_than_a_few_times_the_median(cap: Any, counts: list[int]) -> None:
    registry = Registry(EXPERIMENT.override(**{"accept.sample_cap": cap}))
    for device, samples in (("0", 10), ("1", 20), ("a", 10**9)):
        registry.register(read_registration(entry(device, samples=samples)))
    registry.admit(0, print)
    assert registry.fleet().weights.tolist() == [count / sum(counts) for count in counts]
    said = (
        "device a says that it has 1,000,000,000 samples and counts for {}, {:g} times the median (accept.sample_cap)"
    )
    assert registry.capped_claims() == ([] if cap == "off" else [said.format(counts[2], cap or 5)])


def test_a_simulation_counts_as_its_federation_does_where_the_experiment_says_how() -> None:
    """A simulation knows how many samples devices have, and caps them only if it is told to."""
    owner = np.repeat([0, 1, 2], [10, 20, 300])
    x, y = np.random.default_rng(0).random((330, 4), np.float32), np.arange(330) % 3
    dataset = fedcluster.Dataset(x, y, x[:3], y[:3], device_train=owner, classes=3)
    keys: dict[str, Any] = {"data": {"name": dataset}, "fleet": {"partition": "natural"}, "model": {"name": "logistic"}}
    for cap, counts in ((None, [10, 20, 300]), (4, [10, 20, 80]), ("off", [10, 20, 300])):
        experiment = fedcluster.Experiment(**keys, clusters={"count": 1}, accept={"sample_cap": cap})
        simulated = prepare.prepare(experiment).schedule.fleet.weights
        assert simulated.tolist() == [count / sum(counts) for count in counts]
        registry = Registry(experiment)
        for device, samples in enumerate((10, 20, 300)):
            registry.register(read_registration(entry(str(device), samples=samples)))
        registry.admit(0, print)
        assert (registry.fleet().weights.tolist() == simulated.tolist()) == (cap is not None)


def test_clusterings_need_devices_that_tell() -> None:
    for method in ("balanced", "similar"):
        needs_to_be_told(method, "--tell-labels", labels=[1, 9, 0])
    needs_to_be_told("timezone", "--timezone", timezone="Asia/Tokyo")
    needs_to_be_told("availability", "--slots", slots="22-6")


def needs_to_be_told(method: str, option: str, **told: Any) -> None:
    """A device that does not tell is refused, also when it comes late, and stops nobody else."""
    registry = Registry(EXPERIMENT.override(**{"clusters.method": method}))
    for device in ("0", "1", "2"):
        assert registry.register(read_registration(entry(device, **told))) is None
    assert f"join with {option}" in str(registry.register(read_registration(entry("3"))))
    registry.admit(0, print)
    assert f"join with {option}" in str(registry.register(read_registration(entry("4"))))
    assert registry.register(read_registration(entry("5", **told))) is None
    registry.admit(1, print)
    assert cohorts(RegistrySchedule(registry), 1) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("text", "hours"),
    [
        ("22-6", [(22, 30)]),
        ("0-24", [(0, 24)]),
        ("9:30-12, 13-17:45", [(9.5, 12), (13, 17.75)]),
        ("06-0", [(6, 24)]),
    ],
)
def test_hours_of_a_day(text: str, hours: list[tuple[float, float]]) -> None:
    assert daily_hours(text) == [(start * HOUR, end * HOUR) for start, end in hours]


@pytest.mark.parametrize(
    "text", ["", "22", "22-", "-6", "24-6", "8-25", "8-24:30", "8-8", "8:60-9", "22-6;7-8", "\uff18-9"]
)
def test_other_words_are_not_hours(text: str) -> None:
    with pytest.raises(ValueError, match="write 22-6"):
        daily_hours(text)


def test_clusters_by_time_zone_hours_and_label_counts_are_the_simulators() -> None:
    registry = Registry(EXPERIMENT.override(**{"clusters.method": "timezone"}))
    for device, place in (("0", "Asia/Tokyo"), ("1", "America/New_York"), ("2", "Asia/Seoul"), ("3", "America/Lima")):
        registry.register(read_registration(entry(device, timezone=place)))
    registry.admit(0, print)
    groups = [one.cluster for one in registry.entries]
    assert (groups[0] == groups[2], groups[1] == groups[3], groups[0] != groups[1]) == (True, True, True)

    registry = Registry(EXPERIMENT.override(**{"clusters.method": "availability"}))
    told = (("0", "Asia/Tokyo", "22-6"), ("1", "", "1-4:30,5-9"), ("2", "", "13-21"), ("3", "America/Lima", "23-1"))
    for device, place, hours in told:  # by UTC: 13 to 21, 1 to 9, 13 to 21, 4 to 6
        registry.register(read_registration(entry(device, timezone=place, slots=hours)))
    registry.admit(0, print)
    groups = [one.cluster for one in registry.entries]
    assert (groups[0] == groups[2], groups[1] == groups[3], groups[0] != groups[1]) == (True, True, True)

    registry = Registry(EXPERIMENT.override(**{"clusters.method": "balanced"}))
    for device, labels in (("0", [10, 0, 0]), ("1", [10, 0, 0]), ("2", [0, 10, 0]), ("3", [0, 10, 0])):
        registry.register(read_registration(entry(device, labels=labels)))
    registry.admit(0, print)
    groups = [one.cluster for one in registry.entries]
    assert (groups[0] != groups[1], groups[2] != groups[3]) == (True, True)


def test_what_a_device_keeps_belongs_to_one_run_and_to_both_sides_of_its_last_turn() -> None:
    state = RecordDict()
    before, after = {"variate": torch.ones(2)}, {"variate": torch.full((2,), 5.0)}
    store_state(state, "run", 4, before, 7, after)
    for turn, expected in ((7, after), (4, before)):
        kept = load_state(state, "run", turn)
        assert kept is not None
        assert torch.equal(kept["variate"], expected["variate"])
    assert load_state(state, "run", 0) is None
    assert load_state(state, "run", 5) is None
    assert load_state(state, "another", 7) is None


def test_a_device_holds_what_it_received_until_the_last_exchange_of_the_cycle() -> None:
    state = RecordDict()
    model, gradient = torch.arange(3.0), torch.ones(3)
    assert set(add_received(state, "run/0/1", 0, 2, {"model": model})) == {"model"}
    received = add_received(state, "run/0/1", 1, 2, {"gradient": gradient})
    assert torch.equal(received["model"], model)
    assert torch.equal(received["gradient"], gradient)
    assert not state.config_records
    add_received(state, "run/0/1", 0, 2, {"model": model})
    with pytest.raises(InvalidMessage, match="whose first phase did not reach this device"):
        add_received(state, "run/0/2", 1, 2, {"gradient": gradient})
    add_received(state, "run/0/2", 0, 1, {"model": model})
    assert not state.config_records, "with one exchange there is nothing to hold"


DATA = {"shape": [5], "target": "class", "outputs": 3, "vocabulary": 0}


def plan(**more: Any) -> str:
    keys = {"seed": 0, "data": DATA, "model": "logistic", "frozen": None, "task": {"name": "classification"}}
    keys |= {
        "metrics": None,
        "test_share": 0.0,
        "algorithm": {"name": "fedavg"},
        "local": {},
        "transforms": [],
        "scale": None,
        "shift": None,
        "standardise": None,
        "privacy": None,
    }
    return json.dumps(keys | more)


@pytest.fixture
def device(tmp_path: Path) -> Device:
    np.savez(tmp_path / "own.npz", **blobs())
    return Device(Identity("3", str(tmp_path / "own.npz"), allow=("tests.attacker:main",)))


def test_a_device_follows_a_plan_and_tells_no_labels_unasked(device: Device) -> None:
    assert device.prepare(plan()) is device.prepare(plan())
    told = device.registration()
    assert (told.device, told.shape, told.target, told.outputs, told.labels) == ("3", [5], "class", 3, None)


def test_a_device_standardises_for_every_experiment_anew(tmp_path: Path) -> None:
    data = blobs()
    data |= {name: (np.abs(data[name]) * 20).astype(np.uint8) for name in ("x_train", "x_test")}
    np.savez(tmp_path / "own.npz", **data)
    device = Device(Identity("3", str(tmp_path / "own.npz")))
    own = device.prepare(plan()).dataset.scale
    theirs = device.prepare(plan(scale=[0.5], shift=[1.0])).dataset.scale
    assert theirs is not None
    assert theirs.item() == 0.5
    again = device.prepare(plan()).dataset.scale
    assert own is not None
    assert again is not None
    assert torch.equal(again, own)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "unknown or missing keys"),
        (plan(path="/etc/passwd"), "unknown or missing keys"),
        (plan(local={"steps": 0}), "cannot be followed"),
        (plan(model="os:system"), "does not allow"),
        (plan(algorithm={"name": "subprocess:Popen"}), "does not allow"),
        (plan(transforms=["subprocess:Popen"]), "does not allow"),
        (plan(local={"algorithm": "subprocess:Popen"}), "differ: remove the former"),
        (plan(task={"name": "subprocess:Popen"}), "does not allow"),
        (plan(task={"name": "classification", "loss": "os:system"}), "does not allow"),
        (plan(task=[]), "without the names of task"),
        (plan(data=DATA | {"shape": [4]}), "the federation learns"),
        (plan(data=DATA | {"outputs": 2}), "the federation learns"),
        (plan(data=DATA | {"outputs": 10**9}), "cannot be followed"),
        (plan(data=DATA | {"target": "text"}), "cannot be followed"),
        (plan(data=DATA | {"target": "token"}), "needs targets that are next tokens, but those of own.npz are classes"),
        (plan(metrics="accuracy"), "without the names of .* metrics"),
        (plan(test_share=2), "cannot be followed"),
        (plan(frozen="0" * 64), "the frozen weights of the model differ from the server's"),
    ],
)
def test_a_device_does_not_do_whatever_it_is_told(device: Device, text: str, why: str) -> None:
    with pytest.raises((InvalidMessage, BadExperiment, BadData), match=why):
        device.prepare(text)


def test_a_device_names_the_versions_when_it_cannot_follow(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_run_id", "_task_id", "_node_id"):  # as where Flower calls it
        monkeypatch.setattr(TaskIdentity, name, 1)
    facts = {"round": 0, "cycle": 0, "device": 0, "phase": 0, "run": "r", "cycle_start": 0, "last": 0, "number": 1}
    context = Context(1, 1, device.identity.config(), RecordDict(), {})
    for version, found in (
        ("9.9.9", "runs fedcluster 9.9.9, this device"),
        (fedcluster.__version__, r"local.novel is not a key.*\)$"),
    ):
        told = facts | {"plan": plan(local={"novel": 1}), "version": version}
        with pytest.raises(InvalidMessage, match=found):
            client_app(Message(pack(told, {"model": torch.zeros(3)}), 1, "train"), context)


@pytest.mark.parametrize("algorithm", ["mime", "vrl_sgd"])
def test_a_turn_of_two_exchanges_is_the_simulators(
    device: Device, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second exchange does not send the model again. A turn that the server did not count is taken from where the
    cycle began, although both exchanges were answered."""
    for name in ("_run_id", "_task_id", "_node_id"):  # as where Flower calls it
        monkeypatch.setattr(TaskIdentity, name, 1)
    text = plan(algorithm={"name": algorithm}, local={"steps": 2, "batch": 4, "lr": 0.1})
    here = device.prepare(text)
    context = Context(1, 1, device.identity.config(), RecordDict(), {})
    second = torch.linspace(-1, 1, 18)
    sent = [{"model": torch.linspace(0, 1, 18)}, {"gradient": second} if algorithm == "mime" else {"movement": second}]

    def turn(round: int, began: int) -> dict[str, torch.Tensor] | None:
        """What the device keeps in the simulation; what it sends must be the same by Flower."""
        kept = load_state(context.state, "r", began)
        received: dict[str, torch.Tensor] = {}
        for phase in (0, 1):
            received |= sent[phase]
            since, number = (began, 2 * round + 1) if phase == 0 else (2 * round + 1, 2 * round + 2)
            facts = {"round": round, "cycle": 0, "device": 0, "phase": phase, "run": "r", "plan": text}
            told = facts | {"cycle_start": began, "last": since, "number": number, "version": fedcluster.__version__}
            reply = client_app(Message(pack(told, sent[phase]), 1, "train"), context)
            answer = unpack(reply.content)[1]
            expected, kept = here.train_device(phase, (round, 0, 0), received, kept)
            assert answer.keys() == expected.keys()
            assert all(torch.equal(answer[name], tensor) for name, tensor in expected.items())
        return kept or None

    first = turn(0, began=0)
    turn(1, began=2)
    again = turn(2, began=2)
    found = load_state(context.state, "r", 6)
    for kept, expected in ((load_state(context.state, "r", 2), first), (found, again)):
        assert (kept is None) == (expected is None) == (algorithm == "mime")
        assert expected is None or kept is None or torch.equal(kept["drift"], expected["drift"])


def test_keys_are_for_their_owners_and_are_not_overwritten(here: Here, tmp_path: Path) -> None:
    code, out, _ = here("certificates", "made", "--nodes", 3, "--host", "fed.example.org")
    assert (code, "devices/0 to 2" in out) == (0, True)
    secret = ["server.key", *(f"devices/{k}.key" for k in range(3))]
    assert all(stat.S_IMODE((tmp_path / "made" / name).stat().st_mode) == 0o600 for name in secret)
    keys = certificates.public_keys(tmp_path / "made")
    assert sorted(keys.values()) == ["0", "1", "2"]
    assert certificates.private_key(tmp_path / "made/devices/1.key").public_key() is not None
    code, _, err = here("certificates", "made")
    assert (code, "keys are not overwritten" in err) == (3, True)
    (tmp_path / "made/devices/1.key").chmod(0o644)
    with pytest.raises(BadData, match="can be read by others: chmod 600"):
        certificates.private_key(tmp_path / "made/devices/1.key")
    (tmp_path / "made/devices/2.pub").write_bytes((tmp_path / "made/devices/1.pub").read_bytes())
    with pytest.raises(BadData, match="is also the key of device 1"):
        certificates.public_keys(tmp_path / "made")


def test_a_server_needs_its_own_key_and_devices_of_one_kind_of_key(here: Here, tmp_path: Path) -> None:
    here("certificates", "made", "--nodes", 2)
    (tmp_path / "e.toml").write_text("")
    made, serve = tmp_path / "made", ("serve", "e.toml", "--certificates", "made")
    certificates.check_server(made)
    other = tmp_path / "other"
    certificates.make(other, 1, ["fed.example.org"])
    with pytest.raises(BadData, match=r"IP address mismatch.*name 127.0.0.1 besides"):
        certificates.check_server(other)
    for change, said in (
        (lambda: shutil.copy(other / "ca.crt", made / "ca.crt"), "server.crt does not fit"),
        (lambda: (made / "ca.crt").write_text("nonsense"), "ca.crt is not a certificate"),
        (lambda: (made / "ca.crt").unlink(), "ca.crt: No such file or directory"),
        (lambda: (made / "server.key").chmod(0o644), "server.key can be read by others: chmod 600"),
        (lambda: (made / "server.key").unlink(), "server.key: No such file or directory"),
        (lambda: shutil.copy(made / "devices/0.key", made / "server.key"), "are not a certificate and its key"),
        (lambda: (made / "devices/1.pub").write_bytes(ED25519), "1.pub is not an elliptic-curve key"),
    ):
        change()
        code, _, err = here(*serve)
        assert (code, said in err) == (3, True), err


def test_a_device_needs_the_authority_of_its_server(here: Here, tmp_path: Path) -> None:
    """It says so at once, and does not wait for a server."""
    here("certificates", "made", "--nodes", 1)
    np.savez(tmp_path / "own.npz", **blobs())
    (tmp_path / "made/ca.crt").unlink()
    code, _, err = here("join", "--server", "127.0.0.1:1", "--data", "own.npz", "--device", 0, "--certificates", "made")
    assert (code, "ca.crt: No such file or directory; copy the ca.crt of the server" in err) == (3, True), err


ED25519 = b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ7wFYrHLbNL4tIEn+xMr+8QR7g8JvA7rk1b5UG8iU2W a@b\n"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["serve", "e.toml"], 2, "--certificates DIR, or --insecure"),
        (["serve", "e.toml", "--insecure", "--listen", "0.0.0.0:9092"], 2, "--insecure is for loopback only"),
        (["serve", "e.toml", "--insecure", "--listen", "here:there"], 2, "HOST:PORT"),
        (["serve", "e.toml", "--certificates", "nowhere"], 3, "has no public keys"),
        (["serve", "e.toml", "--insecure", "-o", "method=centralized"], 2, "use fedcluster run"),
        (["serve", "e.toml", "--insecure", "-o", "clock.deadline=60"], 2, "a federation runs in real time"),
        (["serve", "e.toml", "--insecure", *SOFT], 2, "a device is in one cluster"),
        (
            ["join", "--server", "h:1", "--data", "d", "--device", "0", "--insecure", "--slots", "late"],
            2,
            "hours of a day",
        ),
        (["run", "e.toml", "-o", "data.name=devices"], 3, "use fedcluster serve"),
        (["join", "--server", "192.0.2.1", "--data", "d.npz", "--device", "0", "--insecure"], 2, "for loopback only"),
        (["join", "--server", "::1", "--data", "d.npz", "--device", "../x", "--insecure"], 2, "letters, digits"),
        (
            ["join", "--server", "h:1", "--data", "d.npz", "--device", "0", "--insecure", "--timezone", "Mars"],
            2,
            "not a time zone",
        ),
        (["join", "--server", "127.0.0.1:1", "--data", "nowhere.npz", "--device", "0", "--insecure"], 3, "no file"),
    ],
)
def test_mistakes_end_in_a_sentence(here: Here, tmp_path: Path, words: list[str], code: int, said: str) -> None:
    (tmp_path / "e.toml").write_text("")
    found, _, err = here(*words)
    assert (found, said in err) == (code, True), err
    assert "Traceback" not in err
