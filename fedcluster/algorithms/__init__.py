"""Federated algorithms, one short file each: three verbs, the same in simulation and in deployment.

    broadcast(state)                                           what the server sends
    train(flat_model, received, batches, device_state)         what a device computes, keeps and uploads
    combine(state, aggregate, cycle)                           what the server makes of the cohort's aggregate

A message is a dict of flat vectors by name. A user's own algorithm derives from FedAvg, which has all of them; a local
rule, which only changes the gradient, is one function. Between `train` and `combine` stand the transforms of an update
(`transforms`) and the aggregator (`aggregation`).
"""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from fedcluster.algorithms.centralized import Centralized
from fedcluster.algorithms.fedavg import FedAvg, LocalRule
from fedcluster.algorithms.server_optimizers import ServerOptimizer
from fedcluster.algorithms.transforms import UpdateTransform
from fedcluster.errors import BadExperiment
from fedcluster.experiment import Algorithm, Local, Section, Server
from fedcluster.state import Message, State

__all__ = [
    "Centralized",
    "FedAvg",
    "Section",
    "ServerOptimizer",
    "UpdateTransform",
    "build",
    "first_state",
    "messages",
    "optimizer",
    "phase_tensor_names",
]


def build(section: Algorithm, local: Local, seed: int) -> FedAvg:
    """The algorithm that [algorithm] names. A class, or a functools.partial of one, is called with [local], its own
    options and the seed; a function is a local rule inside FedAvg."""
    own: Any = section.find()
    kind = own.func if isinstance(own, partial) else own
    if not isinstance(kind, type):
        return LocalRule(own, local, section.options, seed)
    if not issubclass(kind, FedAvg):
        raise BadExperiment(f"algorithm.name: {section.name} is a class, but not one derived from FedAvg")
    algorithm: FedAvg = own(local, section.options, seed)
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
    """The names of the tensors in each download and in each upload of a cycle."""
    down, up = messages(algorithm, state)
    return [list(names) for names in down if names], [list(names) for names in up if names]


def messages(algorithm: FedAvg, state: State) -> tuple[list[Message], list[Message]]:
    """What a device downloads and what it uploads in each phase of a cycle."""
    phases = algorithm.phases
    return [phase.broadcast(state) for phase in phases], [phase.upload_spec(state) for phase in phases]
