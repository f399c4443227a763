"""The ClientApp: identifies the device, and trains when its cluster has its cycle.

`fedcluster join` calls it in a process that stays. Under plain flower-supernode every message starts a process that
imports and loads everything anew, and device state lives in Flower's Context.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedcluster import __version__
from fedcluster.errors import BadExperiment
from fedcluster.flower.device import Device, Identity, add_received, load_state, simulated_device, store_state
from fedcluster.flower.messages import (
    Fields,
    InvalidMessage,
    get_int,
    get_refusal,
    get_text,
    pack,
    pack_secure,
    pack_sums,
    printable,
    unpack,
    unpack_secure,
    version_mismatch,
)
from fedcluster.secure_aggregation.messages import Session
from fedcluster.training.executors.secure import withdrawn
from fedcluster.training.threads import repeatable

client_app = ClientApp()


@lru_cache(maxsize=1)
def load_device(identity: Identity) -> Device:
    """The device with its data, in a process that gets no more memory than its limits allow."""
    device = Device(identity)
    device.limits.limit_memory()
    return device


def this_device(context: Context) -> Device:
    """The device that this node is. In Flower's simulation a node is only a number of the experiment's fleet."""
    config = dict(context.node_config)
    if "partition-id" in config and "device" not in config:
        return simulated_device(str(context.run_config.get("experiment", "")), int(config["partition-id"]))
    return load_device(Identity.of(config))


@client_app.query()
def identify(message: Message, context: Context) -> Message:
    """Register with the server. Samples stay here, and label counts too unless the device was told to send them."""
    unpack(message.content)
    reason = get_refusal(message.content)
    if reason is not None:
        logging.getLogger("flwr").warning("the server refuses this device: %s", printable(reason))
        return Message(pack({}), reply_to=message)
    registration = this_device(context).registration().model_dump_json(exclude_none=True)
    return Message(pack({"registration": registration, "version": __version__}), reply_to=message)


@contextmanager
def naming_versions(fields: Fields) -> Iterator[None]:
    """Where a message cannot be understood, name the versions of both sides if they differ."""
    try:
        yield
    except InvalidMessage as error:
        mismatch = version_mismatch(fields, "the server", "this device")
        raise InvalidMessage(f"{error}; {mismatch}: install the same version on both" if mismatch else error) from None


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """One phase of a cycle: the simulator's own code with this device's data and state."""
    fields, received = unpack(message.content)
    with naming_versions(fields):
        round, cycle, k, phase = (get_int(fields, name) for name in ("round", "cycle", "device", "phase"))
        cycle_start, last, number = (get_int(fields, name) for name in ("cycle_start", "last", "number"))
        run = get_text(fields, "run")
        device = this_device(context)
        executor = device.prepare(get_text(fields, "plan"))
        asked = unpack_secure(message.content)
        if asked is None and not device.limits.unmasked:
            raise BadExperiment("this device sends updates under secure aggregation only (limits: unmasked)")
        received = add_received(context.state, f"{run}/{round}/{cycle}", phase, len(executor.phases), received)
    before = load_state(context.state, run, last)
    with repeatable(), device.limits.enforced():
        update, after = executor.train_device(phase, (round, cycle, k), received, before)
    update = device.limits.protect(update, received)
    if after:
        store_state(context.state, run, cycle_start, load_state(context.state, run, cycle_start), number, after)
    lost = last > 0 and before is None and bool(executor.initial_device_state)
    answer = {"round": round, "cycle": cycle, "phase": phase, "lost": lost}
    if asked is not None:
        if reason := withdrawn(update, received, read_limits(fields)):
            return Message(pack(answer | {"withdrawn": reason}), reply_to=message)
        body = device.secure_parts.mask(Session(run=run, round=round, cycle=cycle, phase=phase), asked, update)
        return Message(pack_secure(pack(answer), body), reply_to=message)
    return Message(pack(answer, {name: tensor.reshape(-1) for name, tensor in update.items()}), reply_to=message)


def read_limits(fields: Fields) -> dict[str, float]:
    """The largest norms of the parts of an update."""
    try:
        return {str(name): float(limit) for name, limit in json.loads(get_text(fields, "limits")).items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise InvalidMessage("without limits") from None


@client_app.query("secure")
def secure(message: Message, context: Context) -> Message:
    """One exchange of secure aggregation, other than for a masked update."""
    fields, _ = unpack(message.content)
    with naming_versions(fields):
        body = this_device(context).secure_parts.answer(
            get_text(fields, "stage"), unpack_secure(message.content) or b""
        )
    return Message(pack_secure(pack({}), body), reply_to=message)


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Score the global model on this device's own samples, if it allows that. Only sums leave it."""
    fields, received = unpack(message.content)
    with naming_versions(fields), repeatable():
        round, k = (get_int(fields, name) for name in ("round", "device"))
        samples, sums = this_device(context).evaluate(get_text(fields, "plan"), k, received)
    return Message(pack({"round": round, "device": k, "samples": samples} | pack_sums(sums)), reply_to=message)
