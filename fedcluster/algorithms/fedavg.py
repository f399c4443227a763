"""FedAvg. McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep
Networks from Decentralized Data, AISTATS 2017.

    w_k   = E optimizer steps on f_k from W
    W_new = sum_k p_k w_k / sum_k p_k      over the updates accepted from the cohort

The other algorithms override what differs.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from numpy.random import Generator
from torch import Tensor

from fedcluster.experiment import LOCAL_OPTIMIZERS, Local, Section
from fedcluster.fleet.schedule import Cycle
from fedcluster.models.flat_model import FlatModel, Objective
from fedcluster.models.local_sgd import Batches, GradientTransform, local_sgd
from fedcluster.rng import stream
from fedcluster.state import Accepted, Aggregate, State, Tensors


class FedAvg:
    """`local` and `options` are the sections [local] and [algorithm] of the experiment. `seed` is the experiment's."""

    name = "fedavg"
    targets: ClassVar[tuple[str, ...]] = ()  # the kinds of targets that the algorithm is defined for; empty means any
    correct: GradientTransform | None = None
    unsupported: ClassVar[Mapping[str, str]] = {}  # keys of [local] that the algorithm does not allow, and why

    class Options(Section):
        """The keys of [algorithm] besides `name`."""

    def __init__(self, local: Local, options: Section | None = None, seed: int = 0) -> None:
        self.local, self.seed = local, seed
        self.options: Any = options or self.Options()

    @classmethod
    def local_optimizers(cls, options: Section) -> tuple[str, ...]:
        """The local optimizers that the algorithm allows."""
        return LOCAL_OPTIMIZERS

    @property
    def phases(self) -> "tuple[FedAvg, ...]":
        """The phases of a cycle, each one download and one upload. Most algorithms have one."""
        return (self,)

    def overlap_fault(self) -> str | None:
        """Why cycles of this algorithm cannot overlap."""
        return None

    def objective(self, loss: Objective) -> Objective:
        """What a device minimises, given the task's loss, both as functions of (module, x, y)."""
        return loss

    def rng(self, round: int, cycle: int = 0, device: int = 0) -> Generator:
        """A random stream of the algorithm's own. Server and device draw the same numbers from it."""
        return stream(self.seed, "algorithm", round, cycle, device)

    def initial_server_state(self, start: State) -> Tensors:
        """The server's state before the first cycle, given the first state without it."""
        return {}

    def initial_device_state(self, model: Tensor, size: int) -> Tensors:
        """A device's state before the first cycle in which it takes part."""
        return {}

    def start_round(self, state: State) -> Tensors:
        """What changes in the server's state as a round begins."""
        return {}

    def broadcast(self, state: State) -> Tensors:
        """The message to every device of the cohort."""
        return {"model": state.model}

    def upload_spec(self, state: State) -> Tensors:
        """Tensors with the names, shapes and types of an upload."""
        return {"model": state.model}

    def train(self, flat_model: FlatModel, received: Tensors, batches: Batches, device_state: Tensors) -> Tensors:
        """Train on a device. Returns the upload; changes `device_state` in place."""
        return {"model": local_sgd(flat_model, received["model"], batches, correct=self.correct)}

    def aggregate_spec(self, state: State) -> Tensors:
        """Tensors with the names, shapes and types of a contribution to the aggregate."""
        return self.upload_spec(state)

    def contribution(self, state: State, update: Accepted, cycle: Cycle) -> tuple[Tensors, float]:
        """What an accepted update contributes to the aggregate, and its weight."""
        return update.message, update.weight

    def combine(self, state: State, aggregate: Aggregate, cycle: Cycle) -> State:
        """The next state, from the aggregate of the cohort's updates."""
        return replace(state, model=aggregate.message["model"])


class LocalRule(FedAvg):
    """FedAvg with a gradient transform, a user's function."""

    def __init__(self, correct: GradientTransform, local: Local, options: Section | None = None, seed: int = 0) -> None:
        super().__init__(local, options, seed)
        self.correct = correct
