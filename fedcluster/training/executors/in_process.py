"""The executor: trains a cohort. It may return fewer updates than it was given devices: devices fail."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Protocol

from fedcluster.algorithms import FedAvg
from fedcluster.data.dataset import Dataset
from fedcluster.errors import BadExperiment
from fedcluster.experiment import Local
from fedcluster.fleet.fleet import Fleet
from fedcluster.fleet.schedule import Cycle
from fedcluster.models.flat_model import Learner
from fedcluster.models.local_sgd import Batches
from fedcluster.state import Message
from fedcluster.training.acceptance import Update, finite

MOST_DRAWN = 2**27  # a gigabyte of places in the training set
Memory = dict[int, Message]
"""What devices keep, by device; executors read it and renew it."""


class Executor(Protocol):
    """`received` is everything that the cohort was sent in this cycle, by this exchange and by those before it."""

    def train(self, cycle: Cycle, received: Message, exchange: int, memory: Memory) -> Iterator[Update]: ...
    def close(self) -> None: ...


def check_work(options: Local, fleet: Fleet) -> None:
    """The samples of all steps of a turn are drawn at once."""
    steps = options.steps if isinstance(options.steps, int) else options.steps[1]
    drawn = steps * (int(fleet.sizes.max()) if options.batch == "full" else options.batch)
    if drawn > MOST_DRAWN:
        raise BadExperiment(
            f"local.steps times the batch is {drawn:,} samples a device and turn: at most {MOST_DRAWN:,} are possible"
        )


class InProcess:
    """One device after the other, in this process, in the order of the cohort."""

    def __init__(
        self, algorithm: FedAvg, learner: Learner, dataset: Dataset, fleet: Fleet, options: Local, seed: int
    ) -> None:
        self.algorithm, self.learner, self.dataset, self.options, self.seed = algorithm, learner, dataset, options, seed
        check_work(options, fleet)
        if learner.chain is not None:
            learner.chain.check(dataset.y_train)
        self.exchanges = algorithm.exchanges
        self.new = algorithm.device_memory(learner.w, learner.size)
        self.rows = lru_cache(maxsize=4096)(fleet.draw)

    def train(self, cycle: Cycle, received: Message, exchange: int, memory: Memory) -> Iterator[Update]:
        for device in cycle.cohort.tolist():
            place = (cycle.round, cycle.cycle, device)
            message, kept = self.train_device(exchange, place, received, memory.get(device))
            if kept:
                memory[device] = kept
            yield Update(device, cycle.round, cycle.cycle, message)

    def train_device(
        self, exchange: int, place: tuple[int, int, int], received: Message, memory: Message | None
    ) -> tuple[Message, Message]:
        """What one device makes of the broadcast: what it sends, and what it keeps. A device that went astray
        keeps what it had."""
        batches = Batches(self.dataset, self.rows(place[2]), self.options, self.seed, place)
        before = self.new if memory is None else memory
        kept = dict(before)
        message = self.exchanges[exchange].train(self.learner, received, batches, kept)
        return message, kept if all(finite(tensor) for tensor in kept.values()) else before

    def close(self) -> None:
        pass
