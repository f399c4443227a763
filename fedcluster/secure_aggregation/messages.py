"""What server and devices send each other: JSON, checked when it is read, with bytes in hexadecimal."""

import json
from collections.abc import Iterable
from hashlib import sha256
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

ADVERTISE, SHARE, MASK, CONFIRM, UNMASK = STAGES = "advertise", "share", "mask", "confirm", "unmask"

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]  # of a device
Hex = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{2})*$", max_length=512)]
Key = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Number = Annotated[int, Field(ge=0, le=2**62)]
Weight = Annotated[float, Field(gt=0, le=1)]
MOST = 10_000  # devices of a cohort


class ProtocolError(Exception):
    """The protocol cannot go on: another party did not follow it, or too few devices are left. The text says why."""


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @classmethod
    def read(cls, content: bytes) -> Self:
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            where = ".".join(map(str, error.errors(include_input=False, include_url=False)[0]["loc"]))[:80]
            raise ProtocolError(
                f"it is not a message of secure aggregation ({cls.__name__}: {where or 'not JSON'})"
            ) from None

    def write(self) -> bytes:
        return json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":")).encode()


class Session(Message):
    """Which sum it is. Every signature and key is for one session."""

    run: Annotated[str, StringConstraints(max_length=64)]
    round: Number
    cycle: Number
    phase: Number


class Advertisement(Message):
    """A device's keys for one session: `channel` for the shares that others send it, `mask` for the masks that it has
    in common with them. `seed` is the commitment to b_u."""

    device: Name
    channel: Key
    mask: Key
    seed: Key
    signature: Hex = ""

    def signed(self, session: Session) -> bytes:
        """What the signature is of."""
        unsigned = self.model_copy(update={"signature": ""})
        return b"fedcluster keys\n" + session.write() + b"\n" + unsigned.write()


class Member(Message):
    """A device of the cohort, with its weight p_k in the sum."""

    keys: Advertisement
    weight: Weight


class Roster(Message):
    """The cohort of a session, in the order of the devices' names. `threshold` shares recover a secret."""

    session: Session
    threshold: Annotated[int, Field(ge=1, le=MOST)]
    members: Annotated[list[Member], Field(max_length=MOST)]

    @property
    def digest(self) -> bytes:
        return sha256(self.write()).digest()

    @property
    def names(self) -> list[str]:
        return [member.keys.device for member in self.members]

    @property
    def keys(self) -> dict[str, Advertisement]:
        return {member.keys.device: member.keys for member in self.members}

    @property
    def weights(self) -> dict[str, float]:
        return {member.keys.device: member.weight for member in self.members}


class Shares(Message):
    """Shares by device: encrypted, one for each receiver or from each sender; or in the clear, to be combined."""

    shares: Annotated[dict[Name, Hex], Field(max_length=MOST)]


class Survivors(Message):
    """The devices whose masked updates have come."""

    survivors: Annotated[list[Name], Field(max_length=MOST)]

    def signed(self, roster: Roster) -> bytes:
        """What the signature of this list is of."""
        return b"fedcluster survivors\n" + roster.digest + b"\n" + self.write()


class Signature(Message):
    signature: Hex


class Signatures(Message):
    """Signatures of the list of survivors, by device."""

    signatures: Annotated[dict[Name, Hex], Field(max_length=MOST)]


class Revealed(Message):
    """A device's shares: of b_u of devices whose masked updates have come, of private keys of the others."""

    seeds: Annotated[dict[Name, Key], Field(max_length=MOST)]
    keys: Annotated[dict[Name, Key], Field(max_length=MOST)]


def threshold(share: float, devices: int, least: int) -> int:
    """More than this share of a cohort, and at least `least` devices."""
    return max(least, int(share * devices) + 1)


def distinct(values: Iterable[str]) -> bool:
    found = list(values)
    return len(set(found)) == len(found)
