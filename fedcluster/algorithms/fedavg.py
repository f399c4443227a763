"""FedAvg. McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep
Networks from Decentralized Data, AISTATS 2017.

    w_k   = E optimizer steps on f_k from W
    W_new = sum_k p_k w_k / sum_k p_k      over the updates accepted from the cohort
"""

from collections.abc import Iterable
from dataclasses import replace

from fedcluster.accept import Accepted
from fedcluster.aggregate import average
from fedcluster.learner import Learner
from fedcluster.local import Batches, Correct, descend
from fedcluster.state import Message, State


class FedAvg:
    def __init__(self, correct: Correct | None = None) -> None:
        self.correct = correct

    def broadcast(self, state: State) -> Message:
        return {"model": state.model}

    def train(self, learner: Learner, received: Message, batches: Batches) -> Message:
        return {"model": descend(learner, received["model"], batches, self.correct)}

    def combine(self, state: State, updates: Iterable[Accepted]) -> State:
        weighted = ((update.weight, update.message["model"]) for update in updates)
        model = average(weighted, like=state.model)
        return state if model is None else replace(state, model=model)
