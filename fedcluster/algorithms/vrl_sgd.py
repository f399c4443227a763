"""VRL-SGD. Liang, Shen, Liu, Pan, Chen, Cheng: Variance Reduced Local SGD with Lower Communication Complexity, 2019.

Device k estimates how its gradient differs from the cohort's, D_k, and corrects it; D_k is 0 at the start:

    local step:       g - D_k
    after the cycle:  D_k <- D_k + (W - w_k) / (E_k lr) - sum_j share_j (W - w_j) / (E_j lr)

The sum is over the accepted updates, in which device j has share_j. If all devices of a cohort complete the cycle,
their D_k still average to 0. With equal steps E this is the paper's D_k + (W_new - w_k) / (E lr), where W_new is the
average of the models.

The sum is known only after aggregation. In the paper devices take it from the next model that they receive. With
clusters the next model is another cluster's, so the cohort downloads its average movement in a second phase. A device
that misses either phase keeps its old D_k, and so does one whose learning rate is 0.
"""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from fedcluster.algorithms.fedavg import FedAvg
from fedcluster.experiment import Local, Section
from fedcluster.fleet.schedule import Cycle, steps_of
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.local_sgd import Batches, local_sgd
from fedcluster.state import Accepted, Aggregate, State, Tensors


class VrlSgd(FedAvg):
    name = "vrl_sgd"
    unsupported: ClassVar = {"clip_norm": "its drifts stand for gradients that are not clipped"}

    @classmethod
    def local_optimizers(cls, options: Section) -> tuple[str, ...]:
        return ("sgd",)

    @property
    def phases(self) -> tuple[FedAvg, ...]:
        return self, Drift(self.local, seed=self.seed)

    def initial_server_state(self, start: State) -> Tensors:
        return {"movement": torch.zeros_like(start.w)}

    def initial_device_state(self, model: Tensor, size: int) -> Tensors:
        return {"drift": torch.zeros_like(model[:size])}

    def train(self, flat_model: FlatModel, received: Tensors, batches: Batches, device_state: Tensors) -> Tensors:
        start, drift = received["model"], device_state["drift"]
        w = local_sgd(flat_model, start, batches, -drift)
        if batches.lr:
            moved = start[..., : flat_model.size] - w[..., : flat_model.size]
            device_state["drift"] = moved.div_(batches.steps * batches.lr).add_(drift)  # Drift subtracts the mean
        return {"model": w}

    def aggregate_spec(self, state: State) -> Tensors:
        equal = isinstance(self.local.steps, int)
        return {"model": state.model} | ({} if equal else {"movement": state.model[: state.size]})

    def contribution(self, state: State, update: Accepted, cycle: Cycle) -> tuple[Tensors, float]:
        """The model and, if devices take unequal steps, the movement scaled to the same number of steps."""
        if isinstance(self.local.steps, int):
            return update.message, update.weight
        start = state.model[: state.size]
        steps = steps_of(self.local, self.seed, cycle.round, update.device, cycle.samples_of(update.device))
        movement = (update.message["model"][: len(start)] - start) * (reference_steps(self.local) / steps)
        return update.message | {"movement": movement}, update.weight

    def combine(self, state: State, aggregate: Aggregate, cycle: Cycle) -> State:
        model = aggregate.message["model"]
        movement = aggregate.message.get("movement")
        if movement is None:
            movement = (model - state.model)[: state.size]
        return replace(state, model=model, server=state.server | {"movement": movement})


def reference_steps(local: Local) -> float:
    """The number of steps to which movements are scaled: the mean of a range, or one step with epochs."""
    return 1.0 if local.epochs is not None else sum(local.step_range) / 2


class Drift(FedAvg):
    """The second phase: devices download the cohort's average movement and upload nothing."""

    def broadcast(self, state: State) -> Tensors:
        return {"movement": state.server["movement"]}

    def upload_spec(self, state: State) -> Tensors:
        return {}

    def train(self, flat_model: FlatModel, received: Tensors, batches: Batches, device_state: Tensors) -> Tensors:
        if batches.lr:
            distance = reference_steps(self.local) * batches.lr
            device_state["drift"] = device_state["drift"].add(received["movement"], alpha=1 / distance)
        return {}
