"""Federated algorithms, one short file each: three verbs, the same in simulation and in deployment.

    broadcast(state)                     what the server sends
    train(learner, received, batches)    what a device does with it, and sends back
    combine(state, updates)              how the server uses what came back

A message is a dict of flat vectors by name. A local rule, which only changes the gradient, is one function.
"""

from collections.abc import Iterable
from typing import Protocol

from fedcluster.accept import Accepted
from fedcluster.algorithms.fedavg import FedAvg
from fedcluster.algorithms.fedprox import FedProx
from fedcluster.experiment import Local, found
from fedcluster.learner import Learner
from fedcluster.local import Batches
from fedcluster.state import Message, State


class Algorithm(Protocol):
    def broadcast(self, state: State) -> Message: ...
    def train(self, learner: Learner, received: Message, batches: Batches) -> Message: ...
    def combine(self, state: State, updates: Iterable[Accepted]) -> State: ...


def build(options: Local) -> Algorithm:
    """The algorithm that `local.algorithm` stands for. A class of one's own is built with the options;
    a function of one's own is a local rule inside FedAvg."""
    match options.algorithm:
        case "fedavg":
            return FedAvg()
        case "fedprox":
            return FedProx(options.mu)
        case str() as name:
            own = found(name)
        case thing:
            own = thing
    if isinstance(own, type):
        algorithm: Algorithm = own(options)
        return algorithm
    return FedAvg(own)
