"""The server's part in one sum: it passes keys and shares on, adds up masked updates, and takes off the masks."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from fedcluster.secure_aggregation import shamir
from fedcluster.secure_aggregation.ciphers import Words, add_masks, agree, commitment, private_key, public_bytes, usable
from fedcluster.secure_aggregation.device import Verify, pair_mask, self_mask
from fedcluster.secure_aggregation.integers import WIDTH, unpack
from fedcluster.secure_aggregation.messages import (
    Advertisement,
    Member,
    ProtocolError,
    Revealed,
    Roster,
    Session,
    Shares,
    Signature,
    Signatures,
    Survivors,
    threshold,
)

Reply = tuple[str, bytes | ProtocolError]
"""A device, and what it has answered, or why it does not answer."""


class Sum:
    """One sum over the devices of `weights`, of vectors of `size` numbers. More than `share` of the devices that
    advertise keys recover a secret, and at least `least`. `faults` has, by device, why it is not in the sum, or what
    was wrong with what it sent."""

    def __init__(
        self, session: Session, weights: Mapping[str, float], size: int, verify: Verify, share: float, least: int
    ) -> None:
        self.session, self.weights, self.verify, self.share, self.least = session, weights, verify, share, least
        self.total: Words = np.zeros(size, np.uint64)
        self.faults: dict[str, str] = {}
        self.members: list[Member] = []
        self.sealed: dict[str, dict[str, str]] = {}  # encrypted shares, by receiver and sender
        self.masked: list[str] = []

    def advertise(self) -> dict[str, bytes]:
        return dict.fromkeys(self.weights, self.session.write())

    def share_keys(self, replies: Iterable[Reply]) -> dict[str, bytes]:
        """Given keys, ask for shares."""

        def take(device: str, content: bytes) -> None:
            keys = Advertisement.read(content)
            signed = self.verify(device, keys.signed(self.session), bytes.fromhex(keys.signature))
            if keys.device != device or not signed:
                raise ProtocolError("it sent keys that are not signed by it, or not for this cycle")
            if not (usable(bytes.fromhex(keys.channel)) and usable(bytes.fromhex(keys.mask))):
                raise ProtocolError("it sent a key with which nobody can agree on a secret")
            self.members.append(Member(keys=keys, weight=self.weights[device]))

        self.take_all(replies, take)
        self.members.sort(key=lambda member: member.keys.device)
        self.needed = threshold(self.share, len(self.members), self.least)
        self.check_enough(len(self.members), "have sent keys")
        self.roster = Roster(session=self.session, threshold=self.needed, members=self.members)
        self.digest, self.keys = self.roster.digest, self.roster.keys
        return dict.fromkeys(self.keys, self.roster.write())

    def ask_updates(self, replies: Iterable[Reply]) -> dict[str, bytes]:
        """Given shares, ask for masked updates."""
        sent: dict[str, dict[str, str]] = {}

        def take(device: str, content: bytes) -> None:
            shares = Shares.read(content).shares
            if shares.keys() != self.keys.keys() - {device}:
                raise ProtocolError("it sent shares for other devices than those of the cohort")
            sent[device] = shares

        self.take_all(replies, take)
        self.check_enough(len(sent), "have sent shares")
        self.sharing = sorted(sent)
        inboxes = {u: Shares(shares={v: sent[v][u] for v in self.sharing if v != u}) for u in self.sharing}
        return {device: inbox.write() for device, inbox in inboxes.items()}

    def add(self, device: str, content: bytes) -> str | None:
        """Add a masked update. Returns why it is refused."""
        if device not in self.sharing:
            return "a masked update without shares"
        if device in self.masked:
            return "a second time"
        if len(content) != WIDTH * len(self.total):
            return "a masked update of another length"
        self.total += unpack(content)
        self.masked.append(device)
        return None

    def confirm(self) -> dict[str, bytes]:
        """Ask for signatures of the list of masked updates."""
        self.check_enough(len(self.masked), "have sent masked updates")
        self.masked.sort()
        self.survivors = Survivors(survivors=self.masked)
        return dict.fromkeys(self.masked, self.survivors.write())

    def unmask(self, replies: Iterable[Reply]) -> dict[str, bytes]:
        """Given the signatures, ask for shares in the clear."""
        text, valid = self.survivors.signed(self.roster), dict[str, str]()

        def take(device: str, content: bytes) -> None:
            signature = Signature.read(content).signature
            if not self.verify(device, text, bytes.fromhex(signature)):
                raise ProtocolError("it sent a signature that is not its own")
            valid[device] = signature

        self.take_all(replies, take)
        self.check_enough(len(valid), "have signed which updates are in the sum")
        return dict.fromkeys(valid, Signatures(signatures=valid).write())

    def finish(self, replies: Iterable[Reply]) -> Words:
        """Given the shares, the sum of the updates modulo 2^64, of which the lowest 56 bits count."""
        revealed: dict[str, Revealed] = {}
        gone = [device for device in self.sharing if device not in self.masked]

        def take(device: str, content: bytes) -> None:
            answer = Revealed.read(content)
            if not answer.seeds.keys() <= set(self.masked) or not answer.keys.keys() <= set(gone):
                raise ProtocolError("it sent shares of another kind than asked for")
            revealed[device] = answer

        self.take_all(replies, take)
        self.check_enough(len(revealed), "have sent shares in the clear")
        masks: list[tuple[bytes, int]] = []
        for device in self.masked:
            shares = {other: answer.seeds[device] for other, answer in revealed.items() if device in answer.seeds}
            seed = self.recover(device, shares, lambda seed: commitment(seed).hex(), self.keys[device].seed)
            masks.append((self_mask(seed, self.digest), -1))
        for device in gone:
            shares = {other: answer.keys[device] for other, answer in revealed.items() if device in answer.keys}
            seed = self.recover(
                device, shares, lambda seed: public_bytes(private_key(seed)).hex(), self.keys[device].mask
            )
            key = private_key(seed)
            for other in self.masked:
                secret = agree(key, bytes.fromhex(self.keys[other].mask))
                masks.append((pair_mask(secret, self.digest, device, other), -1 if other < device else +1))
        add_masks(self.total, masks)
        return self.total

    def recover(self, device: str, shares: Mapping[str, str], public: Callable[[bytes], str], advertised: str) -> bytes:
        """The secret of a device whose public part it has advertised, from `needed` of its shares. Where they are more,
        it is found although one of them is wrong."""
        numbers = {name: i for i, name in enumerate(self.roster.names, 1)}
        trusted = sorted(shares, key=lambda name: (name in self.faults, name))
        for left_out in (None, *trusted):
            chosen = [name for name in trusted if name != left_out][: self.needed]
            if len(chosen) < self.needed:
                break
            secret = shamir.combine({numbers[name]: bytes.fromhex(shares[name]) for name in chosen})
            if secret is not None and public(secret) == advertised:
                if left_out is not None:
                    self.faults[left_out] = (
                        f"it sent a wrong share of device {device}, unless that device had sent it a wrong one"
                    )
                return secret
        raise ProtocolError(
            f"a share of device {device} is wrong, or too few of them came: its masks cannot be taken off the sum"
        )

    def take_all(self, replies: Iterable[Reply], take: Callable[[str, bytes], None]) -> None:
        for device, content in replies:
            try:
                if isinstance(content, ProtocolError):
                    raise content
                take(device, content)
            except (ProtocolError, ValueError) as error:
                self.faults[device] = str(error)

    def check_enough(self, count: int, what: str) -> None:
        needed = getattr(self, "needed", self.least)
        if count < needed:
            raise ProtocolError(f"{count} of {len(self.weights)} devices {what}, and a sum needs at least {needed}")
