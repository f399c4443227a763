"""The protocol between a server and devices in one process."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcluster.secure_aggregation import integers, shamir
from fedcluster.secure_aggregation.ciphers import add_masks
from fedcluster.secure_aggregation.device import Limits, Participant
from fedcluster.secure_aggregation.messages import ProtocolError, Roster, Session
from tests.secure_aggregation.cohort import SESSION, Cohort, same


def edit(content: bytes, **changes: Any) -> bytes:
    return json.dumps(json.loads(content) | changes, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize("count", [3, 5, 12])
def test_the_mean_is_that_of_an_unmasked_cohort_to_the_bit(count: int) -> None:
    cohort = Cohort(count)
    assert same(cohort.run(), cohort.plain(cohort.names))
    assert not cohort.sum.faults


@pytest.mark.parametrize("stage", ["advertise", "share", "mask", "confirm", "unmask"])
def test_devices_may_go_away_at_any_stage(stage: str) -> None:
    cohort = Cohort(10)  # seven are needed
    cohort.offline = {stage: ["d2", "d9", "d0"]}
    left = [name for name in cohort.names if name not in cohort.offline[stage]]
    before = stage in ("advertise", "share", "mask")
    assert same(cohort.run(), cohort.plain(left if before else cohort.names))


def test_devices_may_go_away_before_and_after_masking() -> None:
    cohort = Cohort(12)
    cohort.offline = {"share": ["d1"], "mask": ["d5"], "unmask": ["d7"]}
    assert same(cohort.run(), cohort.plain([name for name in cohort.names if name not in ("d1", "d5")]))


@pytest.mark.parametrize(
    ("stage", "what"),
    [("advertise", "keys"), ("share", "sent shares"), ("mask", "masked updates"), ("unmask", "shares in the clear")],
)
def test_too_few_devices_are_a_sentence(stage: str, what: str) -> None:
    cohort = Cohort(5)  # four are needed
    cohort.offline = {stage: ["d0", "d1", "d2"] if stage == "advertise" else ["d0", "d1"]}
    with pytest.raises(ProtocolError, match=f"of 5 devices have.*{what}.*needs at least"):
        cohort.run()


def test_an_update_that_comes_late_stays_hidden() -> None:
    """The server has the masked update of a device that it has reported gone, and recovers its common masks. What is
    left is masked by the device's own seed, of which it gets no share."""
    cohort, late = Cohort(4), {}
    cohort.offline = {"confirm": []}

    def withhold(name: str, content: bytes) -> bytes:
        late[name] = content
        return b"" if name == "d3" else content

    cohort.replies["mask"] = withhold
    assert same(cohort.run(cohort.server(0.5)), cohort.plain(["d0", "d1", "d2"]))
    assert cohort.sum.faults == {"d3": "a masked update of another length"}
    own = integers.encode(cohort.updates["d3"], cohort.weights["d3"])
    assert not np.array_equal(integers.unpack(late["d3"]), own & np.uint64(2**56 - 1))
    answers = [json.loads(content) for content in collect(cohort)]
    assert all("d3" not in answer["seeds"] for answer in answers)


def collect(cohort: Cohort) -> list[bytes]:
    """What the devices of a new, equal cohort reveal."""
    again, found = Cohort(4), list[bytes]()
    again.replies["mask"] = lambda name, content: b"" if name == "d3" else content
    again.replies["unmask"] = lambda name, content: found.append(content) or content  # type: ignore[func-returns-value]
    again.run(again.server(0.5))
    assert len(found) == 3
    return found


def test_one_lying_share_is_found_and_left_out() -> None:
    cohort = Cohort(6)  # five are needed
    cohort.replies["unmask"] = lambda name, content: edit(content, seeds=wrong(content)) if name == "d1" else content
    assert same(cohort.run(), cohort.plain(cohort.names))
    assert cohort.sum.faults["d1"].startswith("it sent a wrong share of device d0")


def test_a_lying_share_too_many_is_a_sentence() -> None:
    cohort = Cohort(3)  # all are needed
    cohort.replies["unmask"] = lambda name, content: edit(content, seeds=wrong(content)) if name == "d1" else content
    with pytest.raises(ProtocolError, match="a share of device d0 is wrong"):
        cohort.run()


def test_a_lying_share_of_a_private_key_is_found() -> None:
    cohort = Cohort(7)
    cohort.offline = {"mask": ["d6"]}

    def lie(name: str, content: bytes) -> bytes:
        keys = {device: f"{int(share, 16) ^ 1:064x}" for device, share in json.loads(content)["keys"].items()}
        return edit(content, keys=keys) if name == "d0" else content

    cohort.replies["unmask"] = lie
    assert same(cohort.run(), cohort.plain(cohort.names[:6]))
    assert cohort.sum.faults["d0"].startswith("it sent a wrong share of device d6")


def wrong(content: bytes) -> dict[str, str]:
    return {device: f"{int(share, 16) ^ 1:064x}" for device, share in json.loads(content)["seeds"].items()}


def test_keys_of_another_cycle_are_refused_by_server_and_devices() -> None:
    earlier = Cohort(5, session=SESSION.model_copy(update={"cycle": 0}))
    earlier.run()
    old = earlier.participants["d2"].keys
    cohort = Cohort(5)
    cohort.keys = earlier.keys
    for name, device in cohort.participants.items():
        device.sign = earlier.keys[name].sign
    cohort.replies["advertise"] = lambda name, content: old.write() if name == "d2" else content
    cohort.run()
    assert cohort.sum.faults == {"d2": "it sent keys that are not signed by it, or not for this cycle"}

    cohort = Cohort(5)
    cohort.keys = earlier.keys
    for name, device in cohort.participants.items():
        device.sign = earlier.keys[name].sign

    def replay(name: str, content: bytes) -> bytes:
        roster = Roster.read(content)
        members = [m.model_copy(update={"keys": old}) if m.keys.device == "d2" else m for m in roster.members]
        return roster.model_copy(update={"members": members}).write()

    cohort.requests["share"] = replay
    with pytest.raises(ProtocolError, match="0 of 5 devices have sent shares"):
        cohort.run()
    assert cohort.errors["d0"] == "the keys of device d2 for this cycle are not signed by it"
    assert cohort.errors["d2"].endswith("without the keys that this device has just made")


def test_devices_that_the_server_invents_are_refused() -> None:
    cohort, invented = Cohort(4), Cohort(5)
    imposter = invented.participants["d4"]
    imposter.advertise(SESSION.write())

    def add(name: str, content: bytes) -> bytes:
        roster = json.loads(content)
        roster["members"].append({"keys": imposter.keys.model_dump(), "weight": 0.2})
        return json.dumps(roster).encode()

    cohort.requests["share"] = add
    with pytest.raises(ProtocolError):
        cohort.run()
    assert set(cohort.errors.values()) == {"the keys of device d4 for this cycle are not signed by it"}


def test_a_device_reveals_shares_for_one_list_only() -> None:
    """A server that wants both kinds of shares of a device has to get two lists of survivors signed."""
    cohort = Cohort(5)
    cohort.run()
    device = cohort.participants["d0"]
    for stage, content in (
        ("confirm", b'{"survivors":["d0","d1","d2","d3"]}'),
        ("unmask", b'{"signatures":{}}'),
        ("share", b"{}"),
    ):
        with pytest.raises(ProtocolError, match=f"asks for '{stage}' a second time, or out of order"):
            getattr(device, stage)(content)


def test_a_server_that_shows_devices_different_lists_gets_no_shares() -> None:
    cohort = Cohort(6)  # five are needed
    lists = {"d0": ["d0", "d1", "d2", "d3", "d4"], "d1": ["d0", "d1", "d2", "d3", "d4"]}
    cohort.requests["confirm"] = lambda name, content: (
        edit(content, survivors=lists[name]) if name in lists else content
    )
    with pytest.raises(ProtocolError, match="4 of 6 devices have signed"):
        cohort.run()

    cohort = Cohort(6)
    cohort.requests["confirm"] = lambda name, content: (
        edit(content, survivors=lists[name]) if name in lists else content
    )
    server = cohort.server()
    server.verify = lambda *_: True  # it goes on in spite of that
    with pytest.raises(ProtocolError, match="0 of 6 devices have sent shares in the clear"):
        cohort.run(server)
    assert cohort.errors["d0"] == "2 devices have signed which updates are in the sum, where 5 are necessary"
    assert cohort.errors["d5"] == "4 devices have signed which updates are in the sum, where 5 are necessary"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"threshold": 2}, "a sum of 2 devices, and this device takes part in sums of at least 3"),
        ({"threshold": 4}, "a threshold of 4 of 6 devices, and this device takes part where at least 5 have to stay"),
        ({"threshold": 7}, "a threshold of 7 of 6 devices"),
    ],
)
def test_a_device_refuses_a_threshold_that_does_not_hide_it(changes: dict[str, Any], message: str) -> None:
    cohort = Cohort(6, limits=Limits())
    cohort.requests["share"] = lambda name, content: edit(content, **changes)
    with pytest.raises(ProtocolError):
        cohort.run()
    assert cohort.errors["d0"].startswith(message)


def test_a_device_has_a_least_number_of_devices_of_its_own() -> None:
    cohort = Cohort(6, limits=Limits(devices=6))
    with pytest.raises(ProtocolError):
        cohort.run()
    assert "this device takes part in sums of at least 6" in cohort.errors["d0"]


def test_a_device_refuses_to_be_most_of_the_sum() -> None:
    """A server could give every other device next to no weight."""
    cohort = Cohort(5)

    def single_out(name: str, content: bytes) -> bytes:
        roster = json.loads(content)
        for member in roster["members"]:
            member["weight"] = 1.0 if member["keys"]["device"] == "d3" else 1e-9
        return json.dumps(roster, sort_keys=True, separators=(",", ":")).encode()

    cohort.requests["share"] = single_out
    with pytest.raises(ProtocolError):
        cohort.run()
    assert cohort.errors["d3"] == "this device would be 100% of the sum's weight, and takes part up to 50%"


def test_a_device_refuses_to_be_alone_with_one_heavy_device() -> None:
    """The server gives no weight to anybody but the device and one that is on its side."""
    cohort = Cohort(5)

    def pair(name: str, content: bytes) -> bytes:
        roster = json.loads(content)
        for member in roster["members"]:
            member["weight"] = 0.5 if member["keys"]["device"] in ("d0", "d3") else 1e-9
        return json.dumps(roster, sort_keys=True, separators=(",", ":")).encode()

    cohort.requests["share"] = pair
    with pytest.raises(ProtocolError):
        cohort.run()
    assert cohort.errors["d3"] == (
        "this device would be 100% of the sum's weight without the heaviest other, and takes part up to 90%"
    )


@pytest.mark.parametrize("which", ["channel", "mask"])
def test_a_key_with_which_every_secret_is_zero_puts_only_its_device_out(which: str) -> None:
    cohort = Cohort(5)

    def zero(name: str, content: bytes) -> bytes:
        device = cohort.participants[name]
        device.keys = device.keys.model_copy(update={which: "00" * 32})
        signature = device.sign(device.keys.signed(SESSION)).hex()
        return device.keys.model_copy(update={"signature": signature}).write()

    cohort.replies["advertise"] = lambda name, content: zero(name, content) if name == "d1" else content
    assert same(cohort.run(), cohort.plain([name for name in cohort.names if name != "d1"]))
    assert cohort.sum.faults == {"d1": "it sent a key with which nobody can agree on a secret"}


@pytest.mark.parametrize(("out", "made"), [((), True), (("d4",), False), (("d3", "d4", "d5"), True)])
def test_a_second_sum_of_a_cycle_does_not_tell_what_one_device_sent(out: tuple[str, ...], made: bool) -> None:
    """The difference of two sums is what the devices have sent that are in one of them."""
    first, second = Cohort(9), Cohort(9)
    first.run()
    for name, device in second.participants.items():
        device.earlier = first.participants[name].revealed
    second.offline = {"mask": out}
    if made:
        left = [name for name in second.names if name not in out]
        assert same(second.run(second.server(0.5)), second.plain(left))
    else:
        with pytest.raises(ProtocolError, match="0 of 9 devices have signed"):
            second.run(second.server(0.5))
        assert second.errors["d0"].startswith("a second sum of the same cycle, with nearly the same devices")


def test_a_sum_with_different_weights_for_different_devices_says_nothing() -> None:
    """Masks depend on the whole roster, so those of devices that were shown different ones do not cancel."""
    cohort = Cohort(5)

    def differ(name: str, content: bytes) -> bytes:
        roster = json.loads(content)
        if name == "d0":
            roster["members"][1]["weight"] /= 2
        return json.dumps(roster, sort_keys=True, separators=(",", ":")).encode()

    cohort.requests["share"] = differ
    with pytest.raises(ProtocolError, match="its masks cannot be taken off the sum"):
        cohort.run()


@pytest.mark.parametrize(
    ("stage", "content"),
    [
        ("advertise", b"{}"),
        ("advertise", b"\xff"),
        ("share", b'{"shares":{}}'),
        ("share", b'{"shares":{"d0":"zz"}}'),
        ("mask", b"\0"),
        ("confirm", b'{"signature":""}'),
        ("unmask", b'{"seeds":{"d9":""},"keys":{}}'),
    ],
)
def test_an_answer_of_another_form_puts_its_device_out(stage: str, content: bytes) -> None:
    cohort = Cohort(5)
    cohort.replies[stage] = lambda name, reply: content if name == "d1" else reply
    out = stage in ("advertise", "share", "mask")
    assert same(cohort.run(), cohort.plain([n for n in cohort.names if n != "d1"] if out else cohort.names))
    assert cohort.sum.faults.keys() == {"d1"}


def test_shares_that_cannot_be_read_are_missing_later() -> None:
    cohort = Cohort(6)

    def garble(name: str, content: bytes) -> bytes:
        shares = json.loads(content)["shares"]
        return edit(content, shares={**shares, "d1": "00" * 80}) if name == "d0" else content

    cohort.replies["share"] = garble
    assert same(cohort.run(), cohort.plain(cohort.names))


@settings(max_examples=30, deadline=None)
@given(st.binary(min_size=16, max_size=16), st.integers(2, 9), st.integers(0, 5), st.randoms())
def test_any_threshold_of_shares_recovers_the_secret(secret: bytes, threshold: int, more: int, random: Any) -> None:
    shares = dict(enumerate(shamir.split(secret, threshold, threshold + more), 1))
    some = random.sample(sorted(shares), threshold)
    assert shamir.combine({i: shares[i] for i in some}) == secret
    assert shamir.combine({i: shares[i] for i in some[1:]}) != secret


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-(2**55), 2**55 - 1), min_size=1, max_size=20))
def test_packed_numbers_are_modulo_2_to_the_56(numbers: list[int]) -> None:
    words = np.array(numbers, np.int64).view(np.uint64)
    content = integers.pack(words)
    assert len(content) == 7 * len(numbers)
    assert integers.unpack(content).tolist() == [number % 2**56 for number in numbers]


def test_a_mask_is_the_stream_of_its_key_and_is_taken_off_again() -> None:
    plain = np.arange(200_000, dtype=np.uint64)
    total, stream = plain.copy(), Cipher(algorithms.AES(b"a" * 16), modes.CTR(bytes(16))).encryptor()
    add_masks(total, [(b"a" * 16, +1)])
    assert np.array_equal(total - plain, np.frombuffer(stream.update(bytes(8 * 200_000)), "<u8"))
    add_masks(total, [(b"b" * 16, -1)])
    assert not np.array_equal(total, plain)
    add_masks(total, [(b"a" * 16, -1), (b"b" * 16, +1)])
    assert np.array_equal(total, plain)


def test_a_number_that_the_sum_cannot_hold_is_named() -> None:
    assert integers.too_large({"model": torch.tensor([1.0, -5000.0])}) == (
        "model: a number above 4096, which a secure sum cannot hold"
    )
    assert integers.too_large({"model": torch.tensor([1.0, -4096.0])}) is None


def test_a_device_with_the_key_of_another_is_refused() -> None:
    cohort = Cohort(4)
    session = Session(run="test", round=3, cycle=1, phase=0)
    cohort.participants["d1"] = Participant("d1", session, cohort.keys["d2"].sign, cohort.verify)
    assert same(cohort.run(cohort.server(0.5)), cohort.plain(["d0", "d2", "d3"]))
