"""The pooled gradient: an exchange of its own, before the model's, that some algorithms need.

devices receive W and send grad f_k(W);  the server keeps  sum_k p_k grad f_k(W) / sum_k p_k
"""

from dataclasses import replace

import torch
from torch import Tensor

from fedcluster.algorithms.fedavg import FedAvg
from fedcluster.fleet.schedule import Cycle
from fedcluster.models.flat_model import Learner
from fedcluster.models.local_sgd import Batches, full_gradient
from fedcluster.state import Message, State


class PooledGradient(FedAvg):
    def server_memory(self, model: Tensor, size: int) -> Message:
        return {"gradient": torch.zeros_like(model[:size])}

    def form(self, state: State) -> Message:
        return {"gradient": state.server["gradient"]}

    def train(self, learner: Learner, received: Message, batches: Batches, memory: Message) -> Message:
        return {"gradient": full_gradient(learner, received["model"], batches)}

    def move(self, state: State, mean: Message, cycle: Cycle) -> State:
        return replace(state, server=state.server | mean)
