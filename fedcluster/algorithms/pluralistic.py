"""Pluralistic models. Eichner, Koren, McMahan, Srebro, Talwar: Semi-Cyclic Stochastic Gradient Descent, ICML 2019.

Where clusters differ, the model that all share goes back and forth between them. So the server keeps a model P_K for
each cluster, an average over the models W after the cluster's cycles, and serves it to the devices of cluster K:

    average = "uniform"           P_K <- P_K + (W - P_K) / n           n: the number of cycles of the cluster so far
    average = decay, as in 0.9    P_K <- decay P_K + (1 - decay) W     P_K = W after the first cycle

Devices train on W: training is not changed. A cycle that fails does not count. A cluster that has had no cycle yet is
served W. With one cluster, "uniform" is Polyak averaging over rounds.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fedcluster.experiment import Pluralistic
from fedcluster.fleet.schedule import Cycle
from fedcluster.state import State, Tensors

CYCLES = "pluralistic.cycles"


def initial_server_state(start: State) -> Tensors:
    """P_K for all clusters, and the number of cycles in each."""
    models = {f"pluralistic.{K}": start.model for K in range(start.cycles)}
    return models | {CYCLES: torch.zeros(start.cycles, dtype=torch.int64, device=start.model.device)}


def step(options: Pluralistic, before: State, after: State, cycle: Cycle) -> State:
    """Take the model after a cycle into the average of its cluster."""
    if after.model is before.model:
        return after
    name, counts = f"pluralistic.{cycle.cluster}", after.server[CYCLES].clone()
    counts[cycle.cluster] += 1
    n = int(counts[cycle.cluster])
    weight = 1 / n if options.average == "uniform" or n == 1 else 1 - options.average
    model = after.server[name].lerp(after.model, weight)
    return replace(after, server=after.server | {name: model, CYCLES: counts})


def models(state: State) -> list[Tensor]:
    """The model that each cluster is served. Empty where all are served W."""
    counts = state.server.get(CYCLES)
    if counts is None:
        return []
    return [state.server[f"pluralistic.{K}"] if count else state.model for K, count in enumerate(counts.tolist())]
