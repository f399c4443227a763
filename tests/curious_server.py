"""A server that wants to know single updates: `python -m tests.curious_server serve ...`. It first invents a device.
When that fails, it makes a sum honestly, and then asks all devices for shares of the other kind, as if the last device
of the sum had gone away, and prints what they answer."""

import json
from collections.abc import Iterator, Mapping

from cryptography.hazmat.primitives.asymmetric import ec

from fedcluster.cli import main
from fedcluster.flower.certificates import sign_with
from fedcluster.flower.secure_exchange import FlowerExchange
from fedcluster.secure_aggregation.device import Participant
from fedcluster.secure_aggregation.messages import Member, Roster
from fedcluster.secure_aggregation.server import Reply

honest, invented = FlowerExchange.ask, list[bool]()


def ask(self: FlowerExchange, stage: str, requests: Mapping[str, bytes]) -> Iterator[Reply]:
    if stage == "share" and not invented:
        invented.append(True)
        requests = {name: invent(self, content) for name, content in requests.items()}
    replies = list(honest(self, stage, requests))
    yield from replies
    if stage == "unmask":
        names = sorted(requests)[:-1]
        again = json.dumps({"survivors": names}, separators=(",", ":")).encode()
        for name, reply in [*honest(self, "confirm", dict.fromkeys(names, again)), *honest(self, "unmask", requests)]:
            print(f"asked {name} again: {reply if isinstance(reply, Exception) else 'it has answered'}", flush=True)


def invent(self: FlowerExchange, content: bytes) -> bytes:
    """The cohort with one more device, whose keys the server has made."""
    sign = sign_with(ec.generate_private_key(ec.SECP384R1()))
    ghost = Participant("zz", self.session, sign, self.verify)
    ghost.advertise(self.session.write())
    roster = Roster.read(content)
    members = [*roster.members, Member(keys=ghost.keys, weight=0.1)]
    return roster.model_copy(update={"members": members, "threshold": len(members) // 2 + 1}).write()


if __name__ == "__main__":
    FlowerExchange.ask = ask  # type: ignore[method-assign]
    main()
