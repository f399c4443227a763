"""Centralized training: one optimizer over the whole run, on data in one place.

It runs as a fleet of one device, which keeps the optimizer's moments from round to round.
"""

from torch import Tensor

from fedcluster.algorithms.fedavg import FedAvg
from fedcluster.models.flat_model import Learner
from fedcluster.models.local_sgd import Batches, descend
from fedcluster.models.optimizers import no_moments, optimizer
from fedcluster.state import Message


class Centralized(FedAvg):
    def device_memory(self, model: Tensor, size: int) -> Message:
        return no_moments(self.options, model[:size])

    def train(self, learner: Learner, received: Message, batches: Batches, memory: Message) -> Message:
        rule = optimizer(self.options, memory)
        w = descend(learner, received["model"], batches, rule=rule if memory else None)  # SGD may be compiled
        memory.update(rule.moments())
        return {"model": w}
