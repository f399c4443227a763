"""The catalogue of algorithms: what each keeps, sends and needs, asked of the algorithms themselves."""

import sys
from dataclasses import dataclass
from typing import Any

import torch

from fedcluster import algorithms
from fedcluster.experiment import ALGORITHMS, OPTIMIZERS, Local


@dataclass(frozen=True)
class Entry:
    name: str
    server_keeps: list[str]
    device_keeps: list[str]
    down: list[list[str]]  # the tensors of each download in a turn
    up: list[list[str]]
    optimizers: list[str]
    paper: str


def entry(name: str) -> Entry:
    algorithm = algorithms.build(Local(algorithm=name), seed=0)
    state = algorithms.first_state(algorithm, None, torch.zeros(1), 1)
    down, up = algorithms.phase_tensor_names(algorithm, state)
    module: Any = sys.modules[type(algorithm).__module__]
    paper = " ".join(module.__doc__.split("\n\n")[0].split())
    return Entry(
        name,
        list(state.server),
        list(algorithm.initial_device_state(torch.zeros(1), 1)),
        down,
        up,
        [optimizer for optimizer in OPTIMIZERS if fits(name, optimizer)],
        paper,
    )


def fits(name: str, optimizer: str) -> bool:
    try:
        Local.model_validate({"algorithm": name, "optimizer": optimizer})
    except ValueError:
        return False
    return True


def entries() -> list[Entry]:
    return [entry(name) for name in ALGORITHMS]
