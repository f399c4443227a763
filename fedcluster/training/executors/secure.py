"""Devices under secure aggregation, and those of a simulation, which follow the protocol in this process.

What `accept` judges elsewhere, a device judges of its own update: that it is finite and within the norm bound. A device
that finds otherwise withdraws.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedcluster.fleet.schedule import Cycle
from fedcluster.secure_aggregation import integers
from fedcluster.secure_aggregation.device import Limits, Participant
from fedcluster.secure_aggregation.messages import ProtocolError, Session
from fedcluster.secure_aggregation.server import Reply
from fedcluster.state import Tensors, Unsent, Update
from fedcluster.training.executors.in_process import DeviceStates, Executor
from fedcluster.training.norm_bound import measure

MASKED = "masked"  # the name of a masked update, a tensor of bytes


@dataclass(frozen=True, eq=False)
class Asked:
    """What the devices of a cohort are asked for in a phase: updates whose parts have norms up to `limits`."""

    cycle: Cycle
    received: Tensors
    phase: int
    device_states: DeviceStates
    limits: dict[str, float]

    @property
    def weights(self) -> dict[int, float]:
        """p_k / sum p_k of the cohort, by device."""
        return dict(zip(self.cycle.cohort.tolist(), self.cycle.shares.tolist(), strict=True))


class Exchange(Protocol):
    """Carries the messages of one sum to devices and back."""

    session: Session

    def name(self, k: int) -> str:
        """The name by which the other devices know device k."""

    def verify(self, device: str, message: bytes, signature: bytes) -> bool: ...

    def ask(self, stage: str, requests: Mapping[str, bytes]) -> Iterator[Reply]:
        """The answers that come, in any order."""

    def train(self, requests: Mapping[str, bytes]) -> Iterator[Update | Unsent]:
        """Let devices train and mask their updates. An update has its bytes as the tensor `MASKED`; its fault says why
        the device has withdrawn."""


class SecureDevices(Protocol):
    """The devices of a run under secure aggregation."""

    def exchange(self, asked: Asked) -> Exchange: ...


class Withdrawn(str):
    """Why a device does not send its update, as a fault of it: the update is not finite, or too large."""


def withdrawn(message: Tensors, received: Tensors, limits: Mapping[str, float]) -> Withdrawn | None:
    """Why a device does not send this update; None if it does."""
    norms = measure(message, received.get("model"), limits)
    reason = norms if isinstance(norms, str) else integers.too_large(message)
    return Withdrawn(reason) if reason else None


def masked(content: bytes) -> Tensors:
    return {MASKED: torch.frombuffer(bytearray(content), dtype=torch.uint8)}


@lru_cache(maxsize=100_000)
def identity(device: str) -> Ed25519PrivateKey:
    """The long-lived key of a simulated device."""
    return Ed25519PrivateKey.generate()


class SimulatedDevices:
    """The devices that this executor trains. More than the share `threshold` of a cohort has to stay."""

    def __init__(self, executor: Executor, threshold: float) -> None:
        self.executor, self.limits = executor, Limits(threshold=threshold)

    def exchange(self, asked: Asked) -> "SimulatedExchange":
        return SimulatedExchange(self.executor, asked, self.limits)


class SimulatedExchange:
    """A cohort whose devices answer at once."""

    def __init__(self, executor: Executor, asked: Asked, limits: Limits) -> None:
        self.executor, self.asked, self.weights = executor, asked, asked.weights
        cycle = asked.cycle
        self.session = Session(run="simulation", round=cycle.round, cycle=cycle.cycle, phase=asked.phase)
        names = map(self.name, cycle.cohort.tolist())
        self.devices = {
            name: Participant(name, self.session, identity(name).sign, self.verify, limits) for name in names
        }

    def name(self, k: int) -> str:
        return str(k)

    def verify(self, device: str, message: bytes, signature: bytes) -> bool:
        try:
            identity(device).public_key().verify(signature, message)
        except InvalidSignature:
            return False
        return True

    def ask(self, stage: str, requests: Mapping[str, bytes]) -> Iterator[Reply]:
        for name, content in requests.items():
            try:
                yield name, self.devices[name].answer(stage, content)
            except ProtocolError as error:
                yield name, error

    def train(self, requests: Mapping[str, bytes]) -> Iterator[Update]:
        asked = self.asked
        for reply in self.executor.train(asked.cycle, asked.received, asked.phase, asked.device_states):
            if isinstance(reply, Update) and self.name(reply.device) in requests:
                yield self.mask(reply, requests[self.name(reply.device)])

    def mask(self, update: Update, content: bytes) -> Update:
        """What a device uploads in place of its update."""
        k, message = update.device, update.message
        if reason := withdrawn(message, self.asked.received, self.asked.limits):
            return Update(k, update.round, update.cycle, {}, fault=reason)
        numbers = integers.encode(message, self.weights[k])
        try:
            upload = self.devices[self.name(k)].mask(content, numbers)
        except ProtocolError as error:
            return Update(k, update.round, update.cycle, {}, fault=str(error))
        return Update(k, update.round, update.cycle, masked(upload))
