"""What goes wrong on one rank or in one worker only: updates that are refused, and a machine without a compiler."""

import os
from multiprocessing import parent_process
from typing import Any

from torch import nn

from fedcluster import compiled
from fedcluster.algorithms import FedAvg
from fedcluster.learner import Learner
from fedcluster.local import Batches
from fedcluster.models import Logistic
from fedcluster.state import Message


class Astray(FedAvg):
    """Half of the devices send what must be refused."""

    def train(self, learner: Learner, received: Message, batches: Batches, memory: Message) -> Message:
        message = super().train(learner, received, batches, memory)
        if batches.place[2] % 2:
            message["model"][0] = float("nan")
        return message


def without_a_compiler(shape: Any, classes: int) -> nn.Module:
    """Softmax regression; from here on, rank 1 and workers have no compiled library."""
    if os.environ.get("RANK") == "1" or parent_process() is not None:
        compiled.library = lambda: None  # type: ignore[assignment]
    return Logistic(shape, classes)
