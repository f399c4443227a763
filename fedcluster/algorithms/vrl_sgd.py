"""VRL-SGD. Liang, Shen, Liu, Pan, Chen, Cheng: Variance Reduced Local SGD with Lower Communication Complexity, 2019.

Device k learns how its gradient drifts from the cohort's and corrects it; D_k is 0 at the start:

    local step:      g - D_k
    after the turn:  D_k <- D_k + (W - w_k) / (E_k lr) - sum_j share_j (W - w_j) / (E_j lr)

over the updates accepted from the cohort; share_j is the part of device j in them. The D_k of a cohort that all finish
their turn then still average to 0. With equal steps E this is the paper's D_k + (W_new - w_k) / (E lr), where W_new is
the average of the models.

The sum is only known after the aggregation. In the paper devices take it from the next model that they receive; when
clusters take turns they cannot, so the cohort downloads the average movement in an exchange of its own. A device that
misses either exchange keeps its old D_k.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from fedcluster.algorithms.aggregation.mean import average
from fedcluster.algorithms.fedavg import FedAvg
from fedcluster.fleet.schedule import Cycle, steps_of
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.local_sgd import Batches, local_sgd
from fedcluster.state import Message, State
from fedcluster.training.acceptance import Accepted


class VrlSgd(FedAvg):
    @property
    def phases(self) -> tuple[FedAvg, ...]:
        return self, Drift(self.options)

    def initial_server_state(self, model: Tensor, size: int) -> Message:
        return {"movement": torch.zeros_like(model[:size])}

    def initial_device_state(self, model: Tensor, size: int) -> Message:
        return {"drift": torch.zeros_like(model[:size])}

    def train(self, flat_model: FlatModel, received: Message, batches: Batches, device_state: Message) -> Message:
        start, gradient_offset = received["model"], device_state["drift"]
        w = local_sgd(flat_model, start, batches, -gradient_offset)
        moved = start[..., : flat_model.size] - w[..., : flat_model.size]
        device_state["drift"] = moved.div_(batches.steps * self.options.lr).add_(
            gradient_offset
        )  # its second half comes with Drift
        return {"model": w}

    def combine(self, state: State, updates: Iterable[Accepted], cycle: Cycle) -> State:
        """The average model, and the average movement, each device's scaled to the mean number of steps."""
        if isinstance(self.options.steps, int):
            return super().combine(state, updates, cycle)
        start = state.model[: state.size]

        def scaled() -> Iterable[tuple[float, Message]]:
            for update in updates:
                steps = steps_of(self.options, self.seed, cycle.round, update.device)
                moved = (update.message["model"][: len(start)] - start) * (self.options.mean_steps / steps)
                yield update.weight, update.message | {"movement": moved}

        mean = average(scaled(), like={"model": state.model, "movement": start})
        return state if mean is None else replace(state, model=mean.pop("model"), server=state.server | mean)

    def move(self, state: State, mean: Message, cycle: Cycle) -> State:
        movement = (mean["model"] - state.model)[: state.size]
        return replace(state, model=mean["model"], server=state.server | {"movement": movement})


class Drift(FedAvg):
    """The second exchange: the cohort learns how its average moved, and sends nothing."""

    def broadcast(self, state: State) -> Message:
        return {"movement": state.server["movement"]}

    def upload_spec(self, state: State) -> Message:
        return {}

    def train(self, flat_model: FlatModel, received: Message, batches: Batches, device_state: Message) -> Message:
        distance = self.options.mean_steps * self.options.lr
        device_state["drift"] = device_state["drift"].add(received["movement"], alpha=1 / distance)
        return {}

    def combine(self, state: State, updates: object, cycle: Cycle) -> State:
        for _ in updates:  # type: ignore[attr-defined]
            pass
        return state
