"""Checkpoints: the state as safetensors, its position and digests as JSON; writes are atomic.

The JSON file is written last and commits the pair. Two pairs are kept: when the newer one is torn or altered, the older
one is used. Nothing that is read is executed, and everything is checked. A checkpoint belongs to one run, whose digest
it holds, and to one state of that run's record.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from hashlib import file_digest, sha256
from math import prod
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedcluster.files import write_atomically
from fedcluster.runs.ledger import COUNTS, Ledger
from fedcluster.runs.movement import sample
from fedcluster.state import NORM_WINDOW, State, Tensors, Time

KEEP = 2
ASIDE = "evaluated"  # the folder of the newest checkpoint from before the current round
DTYPES = {torch.float32: "F32", torch.int64: "I64"}
Natural = Annotated[int, Field(ge=0)]


class SimulatedTime(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    now: Natural = 0
    idle: Natural = 0
    dropped: Natural = 0
    late: Natural = 0
    failed: Natural = 0
    past: list[Natural] = []


class Prefix(BaseModel):
    """The beginning of a file: its length and its SHA-256."""

    model_config = ConfigDict(extra="forbid", strict=True)

    bytes: Natural
    sha256: str


class Position(BaseModel):
    """The content of the JSON file. `run` is the digest of the run's experiment and fingerprints; `record` has the
    length and digest of each JSONL file at this point."""

    model_config = ConfigDict(extra="forbid", strict=True)

    run: str
    round: Natural
    cycle: Natural
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    counts: dict[str, Natural]
    time: SimulatedTime = SimulatedTime()
    record: dict[str, Prefix]
    norms: dict[str, list[Annotated[float, Field(ge=0, allow_inf_nan=False)]]]
    tensors: str
    digest: str


class Stored(NamedTuple):
    """The content of a checkpoint."""

    state: State
    ledger: Ledger
    seconds: float
    record: dict[str, Prefix]
    movement: Tensor | None = None


class OtherRun(ValueError):
    """The checkpoint is intact, but belongs to another run."""


def store(
    folder: Path,
    state: State,
    ledger: Ledger,
    seconds: float,
    run: str = "",
    record: dict[str, Prefix] | None = None,
    movement: Tensor | None = None,
) -> None:
    """Write a checkpoint, then delete all but the newest two. `seconds`: training time in an unfinished round;
    `movement`: the sample of the latest one (`runs/movement.py`).

    The newest one from before this round is moved aside for `roll_back`: its model has been evaluated."""
    folder.mkdir(exist_ok=True)
    name = f"{state.round:08d}-{state.cycle:06d}"
    total = sha256()

    def write(file: IO[bytes]) -> None:
        for chunk in tensors_of(state, ledger, movement):
            total.update(chunk)
            file.write(chunk)

    write_atomically(folder / f"{name}.safetensors", write)
    position: dict[str, Any] = {
        "run": run,
        "round": state.round,
        "cycle": state.cycle,
        "seconds": seconds,
        "counts": ledger.counts,
        "time": asdict(state.time),
        "norms": state.norms,
        "record": {file: prefix.model_dump() for file, prefix in (record or {}).items()},
        "tensors": total.hexdigest(),
    }
    write_atomically(folder / f"{name}.json", json.dumps(position | {"digest": digest(position)}))
    for old in sorted(folder.glob("*.json"))[:-KEEP]:
        if old.stem <= beginning(state.round):
            set_aside(old)
        old.unlink(missing_ok=True)
    for tensors in folder.glob("*.safetensors"):
        if not tensors.with_suffix(".json").exists():  # of an old one, or of one that was never committed
            tensors.unlink(missing_ok=True)


def set_aside(path: Path) -> None:
    """Keep this checkpoint, and no other, for `roll_back`."""
    folder = path.parent.with_name(ASIDE)
    folder.mkdir(exist_ok=True)
    older = [file for file in folder.iterdir() if file.stem != path.stem]
    with suppress(FileNotFoundError):  # a user may have removed one of its two files
        move(path, folder)
        for file in older:
            file.unlink(missing_ok=True)


def roll_back(folder: Path, round: int) -> None:
    """Delete the checkpoints of this round, which has diverged: a resumed run continues from before it."""
    for path in names(folder):
        if path.stem > beginning(round):
            path.unlink(missing_ok=True)
            path.with_suffix(".safetensors").unlink(missing_ok=True)
    for path in [] if names(folder) else names(folder.with_name(ASIDE)):
        move(path, folder)


def move(path: Path, folder: Path) -> None:
    for suffix in (".safetensors", ".json"):
        os.replace(path.with_suffix(suffix), folder / f"{path.stem}{suffix}")


def beginning(round: int) -> str:
    """The name of a checkpoint at the start of a round."""
    return f"{round:08d}-{0:06d}"


def tensors_of(state: State, ledger: Ledger, movement: Tensor | None = None) -> Iterator[bytes | memoryview]:
    """The safetensors file in pieces, so that the states of many devices need not be in memory twice.

    A length, a JSON header with the offsets of each tensor, then the tensors. Device states are stacked: a row for each
    device in `devices`.
    """
    known = sorted(state.devices)
    whole = {"model": state.model, "ledger": torch.from_numpy(ledger.to_array())}
    whole |= {f"server/{name}": tensor for name, tensor in state.server.items()}
    if movement is not None:
        whole["movement"] = movement
    if known:
        whole["devices"] = torch.tensor(known)
    parts = [(name, tensor.dtype, list(tensor.shape), [tensor]) for name, tensor in whole.items()]
    for name, first in (state.devices[known[0]] if known else {}).items():
        rows = [state.devices[device][name] for device in known]
        parts.append((f"device/{name}", first.dtype, [len(known), *first.shape], rows))
    header, end = {}, 0
    for name, dtype, shape, _ in parts:
        start, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, _, _, tensors in parts:
        for tensor in tensors:
            yield tensor.detach().cpu().contiguous().numpy().reshape(-1).view("uint8").data


def digest(position: dict[str, Any]) -> str:
    return sha256(json.dumps(position, sort_keys=True).encode()).hexdigest()


def names(folder: Path) -> list[Path]:
    """The checkpoints in the folder, newest first."""
    return sorted(folder.glob("*.json"), reverse=True)


def restore(
    path: Path, start: State, initial_device_state: Tensors, devices: int, cycles: int, run: str | None = None
) -> Stored:
    """Read one checkpoint; ValueError says why it is refused. Its tensors must have the shapes and types of `start`,
    its device states those of `initial_device_state`, and if `run` is given, it must belong to that run."""
    try:
        text = json.loads(path.read_bytes())
        sealed = isinstance(text, dict) and digest({k: v for k, v in text.items() if k != "digest"}) == text["digest"]
        if sealed and "run" not in text:
            raise OtherRun("written by fedcluster 0.1, which did not note to which run a checkpoint belongs")
        position = Position.model_validate(text)
        with path.with_suffix(".safetensors").open("rb") as file:
            tensors_digest = file_digest(file, "sha256").hexdigest()
    except OtherRun:
        raise
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise ValueError(f"unreadable ({str(error).splitlines()[0]})") from None
    if not sealed:
        raise ValueError("altered (its digest does not match)")
    if run is not None and position.run != run:
        raise OtherRun("of another run")
    if tensors_digest != position.tensors:
        raise ValueError("torn or altered (the digest of its tensors does not match)")
    overlap = len(position.time.past) == len(start.time.past)
    known = set(position.counts) == set(COUNTS) and position.norms.keys() == start.norms.keys()
    if position.cycle > cycles or not overlap or not known:
        raise ValueError("not of this experiment")
    try:
        with safe_open(path.with_suffix(".safetensors"), framework="pt") as tensors:
            model, server, device_states, book, movement = read(tensors, start, initial_device_state, devices)
    except SafetensorError as error:
        raise ValueError(f"unreadable ({error})") from None
    ledger = Ledger(devices)
    ledger.restore(book, position.counts)
    time = Time(**position.time.model_dump() | {"past": tuple(position.time.past)})
    norms = {name: tuple(medians[-NORM_WINDOW:]) for name, medians in position.norms.items()}
    state = State(model, server, device_states, position.round, position.cycle, time, start.size, norms, start.cycles)
    return Stored(state, ledger, position.seconds, position.record, movement)


def read(
    tensors: Any, start: State, initial_device_state: Tensors, devices: int
) -> tuple[Tensor, Tensors, dict[int, Tensors], NDArray[np.int64], Tensor | None]:
    """The tensors, each checked against its expected shape and type."""
    names = {"model", "ledger", *(f"server/{name}" for name in start.server)}
    took_part = "devices" in tensors.keys()  # noqa: SIM118
    if took_part:
        names |= {"devices", *(f"device/{name}" for name in initial_device_state)}
    moved = "movement" in tensors.keys()  # noqa: SIM118
    if set(tensors.keys()) - {"movement"} != names:
        raise ValueError("not of this experiment")

    def like(name: str, expected: Tensor) -> Tensor:
        tensor: Tensor = tensors.get_tensor(name)
        if tensor.shape != expected.shape or tensor.dtype != expected.dtype or not torch.isfinite(tensor).all():
            raise ValueError(f"its {name} is not of this experiment")
        return tensor.to(expected.device)

    book: Tensor = tensors.get_tensor("ledger")
    if book.ndim != 2 or book.shape[0] != 5 or book.dtype != torch.int64:
        raise ValueError("its ledger is not of this experiment")
    check_devices(book[0], devices, "ledger")
    device_states: dict[int, Tensors] = {}
    if took_part:
        known: Tensor = tensors.get_tensor("devices")
        if known.ndim != 1 or known.dtype != torch.int64 or not initial_device_state:
            raise ValueError("its devices are not of this experiment")
        check_devices(known, max(1, devices), "memory")  # in centralized training one that is not on the ledger
        device_states = {device: {} for device in known.tolist()}
        for name, expected in initial_device_state.items():
            rows = tensors.get_slice(f"device/{name}")
            if rows.get_shape() != [len(known), *expected.shape] or rows.get_dtype() != DTYPES[expected.dtype]:
                raise ValueError(f"what its devices keep as {name} is not of this experiment")
            for row, device in enumerate(device_states):
                kept = rows[row].to(expected.device)
                if not torch.isfinite(kept).all():
                    raise ValueError(f"what device {device} keeps as {name} is not finite")
                device_states[device][name] = kept
    server = {name: like(f"server/{name}", tensor) for name, tensor in start.server.items()}
    movement = like("movement", sample(start.w).cpu()) if moved else None
    return like("model", start.model), server, device_states, book.numpy(), movement


def check_devices(known: Tensor, devices: int, what: str) -> None:
    if len(known) and (known.min() < 0 or known.max() >= devices or len(set(known.tolist())) < len(known)):
        raise ValueError(f"its {what} names devices that the fleet does not have")
