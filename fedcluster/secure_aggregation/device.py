"""A device's part in one sum. Each method answers one message of the server, in their order, and each only once."""

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedcluster.secure_aggregation import shamir
from fedcluster.secure_aggregation.ciphers import (
    Words,
    add_masks,
    agree,
    commitment,
    decrypt,
    derive,
    encrypt,
    private_key,
    public_bytes,
)
from fedcluster.secure_aggregation.integers import pack
from fedcluster.secure_aggregation.messages import (
    STAGES,
    Advertisement,
    ProtocolError,
    Revealed,
    Roster,
    Session,
    Shares,
    Signature,
    Signatures,
    Survivors,
    distinct,
    threshold,
)

Sign = Callable[[bytes], bytes]
Verify = Callable[[str, bytes, bytes], bool]
"""Whether (device, message, signature) is that device's signature of this message."""

LEAST_DEVICES = 3  # a sum of two tells each of them what the other sent
LARGEST_SHARE = 0.5  # of a sum's weight that one device may have,
LARGEST_OF_REST = 0.9  # and of the rest without any one other device
THRESHOLD = 2 / 3  # of a cohort, more than which must stay and sign who is in the sum


@dataclass(frozen=True)
class Limits:
    """What a device demands of a sum, whatever the server says: at least `devices` of them in it, and more than the
    share `threshold` of the cohort. Where t of c have to sign, a server that wants two lists of survivors signed, and
    so both kinds of shares, needs 2 t - c devices on its side: a third of the cohort at the default."""

    devices: int = LEAST_DEVICES
    threshold: float = THRESHOLD


class Participant:
    """`sign` is by the device's long-lived key, `verify` checks signatures by those of the others. `earlier` are the
    devices of a sum that was made for this session before."""

    def __init__(
        self,
        name: str,
        session: Session,
        sign: Sign,
        verify: Verify,
        limits: Limits | None = None,
        earlier: Collection[str] = (),
    ) -> None:
        self.name, self.session, self.sign, self.verify = name, session, sign, verify
        self.limits, self.earlier = limits or Limits(), frozenset(earlier)
        self.revealed: frozenset[str] = frozenset()  # the devices of the sum for which shares were revealed
        self.stages = list(STAGES)
        self.seed, self.key_seed = os.urandom(shamir.SECRET), os.urandom(shamir.SECRET)
        self.channel, self.mask_key = X25519PrivateKey.generate(), private_key(self.key_seed)
        self.secrets: dict[str, bytes] = {}  # of the channels to the others
        self.shares: dict[str, bytes] = {}  # by their owner: one of its seed, one of its private key

    def next_stage(self, stage: str) -> None:
        if not self.stages or self.stages[0] != stage:
            raise ProtocolError(f"the server asks for {stage!r} a second time, or out of order")
        del self.stages[0]

    def answer(self, stage: str, content: bytes) -> bytes:
        """The answer to a request, other than for a masked update."""
        if stage == "advertise":
            return self.advertise(content)
        return {"share": self.share, "confirm": self.confirm, "unmask": self.unmask}[stage](content)

    def advertise(self, content: bytes) -> bytes:
        if Session.read(content) != self.session:
            raise ProtocolError("keys are asked for another cycle")
        self.next_stage("advertise")
        keys = Advertisement(
            device=self.name,
            channel=public_bytes(self.channel).hex(),
            mask=public_bytes(self.mask_key).hex(),
            seed=commitment(self.seed).hex(),
        )
        self.keys = keys.model_copy(update={"signature": self.sign(keys.signed(self.session)).hex()})
        return self.keys.write()

    def share(self, content: bytes) -> bytes:
        """Split both secrets, and encrypt one share of each for every other device of the cohort."""
        self.next_stage("share")
        self.roster = roster = Roster.read(content)
        self.check_roster(roster)
        self.digest, self.members, names = roster.digest, roster.keys, roster.names
        seeds = shamir.split(self.seed, roster.threshold, len(names))
        keys = shamir.split(self.key_seed, roster.threshold, len(names))
        sealed = {}
        for name, pair in zip(names, map(bytes.__add__, seeds, keys), strict=True):
            if name == self.name:
                self.shares[name] = pair
            else:
                sealed[name] = encrypt(self.channel_key(self.name, name), pair, self.digest).hex()
        return Shares(shares=sealed).write()

    def check_roster(self, roster: Roster) -> None:
        """Refuse a cohort that does not hide this device's update, or of which a member is not who it should be."""
        members, names, least = roster.keys, roster.names, self.limits.devices
        if roster.session != self.session or members.get(self.name) != self.keys:
            raise ProtocolError("a cohort of another cycle, or without the keys that this device has just made")
        if names != sorted(names) or not distinct(names):
            raise ProtocolError("a cohort whose devices are not in order, or in it twice")
        if not distinct(key for one in members.values() for key in (one.channel, one.mask)):
            raise ProtocolError("two devices of the cohort have the same key")
        if len(names) < least or roster.threshold < least:
            raise ProtocolError(
                f"a sum of {min(len(names), roster.threshold)} devices, and this device takes part in sums of at least "
                f"{least}"
            )
        needed = threshold(self.limits.threshold, len(names), least)
        if not needed <= roster.threshold <= len(names):
            raise ProtocolError(
                f"a threshold of {roster.threshold} of {len(names)} devices, and this device takes part where at least "
                f"{needed} have to stay"
            )
        for name, one in members.items():
            if not self.verify(name, one.signed(self.session), bytes.fromhex(one.signature)):
                raise ProtocolError(f"the keys of device {name} for this cycle are not signed by it")
        self.check_weight(names)

    @property
    def weight(self) -> float:
        """p_u, which is in the roster that all devices of the cohort have."""
        return self.roster.weights[self.name]

    def check_weight(self, names: list[str]) -> None:
        """The server chooses the weights. It could give next to none to all other devices, or to all but one that is on
        its side."""
        weights = self.roster.weights
        own, total = weights[self.name], sum(weights[name] for name in names)
        rest = total - max(weights[name] for name in names if name != self.name)
        for share, largest, of in (
            (own / total, LARGEST_SHARE, "the sum's weight"),
            (own / rest, LARGEST_OF_REST, "the sum's weight without the heaviest other"),
        ):
            if share > largest:
                raise ProtocolError(f"this device would be {share:.0%} of {of}, and takes part up to {largest:.0%}")

    def channel_key(self, sender: str, receiver: str) -> bytes:
        other = receiver if sender == self.name else sender
        if other not in self.secrets:
            self.secrets[other] = agree(self.channel, bytes.fromhex(self.members[other].channel))
        return derive(self.secrets[other], b"shares", self.digest, sender.encode(), receiver.encode())

    def mask(self, content: bytes, numbers: Words) -> bytes:
        """y_u, given the others' shares and x_u, which is changed. A device whose shares cannot be read is still in the
        sum, with one share less of its secrets."""
        self.next_stage("mask")
        received = Shares.read(content).shares
        if self.name in received or not received.keys() <= self.members.keys():
            raise ProtocolError("shares from devices that are not of the cohort")
        self.sharing = sorted([*received, self.name])
        if len(self.sharing) < self.roster.threshold:
            raise ProtocolError(f"only {len(self.sharing)} of {self.roster.threshold} devices have sent shares")
        for name, text in received.items():
            pair = decrypt(self.channel_key(name, self.name), bytes.fromhex(text), self.digest)
            if pair is not None and len(pair) == 2 * shamir.SHARE:
                self.shares[name] = pair
        masks = [(self_mask(self.seed, self.digest), +1)]
        for name in received:
            secret = agree(self.mask_key, bytes.fromhex(self.members[name].mask))
            masks.append((pair_mask(secret, self.digest, self.name, name), +1 if self.name < name else -1))
        add_masks(numbers, masks)
        return pack(numbers)

    def confirm(self, content: bytes) -> bytes:
        """Sign the list of devices whose masked updates have come. From now on no other list is accepted."""
        self.next_stage("confirm")
        self.survivors = Survivors.read(content)
        names = self.survivors.survivors
        if names != sorted(names) or not distinct(names) or not set(names) <= set(self.sharing):
            raise ProtocolError("the devices in the sum are not of the cohort, or not in order")
        if self.name not in names or len(names) < self.roster.threshold:
            raise ProtocolError(f"a sum of {len(names)} devices, where {self.roster.threshold} are necessary")
        if self.earlier and 0 < len(self.earlier ^ set(names)) < self.limits.devices:
            raise ProtocolError(
                "a second sum of the same cycle, with nearly the same devices: the difference of both would tell what "
                "single devices have sent"
            )
        self.check_weight(names)
        return Signature(signature=self.sign(self.survivors.signed(self.roster)).hex()).write()

    def unmask(self, content: bytes) -> bytes:
        """Shares of the seeds of devices in the sum and of the private keys of the others, never both of one device. At
        least `threshold` devices must have signed the list that this device has signed."""
        self.next_stage("unmask")
        text, names = self.survivors.signed(self.roster), set(self.survivors.survivors)
        given = Signatures.read(content).signatures
        valid = [name for name in given if name in names and self.verify(name, text, bytes.fromhex(given[name]))]
        if len(valid) < self.roster.threshold:
            raise ProtocolError(
                f"{len(valid)} devices have signed which updates are in the sum, where {self.roster.threshold} are "
                "necessary"
            )
        seeds = {name: pair[: shamir.SHARE].hex() for name, pair in self.shares.items() if name in names}
        keys = {
            name: pair[shamir.SHARE :].hex()
            for name, pair in self.shares.items()
            if name in self.sharing and name not in names
        }
        self.revealed = frozenset(names)
        return Revealed(seeds=seeds, keys=keys).write()


def self_mask(seed: bytes, digest: bytes) -> bytes:
    """The key of G(b_u)."""
    return derive(seed, b"own mask", digest)


def pair_mask(secret: bytes, digest: bytes, one: str, other: str) -> bytes:
    """The key of G(s_uv)."""
    return derive(secret, b"common mask", digest, *(name.encode() for name in sorted((one, other))))
