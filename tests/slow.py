"""FedAvg that takes half a second for every turn, so that a run lasts while devices come and go."""

import time

from fedcluster.algorithms import FedAvg
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.local_sgd import Batches
from fedcluster.state import Tensors


class Slow(FedAvg):
    def train(self, flat_model: FlatModel, received: Tensors, batches: Batches, device_state: Tensors) -> Tensors:
        time.sleep(0.5)
        return super().train(flat_model, received, batches, device_state)
