"""What goes wrong on one rank or in one worker only: updates that are refused, and a machine without a compiler. And
training that waits until something has gone wrong."""

import os
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

from torch import nn

from fedcluster.algorithms import FedAvg
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.kernels import library
from fedcluster.models.local_sgd import Batches
from fedcluster.models.zoo import Logistic
from fedcluster.state import Tensors
from tests.conftest import until


class Astray(FedAvg):
    """Half of the devices send what must be refused."""

    def train(self, flat_model: FlatModel, received: Tensors, batches: Batches, device_state: Tensors) -> Tensors:
        message = super().train(flat_model, received, batches, device_state)
        if batches.place[2] % 2:
            message["model"][0] = float("nan")
        return message


class Waits(FedAvg):
    """From its third round on, it waits for the file $GO."""

    def train(self, flat_model: FlatModel, received: Tensors, batches: Batches, device_state: Tensors) -> Tensors:
        if batches.place[0] >= 2:
            until(Path(os.environ["GO"]).exists)
        return super().train(flat_model, received, batches, device_state)


def without_a_compiler(shape: Any, classes: int) -> nn.Module:
    """Softmax regression; from here on, rank 1 and workers have no compiled library."""
    if os.environ.get("RANK") == "1" or parent_process() is not None:
        library.load = lambda: None  # type: ignore[assignment]
    return Logistic(shape, classes)
