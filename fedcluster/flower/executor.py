"""The executor of a federation: the devices of a cohort train on their own machines.

Device state stays on the device. In its place the server's state has the number of the last phase that the server heard
of from each device. A checkpoint therefore says where every device was, and a device whose reply was lost repeats the
cycle from the state with which it began it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from flwr.app import Message
from flwr.serverapp import Grid

from fedcluster import __version__
from fedcluster.algorithms import FedAvg
from fedcluster.fleet.schedule import Cycle
from fedcluster.flower._compat import NodeInfo
from fedcluster.flower.messages import (
    InvalidMessage,
    get_int,
    get_text,
    pack,
    pack_secure,
    pack_tensors,
    pack_with,
    printable,
    unpack_secure,
    version_mismatch,
)
from fedcluster.flower.registry import Registration, Registry, read_registration
from fedcluster.flower.transport import OFFLINE, SILENT, Notifier, Outcome, Reply, Transport, unpack_outcome
from fedcluster.reporting import Say
from fedcluster.state import Tensors, Unsent, Update
from fedcluster.training.executors.in_process import DeviceStates
from fedcluster.training.executors.secure import Withdrawn, masked

IDENTIFY_SECONDS = 600.0  # for a node to identify itself, which may include loading its data; nobody waits for it
REMOTE_STATE: Tensors = {"phase": torch.zeros(1, dtype=torch.int64)}  # what the server keeps of a device with state


@dataclass(eq=False)
class NodeDirectory:
    """Which node each device is now. `keys` maps public keys to device ids; with None, ids are first come, first
    served."""

    grid: Grid
    registry: Registry
    keys: dict[bytes, str] | None
    say: Say
    notifier: Notifier = field(default_factory=Notifier)
    devices: dict[int, str] = field(default_factory=dict)  # by node id, those online
    refused: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        say = self.say
        self.say = lambda text: say(printable(text))  # much of it comes from devices
        self.transport = Transport(self.grid, max_bytes=2**20, notifier=self.notifier)
        self.asked: dict[int, NodeInfo] = {}

    def update(self) -> None:
        """Look who is online, ask new nodes who they are, and read the answers that have come, without waiting."""
        online = {node.node_id: node for node in self.grid.get_nodes()}
        self.devices = {node: device for node, device in self.devices.items() if node in online}
        self.refused &= online.keys()
        new = online.keys() - self.devices.keys() - self.refused - self.asked.keys()
        outcomes: list[tuple[int, Outcome]] = []
        if new:
            self.asked |= {node: online[node] for node in new}
            fields = {"ask": "who", "version": __version__}
            queries = {node: Message(pack(fields), node, "query", ttl=IDENTIFY_SECONDS) for node in new}
            outcomes += self.transport.send(queries, IDENTIFY_SECONDS)
        for node, outcome in [*outcomes, *self.transport.collect()]:
            info = self.asked.pop(node)
            reason = self.identify(info, unpack_outcome(outcome))
            if reason in SILENT:  # it is asked again
                self.say(f"a node ({self.describe(info)}) does not identify itself: {reason}")
            elif reason is not None:
                self.refuse(info, reason)

    def refuse(self, node: NodeInfo, reason: str) -> None:
        """Log the refusal and tell the node, which is not asked again while it stays online."""
        self.refused.add(node.node_id)
        self.say(f"refused a node ({self.describe(node)}): {reason}")
        self.grid.push_messages([Message(pack({"refused": reason}), node.node_id, "query", ttl=IDENTIFY_SECONDS)])
        self.notifier.notify([node.node_id])

    def describe(self, node: NodeInfo) -> str:
        if self.keys is None:
            return "no key"
        return f"key of device {self.keys[node.public_key]}" if node.public_key in self.keys else "unknown key"

    def identify(self, node: NodeInfo, reply: Reply | InvalidMessage | str) -> str | None:
        """Register a node's device. Returns the reason if it is refused."""
        if isinstance(reply, InvalidMessage | str):
            return str(reply)
        mismatch = version_mismatch(reply[0], "it", "this server")
        try:
            registration: Registration = read_registration(get_text(reply[0], "registration"))
        except (InvalidMessage, ValueError) as error:
            return f"{error}; {mismatch}: install the same version on both" if mismatch else str(error)
        device = registration.device
        if self.keys is not None and self.keys.get(node.public_key) != device:
            return f"it says that it is device {device}, whose key it does not have"
        if device in self.devices.values():
            return f"it says that it is device {device}, which is already online"
        reason = self.registry.register(registration)
        if reason is not None:
            return f"it says that it is device {device}, but {reason}"
        self.devices[node.node_id] = device
        if mismatch:
            self.say(f"device {device}: {mismatch}: results may differ in the last digits")
        return None

    def node(self, number: int) -> int | None:
        """The node of a registered device, None if it is offline."""
        device = self.registry.entries[number].device
        return next((node for node, name in self.devices.items() if name == device), None)


class Secure(NamedTuple):
    """What secure aggregation adds to the messages of a phase: its own, by device, and the largest norms of the parts
    of an update."""

    bodies: dict[int, bytes]
    limits: dict[str, float]


class NoExecutor:
    """The executor of a run that is finished, or not connected to its devices yet."""

    def train(
        self, cycle: Cycle, received: Tensors, phase: int, device_states: DeviceStates
    ) -> Iterator[Update | Unsent]:
        return iter(())

    def close(self) -> None:
        pass


@dataclass(eq=False)
class Exchange:
    """A cohort under way: what it was sent, and the devices that could not be sent it."""

    cycle: Cycle
    received: Tensors
    number: int
    transport: Transport
    masked: bool = False  # updates are summed securely
    offline: list[int] = field(default_factory=list)

    def is_of(self, cycle: Cycle, received: Tensors) -> bool:
        """Whether this is what the cohort is to be sent. It is not where a failed round has been repeated."""
        same = received.keys() == self.received.keys() and np.array_equal(cycle.cohort, self.cycle.cohort)
        return same and all(torch.equal(tensor, self.received[name]) for name, tensor in received.items())


class FlowerExecutor:
    """Sends the broadcast to a cohort and yields the updates that come before the deadline. `keeps_state` says whether
    the algorithm keeps state on devices. Where cycles overlap, `overlap` later cohorts may be under way besides."""

    def __init__(
        self,
        directory: NodeDirectory,
        algorithm: FedAvg,
        plan: str,
        max_bytes: int,
        keeps_state: bool,
        deadline: float,
        overlap: int = 0,
    ) -> None:
        self.directory, self.plan, self.keeps_state, self.deadline = directory, plan, keeps_state, deadline
        self.phases, self.max_bytes = len(algorithm.phases), max_bytes
        self.kept_for = deadline * (1 + overlap)  # seconds for which a reply may wait until earlier cycles are over
        self.under_way: dict[tuple[int, int], Exchange] = {}  # by round and cycle
        self.broadcast: Tensors = {}  # what was sent in this cycle
        self.cycle_start: dict[int, int] = {}  # by device, the last phase that it had finished when the cycle began

    def begin(self, cycle: Cycle, received: Tensors, device_states: DeviceStates) -> None:
        """Send the broadcast, if it is not sent yet. A cohort with a device that is at work begins at its own turn."""
        place = cycle.round, cycle.cycle
        if place in self.under_way and not self.under_way[place].is_of(cycle, received):
            self.under_way.pop(place).transport.abandon()
        at_work = [exchange.cycle.cohort for exchange in self.under_way.values()]
        if place not in self.under_way and not any(np.isin(cycle.cohort, cohort).any() for cohort in at_work):
            self.under_way[place] = self.send(cycle, received, 0, device_states)

    def train(
        self,
        cycle: Cycle,
        received: Tensors,
        phase: int,
        device_states: DeviceStates,
        secure: Secure | None = None,
    ) -> Iterator[Update | Unsent]:
        """Under secure aggregation only the devices of `secure` are asked, and their updates are masked."""
        place = cycle.round, cycle.cycle
        exchange = self.under_way.get(place)
        if exchange is None:
            exchange = self.under_way[place] = self.send(cycle, received, phase, device_states, secure)
        try:
            yield from self.receive(exchange, phase, device_states)
        finally:
            del self.under_way[place]

    def receive(self, exchange: Exchange, phase: int, device_states: DeviceStates) -> Iterator[Update | Unsent]:
        cycle = exchange.cycle
        for k in exchange.offline:
            yield self.unsent(cycle, k)
        for k, outcome in exchange.transport.receive():
            reply = unpack_outcome(outcome)
            if isinstance(reply, InvalidMessage):
                yield Update(k, cycle.round, cycle.cycle, {}, fault=str(reply))
            elif reply == OFFLINE:
                yield self.unsent(cycle, k)
            elif isinstance(reply, str):
                self.say(cycle, k, reply)
            else:
                update = self.update(k, cycle, phase, exchange.number, reply, device_states)
                assert isinstance(outcome, Message)
                yield masked_update(update, reply, outcome) if exchange.masked and not update.fault else update

    def send(
        self, cycle: Cycle, received: Tensors, phase: int, device_states: DeviceStates, secure: Secure | None = None
    ) -> Exchange:
        """Send what is new of the broadcast to the cohort."""
        self.directory.update()
        if phase == 0:
            self.broadcast, self.cycle_start = {}, {}
        new = {name: tensor for name, tensor in received.items() if tensor is not self.broadcast.get(name)}
        tensors, self.broadcast = pack_tensors(new), received
        number = cycle.round * self.phases + phase + 1  # of this phase, in the whole run
        directory, messages = self.directory, dict[int, Message]()
        transport = Transport(directory.grid, self.max_bytes, notifier=directory.notifier)
        exchange = Exchange(cycle, received, number, transport, secure is not None)
        for k in cycle.cohort.tolist() if secure is None else secure.bodies:
            node = directory.node(k)
            last = int(device_states[k]["phase"]) if k in device_states else 0
            fields = {
                "run": directory.registry.run,
                "plan": self.plan,
                "version": __version__,
                "round": cycle.round,
                "cycle": cycle.cycle,
                "device": k,
                "phase": phase,
                "number": number,
                "last": last,
                "cycle_start": self.cycle_start.setdefault(k, last),
            }
            if node is None:
                exchange.offline.append(k)
            else:
                content, group = pack_with(fields, tensors), str(cycle.round)
                if secure is not None:
                    limits = {"limits": json.dumps(secure.limits)}
                    content = pack_secure(pack_with(fields | limits, tensors), secure.bodies[k])
                messages[k] = Message(content, node, "train", ttl=self.kept_for, group_id=group)
        if messages:
            exchange.offline += [k for k, _ in exchange.transport.send(messages, self.deadline)]
        return exchange

    def unsent(self, cycle: Cycle, k: int) -> Unsent:
        self.say(cycle, k, OFFLINE)
        return Unsent(k)

    def update(
        self, k: int, cycle: Cycle, phase: int, number: int, reply: Reply, device_states: DeviceStates
    ) -> Update:
        fields, tensors = reply
        try:
            round, position, answered = (get_int(fields, name) for name in ("round", "cycle", "phase"))
        except InvalidMessage as error:
            return Update(k, cycle.round, cycle.cycle, {}, fault=str(error))
        if answered != phase:
            return Update(k, round, position, {}, fault=f"for phase {answered}")
        if self.keeps_state and (round, position) == (cycle.round, cycle.cycle):
            device_states[k] = {"phase": torch.tensor([number])}
            if fields.get("lost") is True:
                self.say(cycle, k, "it has lost its state and continued as a new device")
        return Update(k, round, position, tensors)

    def say(self, cycle: Cycle, k: int, reason: str) -> None:
        device = self.directory.registry.entries[k].device
        self.directory.say(f"round {cycle.round + 1}, cluster {cycle.cluster}: device {device}: {reason}")

    def close(self) -> None:
        pass


def masked_update(update: Update, reply: Reply, message: Message) -> Update:
    """The masked update of a reply, or why its device has withdrawn."""
    reason, body = reply[0].get("withdrawn"), unpack_secure(message.content)
    if isinstance(reason, str):
        return replace(update, message={}, fault=Withdrawn(printable(reason)))
    return replace(update, message={} if not body else masked(body))
