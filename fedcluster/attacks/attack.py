"""The base of all attacks: malicious devices that do nothing.

An attack overrides what its devices do otherwise than honest ones:

    poison(x, y, rng)                          before training, to the samples of a device as they are stored
    forge(uploads, malicious, received, rng)   after training, to what the malicious devices of a cohort send

Attackers know everything: the model, and what the honest devices of their cohort send. `rng` is a random stream of the
device, the same in every round for `poison`, another one in every cycle for `forge`.
"""

from collections.abc import Callable
from typing import Any

from numpy.random import Generator
from torch import Tensor

from fedcluster.data.dataset import DataSpec
from fedcluster.experiment import Section
from fedcluster.state import Tensors

Uploads = dict[int, Tensors]
"""What the devices of a cohort send, by device."""


class Attack:
    """`share` is that of the fleet's devices that are malicious. An attack that cannot work with these data raises
    BadExperiment when it is created."""

    class Options(Section):
        """The keys of [attack] besides `name`, `share` and `placement`."""

    def __init__(self, options: Any, spec: DataSpec, share: float) -> None:
        self.options, self.spec, self.share = options, spec, share

    def poison(self, x: Tensor, y: Tensor, rng: Generator) -> tuple[Tensor, Tensor]:
        """The samples and targets that a malicious device trains on, in place of its own."""
        return x, y

    def forge(
        self, uploads: Uploads, malicious: list[int], received: Tensors, rng: Callable[[int], Generator]
    ) -> Uploads:
        """What the malicious devices send, in place of `uploads`, which has what all devices of the cohort computed."""
        return {device: uploads[device] for device in malicious}

    def triggered(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
        """Test samples with the trigger of a backdoor, and the targets that the attackers want for them. The share of
        them that the model answers so is recorded as `backdoor_success`."""
        return None


def movement(message: Tensors, received: Tensors) -> Tensors:
    """How far a message is from what moves nothing: from the model that was received, from 0 in its other parts."""
    return {name: part - received["model"] if name == "model" else part for name, part in message.items()}


def moved(movement: Tensors, received: Tensors, factor: float = 1.0) -> Tensors:
    """The message of a movement, `factor` times as long."""
    scaled = {name: part * factor for name, part in movement.items()}
    return {name: part + received["model"] if name == "model" else part for name, part in scaled.items()}
