"""The wire format: one Flower message carries fields (its header) and float32 tensors by name.

Everything is in ConfigRecords: values of type bytes are tensors, all others are fields. Flower's own arrays would do as
well, but each consists of three more objects, every object is a request of its own, and an array is assembled from
chunks that its sender counts: a few bytes may become gigabytes. Here nothing grows when it is unpacked, so a bound on
the bytes received bounds the memory. What secure aggregation sends is a record of its own, of bytes as they
are.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from torch import Size, Tensor

from fedcluster import __version__
from fedcluster.state import Tensors

SUMS = "sums/"  # begins the name of a field with the sums of the loss or of a metric
SECURE = "secure"  # the record of secure aggregation
LARGEST = 1e30  # of a sum or a score: those of many devices can be squared and added

Fields = dict[str, Any]


class InvalidMessage(Exception):
    """What came is not a message of ours. The text says why, and repeats nothing that the sender chose."""


def pack(fields: Fields, tensors: Tensors | None = None) -> RecordDict:
    return RecordDict({"fedcluster": ConfigRecord(fields | dict(pack_tensors(tensors or {})))})


def pack_with(fields: Fields, tensors: ConfigRecord) -> RecordDict:
    """The same, with the tensors in a record that several messages share; it is sent to the SuperLink once."""
    return RecordDict({"fedcluster": ConfigRecord(fields), "tensors": tensors})


def pack_tensors(tensors: Tensors) -> ConfigRecord:
    flat = {name: tensor.detach().to("cpu", torch.float32).numpy() for name, tensor in tensors.items()}
    return ConfigRecord({name: vector.astype("<f4", copy=False).tobytes() for name, vector in flat.items()})


def unpack(content: RecordDict) -> tuple[Fields, Tensors]:
    """The fields and tensors of a message. Their types are right; nothing else is checked yet."""
    if "fedcluster" not in content or not all(isinstance(record, ConfigRecord) for record in content.values()):
        raise InvalidMessage("not a message of fedcluster")
    records = [record for name, record in content.config_records.items() if name != SECURE]
    values = {name: value for record in records for name, value in record.items()}
    tensors = {name: value for name, value in values.items() if isinstance(value, bytes)}
    return {name: value for name, value in values.items() if name not in tensors}, unpack_tensors(tensors)


def pack_secure(content: RecordDict, body: bytes) -> RecordDict:
    """The message, with what secure aggregation sends."""
    content[SECURE] = ConfigRecord({"body": body})
    return content


def unpack_secure(content: RecordDict) -> bytes | None:
    """What secure aggregation sends; None if the message has nothing of it."""
    record = content.config_records.get(SECURE)
    body = None if record is None else record.get("body")
    return body if isinstance(body, bytes) else None


def unpack_tensors(record: Mapping[str, Any]) -> Tensors:
    tensors = {}
    for name, data in record.items():
        if len(data) % 4:
            raise InvalidMessage("a tensor that is not float32")
        tensors[name] = torch.from_numpy(np.frombuffer(data, "<f4").astype(np.float32))
    return tensors


def pack_sums(sums: Mapping[str, Tensor]) -> Fields:
    """The fields of a reply. Numbers travel as they are, in double precision."""
    return {SUMS + name: tensor.to("cpu", torch.float64).reshape(-1).tolist() for name, tensor in sums.items()}


def unpack_sums(fields: Fields, shapes: Mapping[str, Size]) -> Tensors:
    """The sums of a reply, with these names and shapes; InvalidMessage where they are not, or too large."""
    if {name for name in fields if name.startswith(SUMS)} != {SUMS + name for name in shapes}:
        raise InvalidMessage("wrong names")
    return {name: unpack_sum(name, fields[SUMS + name], shape) for name, shape in shapes.items()}


def unpack_sum(name: str, given: Any, shape: Size) -> Tensor:
    if not isinstance(given, list) or len(given) != shape.numel() or not all(type(part) is float for part in given):
        raise InvalidMessage(f"{name}: wrong shape or type")
    sums = torch.tensor(given, dtype=torch.float64)
    if not torch.isfinite(sums).all():
        raise InvalidMessage(f"{name}: not finite")
    if (sums.abs() > LARGEST).any():
        raise InvalidMessage(f"{name}: more than {LARGEST:g}")
    return sums.reshape(shape)


def version_mismatch(fields: Fields, other: str, this: str) -> str:
    """Names both versions of fedcluster where the two sides run different ones; empty where they do not."""
    found = fields.get("version")
    if found == __version__:
        return ""
    theirs = f"fedcluster {found[:40]}" if isinstance(found, str) else "an older fedcluster"
    return f"{other} runs {theirs}, {this} {__version__}"


def get_refusal(content: RecordDict) -> str | None:
    """Why the server refuses this device, if that is what the message says."""
    try:
        return get_text(unpack(content)[0], "refused")
    except InvalidMessage:
        return None


def get_int(fields: Fields, name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidMessage(f"without {name}")
    return value


def get_text(fields: Fields, name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise InvalidMessage(f"without {name}")
    return value


def printable(text: object) -> str:
    """What another party wrote, safe for a terminal: no control characters, one line, at most 300 characters."""
    words = str(text or "it failed without saying why")[:300].split()
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(words))
