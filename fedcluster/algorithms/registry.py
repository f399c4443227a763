"""The table of algorithms.

Each file declares the algorithm's name, options, local optimizers and phases, and cites its paper in the first
paragraph. Validation of experiments, `fedcluster algorithms` and error messages use this table.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch

from fedcluster import algorithms
from fedcluster.algorithms.fedavg import FedAvg
from fedcluster.algorithms.fedl import Fedl
from fedcluster.algorithms.fedmax import FedMax
from fedcluster.algorithms.fednova import FedNova
from fedcluster.algorithms.fedprox import FedProx
from fedcluster.algorithms.fedsvrg import FedSvrg
from fedcluster.algorithms.ghbm import FedHbm, Ghbm, LocalGhbm
from fedcluster.algorithms.mime import Mime, MimeLite
from fedcluster.algorithms.pr_spider import PRSpider
from fedcluster.algorithms.scaffold import Scaffold
from fedcluster.algorithms.vrl_sgd import VrlSgd
from fedcluster.experiment import LOCAL_OPTIMIZERS, Algorithm, Local

ALGORITHMS: dict[str, type[FedAvg]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "fednova": FedNova,
    "mime": Mime,
    "mimelite": MimeLite,
    "fedmax": FedMax,
    "fedl": Fedl,
    "vrl_sgd": VrlSgd,
    "fedsvrg": FedSvrg,
    "pr_spider": PRSpider,
    "ghbm": Ghbm,
    "local_ghbm": LocalGhbm,
    "fedhbm": FedHbm,
}


@dataclass(frozen=True)
class Entry:
    """An algorithm as `fedcluster algorithms` lists it."""

    name: str
    options: list[str]
    server_keeps: list[str]
    device_keeps: list[str]
    down: list[list[str]]  # the tensors of each download in a cycle
    up: list[list[str]]
    optimizers: list[str]
    paper: str


def entry(name: str) -> Entry:
    section = Algorithm(name=name)
    algorithm = algorithms.build(section, Local(), seed=0)
    state = algorithms.first_state(algorithm, None, torch.zeros(1), 1)
    down, up = algorithms.phase_tensor_names(algorithm, state)
    fitting = algorithm.local_optimizers(section.options)
    module: Any = sys.modules[type(algorithm).__module__]
    return Entry(
        name,
        list(type(algorithm).Options.model_fields),
        list(dict.fromkeys("past models" if key.startswith("past.") else key for key in state.server)),
        list(algorithm.initial_device_state(torch.zeros(1), 1)),
        down,
        up,
        [optimizer for optimizer in LOCAL_OPTIMIZERS if optimizer in fitting],
        " ".join(module.__doc__.split("\n\n")[0].split()),
    )


def entries() -> list[Entry]:
    return [entry(name) for name in ALGORITHMS]
