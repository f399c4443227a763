"""Checkpoints: the state as safetensors, its position and digests as JSON, each file whole or not there.

The JSON file is written last and commits the pair. Two pairs are kept: when the newer one is torn or
altered, the one before it is used. Nothing read here is executed, and nothing is believed unchecked.
"""

import json
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save

from fedcluster.files import write_atomically
from fedcluster.ledger import COUNTS, Ledger
from fedcluster.state import State

KEEP = 2
Natural = Annotated[int, Field(ge=0)]


class Position(BaseModel):
    """What the JSON half says."""

    model_config = ConfigDict(extra="forbid", strict=True)

    round: Natural
    cycle: Natural
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    counts: dict[str, Natural]
    tensors: str
    digest: str


def store(folder: Path, state: State, ledger: Ledger, seconds: float) -> None:
    """Write a checkpoint, then forget all but the newest two. `seconds`: training time in an unfinished round."""
    folder.mkdir(exist_ok=True)
    name = f"{state.round:08d}-{state.cycle:06d}"
    tensors = save({"model": state.model.cpu(), "ledger": torch.from_numpy(ledger.to_array())})
    position: dict[str, Any] = {
        "round": state.round,
        "cycle": state.cycle,
        "seconds": seconds,
        "counts": ledger.counts,
        "tensors": sha256(tensors).hexdigest(),
    }
    write_atomically(folder / f"{name}.safetensors", tensors)
    write_atomically(folder / f"{name}.json", json.dumps(position | {"digest": digest(position)}))
    for old in sorted(folder.glob("*.json"))[:-KEEP]:
        old.unlink(missing_ok=True)
        old.with_suffix(".safetensors").unlink(missing_ok=True)


def digest(position: dict[str, Any]) -> str:
    return sha256(json.dumps(position, sort_keys=True).encode()).hexdigest()


def names(folder: Path) -> list[Path]:
    """The checkpoints there are, newest first."""
    return sorted(folder.glob("*.json"), reverse=True)


def restore(path: Path, start: State, devices: int, cycles: int) -> tuple[State, Ledger, float]:
    """Read one checkpoint; ValueError says why it is refused. `start` is the state that it must resemble."""
    try:
        text = json.loads(path.read_bytes())
        position = Position.model_validate(text)
        tensors = path.with_suffix(".safetensors").read_bytes()
    except (OSError, ValueError, ValidationError) as error:
        raise ValueError(f"unreadable ({str(error).splitlines()[0]})") from None
    if digest({key: value for key, value in text.items() if key != "digest"}) != position.digest:
        raise ValueError("altered (its digest does not match)")
    if sha256(tensors).hexdigest() != position.tensors:
        raise ValueError("torn or altered (the digest of its tensors does not match)")
    try:
        parts = load(tensors)
    except SafetensorError as error:
        raise ValueError(f"unreadable ({error})") from None
    if position.cycle > cycles or set(position.counts) != set(COUNTS) or parts.keys() != {"model", "ledger"}:
        raise ValueError("not of this experiment")
    model, book = parts["model"], parts["ledger"]
    if model.shape != start.model.shape or model.dtype != start.model.dtype or not torch.isfinite(model).all():
        raise ValueError("its model is not of this experiment")
    if book.ndim != 2 or book.shape[0] != 5 or book.dtype != torch.int64:
        raise ValueError("its ledger is not of this experiment")
    rows = book.numpy()
    if rows.size and (rows[0].min() < 0 or rows[0].max() >= devices or len(np.unique(rows[0])) < rows.shape[1]):
        raise ValueError("its ledger names devices that the fleet does not have")
    ledger = Ledger(devices)
    ledger.restore(rows, position.counts)
    return State(model.to(start.model.device), position.round, position.cycle), ledger, position.seconds
