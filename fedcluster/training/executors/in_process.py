"""The executor trains a cohort. It may yield fewer updates than the cohort has devices, because devices fail."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

from fedcluster.algorithms import FedAvg
from fedcluster.algorithms.transforms import Transforms
from fedcluster.attacks.attacker import Attacker
from fedcluster.data.dataset import Dataset
from fedcluster.data.partition import Partition
from fedcluster.errors import BadExperiment
from fedcluster.experiment import Local
from fedcluster.fleet.schedule import Cycle
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.kernels.vectors import all_finite
from fedcluster.models.local_sgd import Batches
from fedcluster.models.optimizers import learning_rate
from fedcluster.models.tasks import Task
from fedcluster.state import Reply, Tensors, Update

MOST_DRAWN = 2**27  # a gigabyte of row numbers
DeviceStates = dict[int, Tensors]
"""What devices keep, by device; executors read and update it."""


class Executor(Protocol):
    """`received` is everything that the cohort has been sent in this cycle, in this phase and in earlier ones."""

    def train(self, cycle: Cycle, received: Tensors, phase: int, device_states: DeviceStates) -> Iterator[Reply]: ...
    def close(self) -> None: ...


@runtime_checkable
class BeginsEarly(Protocol):
    """An executor whose devices are elsewhere, so that a cohort can begin before those of earlier cycles are done."""

    def begin(self, cycle: Cycle, received: Tensors, device_states: DeviceStates) -> None:
        """Let a cohort begin, whose updates `train` yields later."""


def check_work(options: Local, partition: Partition) -> None:
    """Refuse too many samples: those of all steps of a cycle are drawn at once."""
    largest = int(partition.sizes.max())
    if options.epochs is not None:
        what, drawn = "local.epochs times a device's samples", options.epochs * largest
    else:
        what = "local.steps times the batch"
        drawn = options.step_range[1] * (largest if options.batch == "full" else options.batch)
    if drawn > MOST_DRAWN:
        raise BadExperiment(f"{what} is {drawn:,} samples per device and cycle: at most {MOST_DRAWN:,} are possible")


@dataclass(frozen=True, eq=False)
class Trainer:
    """What trains on a device, wherever the device is: task, algorithm, model at W_0, [local], seed and transforms."""

    task: Task
    algorithm: FedAvg
    flat_model: FlatModel
    local: Local
    seed: int
    transforms: Transforms


class InProcess:
    """Trains one device after the other in this process, in the order of the cohort. An `attacker` changes the samples
    of its devices."""

    def __init__(
        self, trainer: Trainer, dataset: Dataset, partition: Partition, attacker: Attacker | None = None
    ) -> None:
        self.trainer, self.dataset, self.attacker = trainer, dataset, attacker
        self.algorithm, self.flat_model, self.transforms = trainer.algorithm, trainer.flat_model, trainer.transforms
        self.options, self.seed = trainer.local, trainer.seed
        check_work(self.options, partition)
        self.phases = self.algorithm.phases
        self.initial_device_state = self.algorithm.initial_device_state(self.flat_model.w, self.flat_model.size)
        self.rows = lru_cache(maxsize=4096)(partition.sample_indices)

    def train(self, cycle: Cycle, received: Tensors, phase: int, device_states: DeviceStates) -> Iterator[Update]:
        for device in cycle.cohort.tolist():
            place = (cycle.round, cycle.cycle, device)
            message, kept = self.train_device(phase, place, received, device_states.get(device))
            if kept:
                device_states[device] = kept
            yield Update(device, cycle.round, cycle.cycle, message)

    def batches(self, place: tuple[int, int, int], lr: float) -> Batches:
        """The batches of one device, which is the last number of its place."""
        dataset, rows = self.dataset, self.rows(place[2])
        if self.attacker is not None:
            dataset, rows = self.attacker.samples(place[2], dataset, rows)
        return Batches(dataset, rows, self.options, self.seed, place, lr)

    def train_device(
        self, phase: int, place: tuple[int, int, int], received: Tensors, device_states: Tensors | None
    ) -> tuple[Tensors, Tensors]:
        """Train one device: its upload and its new state. If that state is not finite, the device keeps its old one."""
        batches = self.batches(place, learning_rate(self.options, received))
        before = self.initial_device_state if device_states is None else device_states
        kept = dict(before)
        message = self.phases[phase].train(self.flat_model, received, batches, kept)
        message = self.transforms.on_device(message, received, phase, place)
        return message, kept if all(all_finite(tensor) for tensor in kept.values()) else before

    def close(self) -> None:
        pass
