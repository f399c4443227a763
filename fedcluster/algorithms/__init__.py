"""Federated algorithms, one short file each: three verbs, the same in simulation and in deployment.

    broadcast(state)                             what the server sends
    train(learner, received, batches, memory)    what a device does with it, what it keeps, and what it sends back
    combine(state, updates, cycle)               how the server uses what came back

A message is a dict of flat vectors by name. An algorithm of one's own begins from FedAvg, which has all of them; a
local rule, which only changes the gradient, is one function.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from fedcluster.algorithms.centralized import Centralized
from fedcluster.algorithms.fedavg import FedAvg, LocalRule
from fedcluster.algorithms.fedl import Fedl
from fedcluster.algorithms.fedmax import FedMax
from fedcluster.algorithms.fednova import FedNova
from fedcluster.algorithms.fedprox import FedProx
from fedcluster.algorithms.fedsvrg import FedSvrg
from fedcluster.algorithms.mime import Mime, MimeLite
from fedcluster.algorithms.pr_spider import PRSpider
from fedcluster.algorithms.scaffold import Scaffold
from fedcluster.algorithms.server_optimizers import ServerOptimizer
from fedcluster.algorithms.vrl_sgd import VrlSgd
from fedcluster.errors import BadExperiment
from fedcluster.experiment import Local, Server, import_object
from fedcluster.state import Message, State

__all__ = ["Centralized", "FedAvg", "ServerOptimizer", "build", "exchanged", "first_state", "messages", "optimizer"]


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
}


def build(options: Local, seed: int) -> FedAvg:
    """The algorithm that `local.algorithm` stands for. A class of one's own, or a functools.partial of one, is called
    with the options; a function of one's own is a local rule inside FedAvg."""
    own: Any = options.algorithm
    if isinstance(own, str):
        own = ALGORITHMS[own] if own in ALGORITHMS else import_object(own)
        if isinstance(own, type) and not issubclass(own, FedAvg):
            raise BadExperiment(f"local.algorithm: {options.algorithm} is a class, but not one derived from FedAvg")
    is_class = isinstance(own.func if isinstance(own, partial) else own, type)
    algorithm: FedAvg = own(options) if is_class else LocalRule(options, own)
    algorithm.seed = seed
    return algorithm


def optimizer(options: Server) -> ServerOptimizer | None:
    return None if (options.optimizer, options.lr) == ("none", 1.0) else ServerOptimizer(options)


def first_state(algorithm: FedAvg, optimizer: ServerOptimizer | None, model: Tensor, size: int) -> State:
    """The state before the first cycle: W_0, and what the server keeps."""
    server: Message = {}
    for phase in algorithm.phases:
        server |= phase.initial_server_state(model, size)
    if optimizer is not None:
        server |= optimizer.initial_server_state(model, size)
    state = State(model, server, size=size)
    return replace(state, norms={name: () for phase in algorithm.phases for name in phase.upload_spec(state)})


def phase_tensor_names(algorithm: FedAvg, state: State) -> tuple[list[list[str]], list[list[str]]]:
    """The names of the tensors in each download and in each upload of a device's turn."""
    down, up = messages(algorithm, state)
    return [list(names) for names in down if names], [list(names) for names in up if names]


def messages(algorithm: FedAvg, state: State) -> tuple[list[Message], list[Message]]:
    """What a device downloads and what it uploads in each exchange of its turn."""
    phases = algorithm.phases
    return [phase.broadcast(state) for phase in phases], [phase.upload_spec(state) for phase in phases]
