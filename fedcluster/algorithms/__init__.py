"""Federated algorithms, one short file each. Simulation and deployment use the same three methods:

    broadcast(state)                                        what the server sends to a cohort
    train(flat_model, received, batches, device_state)      what a device computes, keeps and uploads
    combine(state, aggregate, cycle)                        the next state, from the aggregate of the uploads

A message is a dict of flat vectors by name. A user's own algorithm derives from FedAvg and overrides what differs; a
gradient transform is a single function. Between `train` and `combine` come the update transforms (`transforms`) and the
aggregator (`aggregation`).
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedcluster.algorithms import overlap, pair_balance, pluralistic
from fedcluster.algorithms.centralized import Centralized
from fedcluster.algorithms.fedavg import FedAvg, LocalRule
from fedcluster.algorithms.server_optimizers import ServerOptimizer
from fedcluster.algorithms.server_optimizers import build as optimizer
from fedcluster.algorithms.transforms import UpdateTransform
from fedcluster.errors import BadExperiment
from fedcluster.experiment import Algorithm, Local, Section
from fedcluster.fleet.schedule import Schedule
from fedcluster.state import State, Tensors

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
    """The algorithm that [algorithm] names: a class (or a functools.partial of one), which is called with [local], its
    options and the seed, or a function, which transforms the gradient in FedAvg."""
    own: Any = section.find()
    kind = own.func if isinstance(own, partial) else own
    if not isinstance(kind, type):
        return LocalRule(own, local, section.options, seed)
    if not issubclass(kind, FedAvg):
        raise BadExperiment(f"algorithm.name: the class {section.name} does not derive from FedAvg")
    algorithm: FedAvg = own(local, section.options, seed)
    return algorithm


def first_state(
    algorithm: FedAvg,
    optimizer: ServerOptimizer | None,
    model: Tensor,
    size: int,
    schedule: Schedule | None = None,
    by_cluster: bool = False,
) -> State:
    """The state before the first cycle: W_0 and the server's state, `by_cluster` also a model for each cluster."""
    state, server = State(model, size=size, cycles=schedule.clusters.count if schedule else 1), Tensors()
    for phase in algorithm.phases:
        server |= phase.initial_server_state(state)
    if optimizer is not None:
        server |= optimizer.initial_server_state(state)
    if schedule is not None and schedule.options.order == "balanced":
        server |= pair_balance.initial_server_state(state, torch.from_numpy(schedule.order(0)))
    if by_cluster:
        server |= pluralistic.initial_server_state(state)
    state = replace(state, server=server)
    if schedule is not None:
        state = overlap.first_state(state, algorithm, schedule.options.overlap)
    return replace(state, norms={name: () for phase in algorithm.phases for name in phase.upload_spec(state)})


def phase_tensor_names(algorithm: FedAvg, state: State) -> tuple[list[list[str]], list[list[str]]]:
    """The names of the tensors in each download and in each upload of a cycle."""
    down, up = messages(algorithm, state)
    return [list(names) for names in down if names], [list(names) for names in up if names]


def messages(algorithm: FedAvg, state: State) -> tuple[list[Tensors], list[Tensors]]:
    """The downloads and the uploads of a device, one for each phase of a cycle."""
    phases = algorithm.phases
    return [phase.broadcast(state) for phase in phases], [phase.upload_spec(state) for phase in phases]
