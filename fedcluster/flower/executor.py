"""The executor of a federation: a cohort trained by the devices themselves.

What devices keep stays with them. In its place the server's state notes for each the last turn that it heard of, so
that a checkpoint says where every device was, and a device whose turn got lost takes it again from where it began.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from flwr.app import Message
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from fedcluster import __version__
from fedcluster.algorithms import FedAvg
from fedcluster.fleet.schedule import Cycle
from fedcluster.flower.messages import Unreadable, pack, pack_tensors, pack_with, skew, text, whole
from fedcluster.flower.registry import Registration, Registry, read_registration
from fedcluster.flower.transport import GONE, SILENT, Found, Notifier, Reply, Transport, opened, printable
from fedcluster.state import Message as Tensors
from fedcluster.state import Unsent, Update
from fedcluster.training.executors.in_process import DeviceStates

ASK = 600.0  # seconds that a node has to say who it is: it may have to load its data first, and nobody waits for it
REMEMBERS: Tensors = {"turn": torch.zeros(1, dtype=torch.int64)}
Say = Callable[[str], None]


@dataclass(eq=False)
class NodeDirectory:
    """Which node each device is, now. `keys` says whose key is whose; None where nobody has one: first come."""

    grid: Grid
    registry: Registry
    keys: dict[bytes, str] | None
    say: Say
    notifier: Notifier = field(default_factory=Notifier)
    devices: dict[int, str] = field(default_factory=dict)  # by node id
    refused: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        speak = self.say
        self.say = lambda text: speak(printable(text))  # much of it are words of the devices' own
        self.transport = Transport(self.grid, most=2**20, notifier=self.notifier)
        self.asked: dict[int, NodeInfo] = {}

    def look(self) -> None:
        """Find out who is there; ask those whom we do not know who they are, and read what they have answered. Nobody
        is waited for."""
        there = {node.node_id: node for node in self.grid.get_nodes()}
        self.devices = {node: device for node, device in self.devices.items() if node in there}
        self.refused &= there.keys()
        strangers = there.keys() - self.devices.keys() - self.refused - self.asked.keys()
        answers: list[tuple[int, Found]] = []
        if strangers:
            self.asked |= {node: there[node] for node in strangers}
            asking = {"ask": "who", "version": __version__}
            question = {node: Message(pack(asking), node, "query", ttl=ASK) for node in strangers}
            answers += self.transport.send(question, ASK)
        for node, found in [*answers, *self.transport.collect()]:
            info = self.asked.pop(node)
            why = self.meet(info, opened(found))
            if why in SILENT:  # it is asked again
                self.say(f"a node ({self.owner(info)}) does not say who it is: {why}")
            elif why is not None:
                self.refuse(info, why)

    def refuse(self, node: NodeInfo, why: str) -> None:
        """Say so, here and there. The node is not asked again while it stays."""
        self.refused.add(node.node_id)
        self.say(f"refused a node ({self.owner(node)}): {why}")
        self.grid.push_messages([Message(pack({"refused": why}), node.node_id, "query", ttl=ASK)])
        self.notifier.ring([node.node_id])

    def owner(self, node: NodeInfo) -> str:
        if self.keys is None:
            return "no key"
        return f"key of device {self.keys[node.public_key]}" if node.public_key in self.keys else "unknown key"

    def meet(self, node: NodeInfo, reply: Reply | Unreadable | str) -> str | None:
        """Put a node's device on the roster; why not, if not."""
        if isinstance(reply, Unreadable | str):
            return str(reply)
        differ = skew(reply[0], "it", "this server")
        try:
            registration: Registration = read_registration(text(reply[0], "registration"))
        except (Unreadable, ValueError) as error:
            return f"{error}; {differ}: install the same version on both" if differ else str(error)
        device = registration.device
        if self.keys is not None and self.keys.get(node.public_key) != device:
            return f"it says that it is device {device}, whose key it does not have"
        if device in self.devices.values():
            return f"it says that it is device {device}, which is here already"
        why = self.registry.note(registration)
        if why is not None:
            return f"it says that it is device {device}, but {why}"
        self.devices[node.node_id] = device
        if differ:
            self.say(f"device {device}: {differ}: the last digits may differ")
        return None

    def node(self, number: int) -> int | None:
        """The node of a device on the roster, if it is here."""
        device = self.registry.entries[number].device
        return next((node for node, name in self.devices.items() if name == device), None)


class NoExecutor:
    """The executor of a run for which no device is asked."""

    def train(
        self, cycle: Cycle, received: Tensors, phase: int, device_states: DeviceStates
    ) -> Iterator[Update | Unsent]:
        return iter(())

    def close(self) -> None:
        pass


class Federation:
    """Sends a cohort its broadcast and passes on what comes back before the deadline."""

    def __init__(
        self, directory: NodeDirectory, algorithm: FedAvg, plan: str, most: int, keeps: bool, deadline: float
    ) -> None:
        self.directory, self.plan, self.keeps, self.deadline = directory, plan, keeps, deadline
        self.phases = len(algorithm.phases)
        self.transport = Transport(directory.grid, most, notifier=directory.notifier)
        self.sent: Tensors = {}  # in this cycle
        self.began: dict[int, int] = {}  # the last turn that each device of the cycle had finished when it began

    def train(
        self, cycle: Cycle, received: Tensors, phase: int, device_states: DeviceStates
    ) -> Iterator[Update | Unsent]:
        self.directory.look()
        if phase == 0:
            self.sent, self.began = {}, {}
        tensors = pack_tensors({name: t for name, t in received.items() if t is not self.sent.get(name)})
        self.sent = received
        turn = cycle.round * self.phases + phase + 1
        messages = {}
        for k in cycle.cohort.tolist():
            node = self.directory.node(k)
            since = int(device_states[k]["turn"]) if k in device_states else 0
            began = self.began.setdefault(k, since)
            place = {"round": cycle.round, "cycle": cycle.cycle, "device": k, "exchange": phase}
            turns = {"began": began, "since": since, "turn": turn, "version": __version__}
            facts = place | turns | {"run": self.directory.registry.run, "plan": self.plan}
            if node is not None:
                content, group = pack_with(facts, tensors), str(cycle.round)
                messages[k] = Message(content, node, "train", ttl=self.deadline, group_id=group)
            else:
                yield self.unsent(cycle, k)
        for k, found in self.transport.exchange(messages, self.deadline) if messages else ():
            reply = opened(found)
            if isinstance(reply, Unreadable):
                yield Update(k, cycle.round, cycle.cycle, {}, fault=str(reply))
            elif reply == GONE:
                yield self.unsent(cycle, k)
            elif isinstance(reply, str):
                self.remark(cycle, k, reply)
            else:
                yield self.update(k, cycle, phase, turn, reply, device_states)

    def unsent(self, cycle: Cycle, k: int) -> Unsent:
        self.remark(cycle, k, GONE)
        return Unsent(k)

    def update(self, k: int, cycle: Cycle, phase: int, turn: int, reply: Reply, device_states: DeviceStates) -> Update:
        facts, tensors = reply
        try:
            round, place, number = (whole(facts, name) for name in ("round", "cycle", "exchange"))
        except Unreadable as error:
            return Update(k, cycle.round, cycle.cycle, {}, fault=str(error))
        if number != phase:
            return Update(k, round, place, {}, fault=f"for exchange {number}")
        if self.keeps and (round, place) == (cycle.round, cycle.cycle):
            device_states[k] = {"turn": torch.tensor([turn])}
            if facts.get("lost") is True:
                self.remark(cycle, k, "it has lost what it kept, and went on as if it were new")
        return Update(k, round, place, tensors)

    def remark(self, cycle: Cycle, k: int, why: str) -> None:
        device = self.directory.registry.entries[k].device
        self.directory.say(f"round {cycle.round + 1}, cluster {cycle.cluster}: device {device}: {why}")

    def close(self) -> None:
        pass
