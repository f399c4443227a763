"""The ClientApp: answers who the device is, and trains when it is its turn.

`fedcluster join` calls it in a process that stays; under plain flower-supernode every message starts a process that
loads everything anew, and what the device keeps lives in Flower's Context.
"""

from functools import lru_cache
from logging import WARNING

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.common.logger import log

from fedcluster import __version__
from fedcluster.flower.device import Device, Identity, hold, played, recall, remember
from fedcluster.flower.messages import Unreadable, pack, refusal, skew, text, unpack, whole
from fedcluster.flower.transport import printable
from fedcluster.training.threads import repeatable

client_app = ClientApp()


@lru_cache(maxsize=1)
def device(identity: Identity) -> Device:
    return Device(identity)


def own(context: Context) -> Device:
    """The device that this node is. In Flower's simulation it is only a number, and holds what ours would give it."""
    config = dict(context.node_config)
    if "partition-id" in config and "device" not in config:
        return played(str(context.run_config.get("experiment", "")), int(config["partition-id"]))
    return device(Identity.of(config))


@client_app.query()
def who(message: Message, context: Context) -> Message:
    """Who the device is. What its samples are stays here, and so do its label counts unless it was told otherwise."""
    unpack(message.content)
    why = refusal(message.content)
    if why is not None:
        log(WARNING, "the server refuses this device: %s", printable(why))
        return Message(pack({}), reply_to=message)
    registration = own(context).registration().model_dump_json(exclude_none=True)
    return Message(pack({"registration": registration, "version": __version__}), reply_to=message)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """A turn: the simulator's own step, with this device's data and memory."""
    facts, received = unpack(message.content)
    try:
        round, cycle, k, phase = (whole(facts, name) for name in ("round", "cycle", "device", "exchange"))
        run, began, since, turn = text(facts, "run"), *(whole(facts, name) for name in ("began", "since", "turn"))
        executor = own(context).prepare(text(facts, "plan"))
        received = hold(context.state, f"{run}/{round}/{cycle}", phase, len(executor.phases), received)
    except Unreadable as error:
        differ = skew(facts, "the server", "this device")
        raise Unreadable(f"{error}; {differ}: install the same version on both" if differ else str(error)) from None
    device_state = recall(context.state, run, since)
    with repeatable():
        message_back, kept = executor.train_device(phase, (round, cycle, k), received, device_state)
    if kept:
        remember(context.state, run, began, recall(context.state, run, began), turn, kept)
    lost = since > 0 and device_state is None and bool(executor.initial_device_state)
    told = {"round": round, "cycle": cycle, "exchange": phase, "lost": lost}
    return Message(pack(told, {name: tensor.reshape(-1) for name, tensor in message_back.items()}), reply_to=message)
