"""VRL-SGD. Liang, Shen, Liu, Pan, Chen, Cheng: Variance Reduced Local SGD with Lower Communication Complexity, 2019.

Device k learns how its gradient drifts from the cohort's and corrects it; D_k is 0 at the start:

    local step:      g - D_k
    after the turn:  D_k <- D_k + (W_new - w_k) / (E lr),    W_new the average of the cohort's models

W_new is only known after the aggregation. In the paper it is the next model that a device receives; when clusters
take turns it is not, so the cohort downloads the average movement W_new - W in an exchange of its own.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fedcluster.algorithms.fedavg import FedAvg
from fedcluster.learner import Learner
from fedcluster.local import Batches, descend
from fedcluster.schedule import Cycle
from fedcluster.state import Message, State


class VrlSgd(FedAvg):
    @property
    def exchanges(self) -> tuple[FedAvg, ...]:
        return self, Drift(self.options)

    def server_memory(self, model: Tensor, size: int) -> Message:
        return {"movement": torch.zeros_like(model[:size])}

    def device_memory(self, model: Tensor, size: int) -> Message:
        return {"drift": torch.zeros_like(model[:size])}

    def train(self, learner: Learner, received: Message, batches: Batches, memory: Message) -> Message:
        start, drift = received["model"], memory["drift"]
        w = descend(learner, start, batches, -drift)
        moved = start[..., : learner.size] - w[..., : learner.size]
        memory["drift"] = moved.div_(batches.steps * self.options.lr).add_(drift)  # its second half comes with Drift
        return {"model": w}

    def move(self, state: State, mean: Message, cycle: Cycle) -> State:
        movement = (mean["model"] - state.model)[: len(state.server["movement"])]
        return replace(state, model=mean["model"], server=state.server | {"movement": movement})


class Drift(FedAvg):
    """The second exchange: the cohort learns how its average moved, and sends nothing."""

    def broadcast(self, state: State) -> Message:
        return {"movement": state.server["movement"]}

    def form(self, state: State) -> Message:
        return {}

    def train(self, learner: Learner, received: Message, batches: Batches, memory: Message) -> Message:
        memory["drift"] = memory["drift"].add(received["movement"], alpha=1 / (batches.steps * self.options.lr))
        return {}

    def combine(self, state: State, updates: object, cycle: Cycle) -> State:
        for _ in updates:  # type: ignore[attr-defined]
            pass
        return state
