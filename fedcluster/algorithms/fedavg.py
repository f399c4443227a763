"""FedAvg. McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep
Networks from Decentralized Data, AISTATS 2017.

    w_k   = E optimizer steps on f_k from W
    W_new = sum_k p_k w_k / sum_k p_k      over the updates accepted from the cohort

The other algorithms say only in what they differ from it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from fedcluster.experiment import LOCAL_OPTIMIZERS, Local, Section
from fedcluster.fleet.schedule import Cycle
from fedcluster.models.flat_model import FlatModel, Objective, cross_entropy
from fedcluster.models.local_sgd import Batches, GradientTransform, local_sgd
from fedcluster.state import Accepted, Aggregate, Message, State


class FedAvg:
    """`local` is the section [local] of the experiment, `options` the algorithm's own section, `seed` the experiment's,
    for what server and devices draw alike."""

    name = "fedavg"
    objective: Objective = staticmethod(cross_entropy)
    correct: GradientTransform | None = None
    unsupported: ClassVar[Mapping[str, str]] = {}  # keys of [local] that the algorithm cannot be used with, and why

    class Options(Section):
        """The keys that [algorithm] has besides `name`."""

    def __init__(self, local: Local, options: Section | None = None, seed: int = 0) -> None:
        self.local, self.seed = local, seed
        self.options: Any = options or self.Options()

    @classmethod
    def local_optimizers(cls, options: Section) -> tuple[str, ...]:
        """The local optimizers that the algorithm can be used with."""
        return LOCAL_OPTIMIZERS

    @property
    def phases(self) -> "tuple[FedAvg, ...]":
        """The downloads and uploads of a cycle, in order. Nearly every algorithm has one."""
        return (self,)

    def initial_server_state(self, model: Tensor, size: int) -> Message:
        """What the server keeps from cycle to cycle, before the first. The first `size` weights are trained."""
        return {}

    def initial_device_state(self, model: Tensor, size: int) -> Message:
        """What a device keeps between the cycles in which it takes part, before the first."""
        return {}

    def broadcast(self, state: State) -> Message:
        """What the server sends to the cohort."""
        return {"model": state.model}

    def upload_spec(self, state: State) -> Message:
        """Tensors with the names, shapes and types of what a device uploads."""
        return {"model": state.model}

    def train(self, flat_model: FlatModel, received: Message, batches: Batches, device_state: Message) -> Message:
        """Train on a device. Returns the upload; changes `device_state` in place."""
        return {"model": local_sgd(flat_model, received["model"], batches, correct=self.correct)}

    def aggregate_spec(self, state: State) -> Message:
        """Tensors with the names, shapes and types of what is aggregated."""
        return self.upload_spec(state)

    def contribution(self, state: State, update: Accepted, cycle: Cycle) -> tuple[Message, float]:
        """What an accepted update adds to the aggregate, and its weight."""
        return update.message, update.weight

    def combine(self, state: State, aggregate: Aggregate, cycle: Cycle) -> State:
        """The next state, given the aggregate of the cohort."""
        return replace(state, model=aggregate.message["model"])


class LocalRule(FedAvg):
    """FedAvg with a function of the user's that transforms the gradient."""

    def __init__(self, correct: GradientTransform, local: Local, options: Section | None = None, seed: int = 0) -> None:
        super().__init__(local, options, seed)
        self.correct = correct
