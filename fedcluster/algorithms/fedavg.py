"""FedAvg. McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep
Networks from Decentralized Data, AISTATS 2017.

    w_k   = E optimizer steps on f_k from W
    W_new = sum_k p_k w_k / sum_k p_k      over the updates accepted from the cohort

The other algorithms say only in what they differ from it.
"""

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from fedcluster.algorithms.aggregation.mean import average
from fedcluster.experiment import Local
from fedcluster.fleet.schedule import Cycle
from fedcluster.models.flat_model import FlatModel, Objective, cross_entropy
from fedcluster.models.local_sgd import Batches, GradientTransform, local_sgd
from fedcluster.state import Message, State
from fedcluster.training.acceptance import Accepted


class FedAvg:
    objective: Objective = staticmethod(cross_entropy)
    correct: GradientTransform | None = None
    seed = 0  # the experiment's, for what server and devices draw alike

    def __init__(self, options: Local) -> None:
        self.options = options

    @property
    def phases(self) -> "tuple[FedAvg, ...]":
        """What server and cohort exchange in a cycle, in order. Nearly always a model for a model, once."""
        return (self,)

    def initial_server_state(self, model: Tensor, size: int) -> Message:
        """What the server keeps from cycle to cycle, at the start. The first `size` numbers of w are trained."""
        return {}

    def initial_device_state(self, model: Tensor, size: int) -> Message:
        """What a device keeps from one turn to the next, before its first."""
        return {}

    def broadcast(self, state: State) -> Message:
        return {"model": state.model}

    def upload_spec(self, state: State) -> Message:
        """The names and shapes of what a device sends back."""
        return {"model": state.model}

    def train(self, flat_model: FlatModel, received: Message, batches: Batches, device_state: Message) -> Message:
        return {"model": local_sgd(flat_model, received["model"], batches, correct=self.correct)}

    def combine(self, state: State, updates: Iterable[Accepted], cycle: Cycle) -> State:
        mean = average(((update.weight, update.message) for update in updates), like=self.upload_spec(state))
        return state if mean is None else self.move(state, mean, cycle)

    def move(self, state: State, mean: Message, cycle: Cycle) -> State:
        """The next state, given the average of what came back."""
        return replace(state, model=mean["model"])


class LocalRule(FedAvg):
    """FedAvg with a function of one's own that corrects the gradient."""

    def __init__(self, options: Local, correct: GradientTransform) -> None:
        super().__init__(options)
        self.correct = correct
