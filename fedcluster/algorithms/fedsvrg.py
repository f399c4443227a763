"""FSVRG. Konečný, McMahan, Ramage, Richtárik: Federated Optimization: Distributed Machine Learning for On-Device
Intelligence, 2016 (its Algorithm 3, with averages weighted by samples).

Two phases. First the devices of the cohort upload their gradients at W over all of their data, whose average is c.
Then their local steps use

    g(w) - g(W) + c        both gradients on the same batch, with the same dropout masks
"""

from typing import ClassVar

from torch import Tensor

from fedcluster.algorithms.fedavg import FedAvg
from fedcluster.algorithms.pooled_gradient import PooledGradient
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.local_sgd import Batches, local_sgd
from fedcluster.state import State, Tensors


class FedSvrg(FedAvg):
    name = "fedsvrg"
    unsupported: ClassVar = {"clip_norm": "its steps follow differences of gradients, which clipping would distort"}

    @property
    def phases(self) -> tuple[FedAvg, ...]:
        return PooledGradient(self.local, seed=self.seed), self

    def broadcast(self, state: State) -> Tensors:
        return {"gradient": state.server["gradient"]}  # the model was sent in the first phase

    def train(self, flat_model: FlatModel, received: Tensors, batches: Batches, device_state: Tensors) -> Tensors:
        pooled = received["gradient"]

        def variance_reduction(gradient: Tensor, w: Tensor, start: Tensor) -> None:
            gradient.sub_(flat_model.gradient_at(start)).add_(pooled)

        return {"model": local_sgd(flat_model, received["model"], batches, correct=variance_reduction)}
