"""A cohort of devices and a server in one process, and what may go wrong between them."""

from collections.abc import Callable, Collection, Iterator, Mapping

import numpy as np
import torch
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedcluster.algorithms.aggregation.mean import Mean
from fedcluster.secure_aggregation import integers
from fedcluster.secure_aggregation.device import Limits, Participant
from fedcluster.secure_aggregation.messages import ProtocolError, Session
from fedcluster.secure_aggregation.server import Sum
from fedcluster.state import Aggregate, Tensors

SESSION = Session(run="test", round=3, cycle=1, phase=0)
Altered = Callable[[str, bytes], bytes]


class Cohort:
    """Devices with float32 updates and weights. `offline` has, by stage, the devices that go away before it. `requests`
    and `replies` alter what the server asks, and what devices answer, by stage."""

    def __init__(self, count: int, size: int = 50, limits: Limits | None = None, session: Session = SESSION) -> None:
        rng = np.random.default_rng(count)
        self.names = [f"d{k}" for k in range(count)]
        self.keys = {name: Ed25519PrivateKey.generate() for name in self.names}
        drawn = rng.uniform(1, 2, count)
        self.weights = dict(zip(self.names, (drawn / drawn.sum()).tolist(), strict=True))
        self.updates: dict[str, Tensors] = {
            name: {
                "model": torch.from_numpy(rng.normal(0, 3, size).astype(np.float32)),
                "gradient": torch.from_numpy(rng.normal(0, 1e-4, 7).astype(np.float32)),
            }
            for name in self.names
        }
        self.offline: dict[str, Collection[str]] = {}
        self.requests: dict[str, Altered] = {}
        self.replies: dict[str, Altered] = {}
        self.errors: dict[str, str] = {}
        self.participants = {
            name: Participant(name, session, self.keys[name].sign, self.verify, limits or Limits(threshold=0.5))
            for name in self.names
        }
        self.session = session

    @property
    def spec(self) -> Tensors:
        return self.updates[self.names[0]]

    def verify(self, device: str, message: bytes, signature: bytes) -> bool:
        try:
            self.keys[device].public_key().verify(signature, message)
        except (InvalidSignature, KeyError):
            return False
        return True

    def ask(self, stage: str, requests: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
        self.gone = getattr(self, "gone", set()) | set(self.offline.get(stage, ()))
        for name, content in requests.items():
            if name in self.gone:
                continue
            if stage in self.requests:
                content = self.requests[stage](name, content)
            device = self.participants[name]
            try:
                if stage == "mask":
                    reply = device.mask(content, integers.encode(self.updates[name], self.weights[name]))
                else:
                    reply = device.answer(stage, content)
            except (ProtocolError, ValueError) as error:
                self.errors[name] = str(error)
                self.gone.add(name)
                continue
            yield name, self.replies[stage](name, reply) if stage in self.replies else reply

    def server(self, share: float = 2 / 3) -> Sum:
        return Sum(self.session, self.weights, integers.numbers_of(self.spec), self.verify, share, 3)

    def run(self, server: Sum | None = None) -> Aggregate | None:
        self.sum = server = server or self.server()
        requests = server.share_keys(self.ask("advertise", server.advertise()))
        requests = server.ask_updates(self.ask("share", requests))
        for name, content in self.ask("mask", requests):
            fault = server.add(name, content)
            if fault:
                server.faults[name] = fault
        requests = server.unmask(self.ask("confirm", server.confirm()))
        total = server.finish(self.ask("unmask", requests))
        return integers.mean(self.spec, total, [self.weights[name] for name in server.masked])

    def plain(self, names: Collection[str]) -> Aggregate:
        """The mean without secure aggregation."""
        mean = Mean(self.spec)
        for name in names:
            mean.accumulate(self.updates[name], self.weights[name])
        found = mean.finish()
        assert found is not None
        return found


def same(one: Aggregate | None, other: Aggregate) -> bool:
    assert one is not None
    equal = all(torch.equal(one.message[name], other.message[name]) for name in other.message)
    return equal and one.message.keys() == other.message.keys() and one.weight == other.weight
