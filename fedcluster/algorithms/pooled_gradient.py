"""The cohort's average gradient at W: a first phase that some algorithms need.

download: W      upload: grad f_k(W)      the server keeps  sum_k p_k grad f_k(W) / sum_k p_k
"""

from dataclasses import replace

import torch

from fedcluster.algorithms.fedavg import FedAvg
from fedcluster.fleet.schedule import Cycle
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.local_sgd import Batches, full_gradient
from fedcluster.state import Aggregate, State, Tensors


class PooledGradient(FedAvg):
    def initial_server_state(self, start: State) -> Tensors:
        return {"gradient": torch.zeros_like(start.w)}

    def upload_spec(self, state: State) -> Tensors:
        return {"gradient": state.server["gradient"]}

    def train(self, flat_model: FlatModel, received: Tensors, batches: Batches, device_state: Tensors) -> Tensors:
        return {"gradient": full_gradient(flat_model, received["model"], batches)}

    def combine(self, state: State, aggregate: Aggregate, cycle: Cycle) -> State:
        return replace(state, server=state.server | aggregate.message)
