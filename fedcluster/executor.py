"""The executor: trains a cohort. It may return fewer updates than it was given devices: devices fail."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Protocol

from fedcluster.accept import Update
from fedcluster.algorithms import Algorithm
from fedcluster.dataset import Dataset
from fedcluster.experiment import Local
from fedcluster.fleet import Fleet
from fedcluster.learner import Learner
from fedcluster.local import Batches
from fedcluster.schedule import Cycle
from fedcluster.state import Message


class Executor(Protocol):
    def train(self, cycle: Cycle, received: Message) -> Iterator[Update]: ...
    def close(self) -> None: ...


class InProcess:
    """One device after the other, in this process, in the order of the cohort."""

    def __init__(
        self, algorithm: Algorithm, learner: Learner, dataset: Dataset, fleet: Fleet, options: Local, seed: int
    ) -> None:
        self.algorithm, self.learner, self.dataset, self.options, self.seed = algorithm, learner, dataset, options, seed
        self.rows = lru_cache(maxsize=4096)(fleet.draw)

    def train(self, cycle: Cycle, received: Message) -> Iterator[Update]:
        for device in cycle.cohort.tolist():
            yield Update(
                device, cycle.round, cycle.cycle, self.train_device(cycle.round, cycle.cycle, device, received)
            )

    def train_device(self, round: int, cycle: int, device: int, received: Message) -> Message:
        """What one device makes of the broadcast."""
        batches = Batches(self.dataset, self.rows(device), self.options, self.seed, (round, cycle, device))
        return self.algorithm.train(self.learner, received, batches)

    def close(self) -> None:
        pass
