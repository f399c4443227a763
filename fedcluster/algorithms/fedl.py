"""FEDL. Dinh, Tran, Nguyen, Hong, Bao, Zomaya, Gramoli: Federated Learning over Wireless Networks: Convergence
Analysis and Resource Allocation, IEEE/ACM Transactions on Networking 2021.

A device minimises its loss plus a linear term, so that its gradient at W is eta F:

    J_k(w) = f_k(w) + <eta F - grad f_k(W), w>,    so that a local step uses  g + eta F - grad f_k(W)

F is the server's estimate of the fleet's gradient: the average of grad f_k(w_k), which devices upload with their
models, over the cohort of the previous cycle. In the first cycle there is none, and steps are plain.
"""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from fedcluster.algorithms.fedavg import FedAvg
from fedcluster.experiment import Positive, Section
from fedcluster.fleet.schedule import Cycle
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.local_sgd import Batches, full_gradient, local_sgd
from fedcluster.models.optimizers import with_decay
from fedcluster.state import Aggregate, State, Tensors


class Fedl(FedAvg):
    name = "fedl"
    unsupported: ClassVar = {"clip_norm": "the linear term of its loss is made of gradients that are not clipped"}

    class Options(Section):
        eta: Positive = 1.0

    @classmethod
    def local_optimizers(cls, options: Section) -> tuple[str, ...]:
        return "sgd", "momentum", "adam"

    def initial_server_state(self, start: State) -> Tensors:
        return {"gradient": torch.zeros_like(start.w)}

    def broadcast(self, state: State) -> Tensors:
        return {"model": state.model, "gradient": state.server["gradient"]}

    def upload_spec(self, state: State) -> Tensors:
        return {"model": state.model, "gradient": state.server["gradient"]}

    def train(self, flat_model: FlatModel, received: Tensors, batches: Batches, device_state: Tensors) -> Tensors:
        start, fleet = received["model"], received["gradient"]
        if fleet.any():
            linear_term = self.options.eta * fleet - self.gradient(flat_model, start, batches)
            w = local_sgd(flat_model, start, batches, linear_term)
        else:
            w = local_sgd(flat_model, start, batches)
        return {"model": w, "gradient": self.gradient(flat_model, w, batches)}

    def gradient(self, flat_model: FlatModel, w: Tensor, batches: Batches) -> Tensor:
        """grad f_k(w) with its weight decay."""
        return with_decay(w[..., : flat_model.size], full_gradient(flat_model, w, batches), self.local.l2)

    def combine(self, state: State, aggregate: Aggregate, cycle: Cycle) -> State:
        mean = aggregate.message
        return replace(state, model=mean["model"], server=state.server | {"gradient": mean["gradient"]})
