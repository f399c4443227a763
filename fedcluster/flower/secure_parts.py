"""A device's part in the secure sums of a federation: its key, the keys of others, and the sum that it is in now."""

from pathlib import Path

from fedcluster.errors import BadData
from fedcluster.flower.certificates import private_key, public_keys, sign_with, verify_by
from fedcluster.flower.limits import Limits
from fedcluster.flower.messages import InvalidMessage
from fedcluster.secure_aggregation import integers
from fedcluster.secure_aggregation.device import Limits as SumLimits
from fedcluster.secure_aggregation.device import Participant
from fedcluster.secure_aggregation.messages import ADVERTISE, MASK, STAGES, UNMASK, Session
from fedcluster.state import Tensors

REMEMBERED = 10_000  # sums


class SecureParts:
    """`folder` has `devices/ID.key` of this device and `devices/ID.pub` of all. The keys of others have to come from
    somebody whom the device trusts: they decide who may be in a sum."""

    def __init__(self, device: str, folder: str, limits: Limits) -> None:
        self.device, self.limits = device, SumLimits(limits.least_devices, limits.threshold)
        if not folder:
            raise BadData("secure aggregation needs the keys of all devices: join with --certificates")
        self.folder = Path(folder)
        self.sign = sign_with(private_key(self.folder / "devices" / f"{device}.key"))
        self.current: Participant | None = None
        self.made: dict[Session, frozenset[str]] = {}  # the devices of sums that this device was in, the last ones

    def keys(self) -> dict[bytes, str]:
        """The public keys of all devices, read anew, because devices may have come."""
        found = public_keys(self.folder)
        if len(found) < self.limits.devices:
            raise BadData(
                f"secure aggregation needs the public keys of all devices, and {self.folder}/devices has {len(found)}: "
                "copy ID.pub of each there, from somebody whom you trust to say who takes part"
            )
        return found

    def answer(self, stage: str, content: bytes) -> bytes:
        """The answer to a message of the server, other than for a masked update."""
        if stage not in STAGES or stage == MASK:
            raise InvalidMessage("an unknown stage of secure aggregation")
        if stage == ADVERTISE:
            session, verify = Session.read(content), verify_by(self.keys())
            earlier = self.made.get(session, ())
            self.current = Participant(self.device, session, self.sign, verify, self.limits, earlier)
        if self.current is None:
            raise InvalidMessage("a later stage of a sum whose first did not come here")
        answer = self.current.answer(stage, content)
        if stage == UNMASK:
            self.made[self.current.session] = self.current.revealed
            if len(self.made) > REMEMBERED:
                del self.made[next(iter(self.made))]
        return answer

    def mask(self, session: Session, content: bytes, update: Tensors) -> bytes:
        """This device's masked update, with the weight that the cohort agreed on."""
        if self.current is None or self.current.session != session:
            raise InvalidMessage("a masked update is asked for in another cycle than keys were")
        return self.current.mask(content, integers.encode(update, self.current.weight))
