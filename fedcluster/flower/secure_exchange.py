"""Carries the messages of secure aggregation between the server of a federation and its devices."""

from collections.abc import Iterator, Mapping

from flwr.app import Message

from fedcluster import __version__
from fedcluster.flower import mailbox
from fedcluster.flower.certificates import verify_by
from fedcluster.flower.executor import FlowerExecutor, Secure
from fedcluster.flower.messages import pack, pack_secure, unpack_secure
from fedcluster.flower.proxy import Proxy
from fedcluster.flower.transport import OFFLINE, Outcome, Transport
from fedcluster.secure_aggregation.messages import ProtocolError, Session
from fedcluster.secure_aggregation.server import Reply
from fedcluster.state import Unsent, Update
from fedcluster.training.executors.secure import Asked


class FlowerDevices:
    """The devices of a federation under secure aggregation. `keys` are their public keys."""

    def __init__(self, executor: FlowerExecutor, keys: dict[bytes, str]) -> None:
        self.executor, self.verify = executor, verify_by(keys)

    def exchange(self, asked: Asked) -> "FlowerExchange":
        return FlowerExchange(self, asked)


class FlowerExchange:
    """The messages of one sum. A device has the deadline of a cohort for each answer."""

    def __init__(self, devices: FlowerDevices, asked: Asked) -> None:
        self.executor, self.verify, self.asked = devices.executor, devices.verify, asked
        self.directory, cycle = self.executor.directory, asked.cycle
        run = self.directory.registry.run
        self.session = Session(run=run, round=cycle.round, cycle=cycle.cycle, phase=asked.phase)
        self.numbers = {self.name(k): k for k in cycle.cohort.tolist()}

    def name(self, k: int) -> str:
        return self.directory.registry.entries[k].device

    def ask(self, stage: str, requests: Mapping[str, bytes]) -> Iterator[Reply]:
        self.directory.update()
        messages, names = {}, {k: name for name, k in self.numbers.items()}
        fields = {"stage": stage, "version": __version__}
        for name, body in requests.items():
            node = self.directory.node(self.numbers[name])
            if node is None:
                yield name, ProtocolError(OFFLINE)
                continue
            content, group = pack_secure(pack(fields), body), str(self.session.round)
            messages[self.numbers[name]] = Message(
                content, node, "query.secure", ttl=self.executor.deadline, group_id=group
            )
        for k, outcome in self.exchange(messages):
            yield names[k], self.read(outcome)

    def exchange(self, messages: dict[int, Message]) -> Iterator[tuple[int, Outcome]]:
        """Through the mailbox where all nodes take messages from there, else through the SuperLink."""
        directory, seconds = self.directory, self.executor.deadline
        proxy, nodes = directory.notifier, {message.metadata.dst_node_id for message in messages.values()}
        if isinstance(proxy, Proxy) and proxy.mailbox.nodes >= nodes:
            return mailbox.exchange(proxy, directory, messages, seconds)
        transport = Transport(directory.grid, self.executor.max_bytes, notifier=directory.notifier)
        return transport.exchange(messages, seconds)

    def read(self, outcome: Outcome) -> bytes | ProtocolError:
        if not isinstance(outcome, Message):
            return ProtocolError(str(outcome))
        body = unpack_secure(outcome.content)
        return ProtocolError("it sent no message of secure aggregation") if body is None else body

    def train(self, requests: Mapping[str, bytes]) -> Iterator[Update | Unsent]:
        asked, bodies = self.asked, {self.numbers[name]: body for name, body in requests.items()}
        secure = Secure(bodies, asked.limits)
        return self.executor.train(asked.cycle, asked.received, asked.phase, asked.device_states, secure)
