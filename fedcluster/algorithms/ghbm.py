"""GHBM, LocalGHBM and FedHBM. Zaccone, Karimireddy, Masone, Ciccone: Communication-Efficient Heterogeneous Federated
Learning with Generalized Heavy-Ball Momentum, 2024.

Heavy-ball momentum over the last tau cycles, applied in every local step:

    w <- w - lr (g + beta / (lr E) m)          E local steps move w by lr times the sum of g, and by -beta m

    ghbm         m = (W_{t - tau} - W_t) / tau            sent with the model; the server keeps the last tau models
    local_ghbm   m = (a_k - W_t) / (t - t_k)              a_k: what device k received in its last cycle, t_k
    fedhbm       m = (b_k - w) / (t - t_k), every step    b_k: what device k sent in its last cycle

t counts cycles over the whole run. tau is M, one round, unless it is given; ghbm with tau = 1 is FedCM. local_ghbm and
fedhbm send nothing but the model and the number t. A device that takes part for the first time has no momentum.
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedcluster.algorithms.fedavg import FedAvg
from fedcluster.algorithms.past_models import initial, past
from fedcluster.experiment import Local, Section
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.local_sgd import Batches, local_sgd
from fedcluster.models.optimizers import SGD
from fedcluster.state import State, Tensors

Beta = Annotated[float, Field(ge=0, le=2)]


def scale(beta: float, batches: Batches) -> float:
    """beta / (lr E), or 0 at a learning rate of 0, where a device stays where it is."""
    return beta / (batches.steps * batches.lr) if batches.lr else 0.0


class Ghbm(FedAvg):
    name = "ghbm"

    class Options(Section):
        beta: Beta = 0.9
        tau: Annotated[int, Field(ge=1, le=1000)] | None = None

    @classmethod
    def local_optimizers(cls, options: Section) -> tuple[str, ...]:
        """The momentum is a gradient, scaled for steps w <- w - lr g."""
        return ("sgd",)

    def tau(self, state: State) -> int:
        tau: int | None = self.options.tau
        return tau or state.cycles

    def initial_server_state(self, start: State) -> Tensors:
        return initial(start.w, self.tau(start))

    def broadcast(self, state: State) -> Tensors:
        tau = self.tau(state)
        return {"model": state.model, "momentum": (past(state.server, state.t, tau) - state.w).div_(tau)}

    def train(self, flat_model: FlatModel, received: Tensors, batches: Batches, device_state: Tensors) -> Tensors:
        offset = received["momentum"] * scale(self.options.beta, batches)
        return {"model": local_sgd(flat_model, received["model"], batches, offset)}


class LocalGhbm(FedAvg):
    name = "local_ghbm"

    class Options(Section):
        beta: Beta = 0.9

    @classmethod
    def local_optimizers(cls, options: Section) -> tuple[str, ...]:
        return ("sgd",)

    def initial_device_state(self, model: Tensor, size: int) -> Tensors:
        """The model of the last time that the device took part, and t_k, -1 before the first."""
        return {"model": torch.zeros_like(model[:size]), "t": model.new_full((1,), -1.0)}

    def broadcast(self, state: State) -> Tensors:
        return {"model": state.model, "t": state.model.new_tensor([state.t])}

    def train(self, flat_model: FlatModel, received: Tensors, batches: Batches, device_state: Tensors) -> Tensors:
        start = received["model"][..., : flat_model.size]
        momentum = (device_state["model"] - start) * self.factor(batches, received, device_state)
        w = local_sgd(flat_model, received["model"], batches, momentum)
        device_state |= {
            "model": start.expand_as(device_state["model"]).clone(),
            "t": received["t"].expand_as(device_state["t"]).clone(),
        }
        return {"model": w}

    def factor(self, batches: Batches, received: Tensors, device_state: Tensors) -> Tensor:
        """beta / (lr E) / (t - t_k), 0 when a device takes part for the first time"""
        last = device_state["t"]
        factor = scale(self.options.beta, batches) / (received["t"] - last)
        return torch.where(last < 0, 0.0, factor)


class HeavyBall(SGD):
    """w <- w - lr (g + factor (last - w)), of which only g is clipped"""

    def __init__(self, options: Local, lr: float, last: Tensor, factor: Tensor) -> None:
        super().__init__(options, lr, {})
        self.last, self.factor = last, factor

    def step(self, w: Tensor, g: Tensor) -> None:
        super().step(w, g.addcmul(self.last - w, self.factor))


class FedHbm(LocalGhbm):
    name = "fedhbm"

    class Options(Section):
        beta: Beta = 1.0

    def train(self, flat_model: FlatModel, received: Tensors, batches: Batches, device_state: Tensors) -> Tensors:
        factor, last = self.factor(batches, received, device_state), device_state["model"]
        rule = HeavyBall(self.local, batches.lr, last, factor) if self.options.beta else None
        w = local_sgd(flat_model, received["model"], batches, rule=rule)
        device_state |= {
            "model": w[..., : flat_model.size].clone(),
            "t": received["t"].expand_as(device_state["t"]).clone(),
        }
        return {"model": w}
