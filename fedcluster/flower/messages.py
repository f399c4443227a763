"""The wire: our messages inside Flower's. Facts about a message, and its tensors as raw float32, by name.

Everything is in ConfigRecords: bytes are tensors, all else is facts. Flower's own arrays would do as well, but each is
three objects more, every object is a request of its own, and an array is put together from chunks that its sender
counts: a few bytes may become gigabytes. Here nothing is larger unpacked than packed, so that a bound on what is
received bounds what it costs.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict

from fedcluster import __version__
from fedcluster.state import Message

Facts = dict[str, Any]


class Unreadable(Exception):
    """What came is not a message of ours; the text says why, and names nothing that its sender chose."""


def pack(facts: Facts, tensors: Message | None = None) -> RecordDict:
    return RecordDict({"fedcluster": ConfigRecord(facts | dict(pack_tensors(tensors or {})))})


def pack_with(facts: Facts, tensors: ConfigRecord) -> RecordDict:
    """The same, with tensors in a record that several messages share: it goes to the SuperLink once."""
    return RecordDict({"fedcluster": ConfigRecord(facts), "tensors": tensors})


def pack_tensors(tensors: Message) -> ConfigRecord:
    flat = {name: tensor.detach().to("cpu", torch.float32).numpy() for name, tensor in tensors.items()}
    return ConfigRecord({name: vector.astype("<f4", copy=False).tobytes() for name, vector in flat.items()})


def unpack(content: RecordDict) -> tuple[Facts, Message]:
    """The facts and the tensors of a message, which are now of the right types, and no more than that."""
    if "fedcluster" not in content or not all(isinstance(record, ConfigRecord) for record in content.values()):
        raise Unreadable("not a message of fedcluster")
    everything = {name: value for record in content.config_records.values() for name, value in record.items()}
    tensors = {name: value for name, value in everything.items() if isinstance(value, bytes)}
    facts = {name: value for name, value in everything.items() if name not in tensors}
    return facts, unpack_tensors(tensors)


def unpack_tensors(record: Mapping[str, Any]) -> Message:
    tensors = {}
    for name, data in record.items():
        if len(data) % 4:
            raise Unreadable("a tensor that is not float32")
        tensors[name] = torch.from_numpy(np.frombuffer(data, "<f4").astype(np.float32))
    return tensors


def skew(facts: Facts, other: str, this: str) -> str:
    """Which versions of fedcluster the two sides run, where they differ; nothing where they do not."""
    found = facts.get("version")
    if found == __version__:
        return ""
    theirs = f"fedcluster {found[:40]}" if isinstance(found, str) else "an older fedcluster"
    return f"{other} runs {theirs}, {this} {__version__}"


def refusal(content: RecordDict) -> str | None:
    """Why the server does not let a device take part, if that is what it says."""
    try:
        return text(unpack(content)[0], "refused")
    except Unreadable:
        return None


def whole(facts: Facts, name: str) -> int:
    """A fact that must be a whole number."""
    value = facts.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise Unreadable(f"without {name}")
    return value


def text(facts: Facts, name: str) -> str:
    value = facts.get(name)
    if not isinstance(value, str):
        raise Unreadable(f"without {name}")
    return value
