"""Centralized training: one optimizer over the whole run, on pooled data.

It runs as a fleet of one device that keeps the optimizer's moments from round to round.
"""

from torch import Tensor

from fedcluster.algorithms.fedavg import FedAvg
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.local_sgd import Batches, local_sgd
from fedcluster.models.optimizers import no_moments, optimizer
from fedcluster.state import Tensors


class Centralized(FedAvg):
    name = "centralized"

    def initial_device_state(self, model: Tensor, size: int) -> Tensors:
        return no_moments(self.local, model[:size])

    def train(self, flat_model: FlatModel, received: Tensors, batches: Batches, device_state: Tensors) -> Tensors:
        rule = optimizer(self.local, batches.lr, device_state)
        w = local_sgd(
            flat_model, received["model"], batches, rule=rule if device_state else None
        )  # SGD may be compiled
        device_state.update(rule.moments())
        return {"model": w}
