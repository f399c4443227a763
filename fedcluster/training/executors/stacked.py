"""Trains a cohort at once: the devices' models are the rows of one tensor, and torch.func computes their gradients.

This is for a GPU, which one small model does not fill, and for models so small that calling an operation costs more
than running it. The algorithms do not change: they get w of shape [devices, n] in place of [n], and sums broadcast.
Gradients equal those of sequential training up to rounding, because batched operations add in another order.
"""

import time
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from fedcluster.fleet.schedule import Cycle
from fedcluster.models.flat_model import FlatModel, Loss
from fedcluster.models.local_sgd import Batches
from fedcluster.models.optimizers import learning_rate
from fedcluster.state import Tensors, Update
from fedcluster.training.executors.in_process import DeviceStates, InProcess

MEMORY = 256 * 2**20  # bytes of a stack on a CPU; on a GPU it is half of the free memory
TOLERANCE = {"float32": 1e-4, "bf16": 0.1}  # of a stacked gradient, relative to the largest number in it
COPIES = 6  # vectors as long as the model for each device in a stack: w, its gradient, moments


class StackedModel(FlatModel):
    """A model whose w has a row for each of several devices."""

    def __init__(self, one: FlatModel, count: int) -> None:
        self.module, self.objective, self.size, self.network = one.module, one.objective, one.size, None
        self.counters, self.noise = {}, []  # models with counters or random draws cannot be stacked
        self.w = one.w.repeat(count, 1)
        self.gradient = self.w.new_zeros(count, one.size)
        loss = Loss(one.module, one.objective)
        gradient = torch.func.grad(lambda w, x, y: loss.at(one.named(w), x, y))
        self.gradients = torch.func.vmap(gradient)

    def load(self, w: Tensor) -> None:
        self.w.copy_(w)

    def compute_gradient(self, x: Tensor, y: Tensor) -> None:
        self.batch = x, y
        self.gradient.copy_(self.gradients(self.w, x, y)[:, : self.size])


class StackedBatches(Batches):
    """The batches of several devices, step by step. All devices have the same number of steps and of samples."""

    def __init__(self, devices: list[Batches]) -> None:
        first = devices[0]
        super().__init__(first.dataset, first.rows, first.options, first.seed, first.place, first.lr)
        self.devices = devices

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return stack(self.devices)

    def whole(self) -> Iterator[tuple[Tensor, Tensor]]:
        return stack([batches.whole() for batches in self.devices])


def stack(parts: list[Batches] | list[Iterator[tuple[Tensor, Tensor]]]) -> Iterator[tuple[Tensor, Tensor]]:
    for together in zip(*parts, strict=True):
        yield stack_of(together)


def stack_of(batches: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in batches]), torch.stack([y for _, y in batches])


class Stacked:
    """Trains as many devices at once as fit in memory. The devices of a stack have equally many samples and steps."""

    def __init__(self, here: InProcess) -> None:
        self.here = here
        self.largest = max(1, memory(here.flat_model.device) // bytes_per_device(here))
        self.flat_models: dict[int, StackedModel] = {}

    def train(self, cycle: Cycle, received: Tensors, phase: int, device_states: DeviceStates) -> Iterator[Update]:
        here = self.here
        places = [(cycle.round, cycle.cycle, device) for device in cycle.cohort.tolist()]
        lr = learning_rate(here.options, received)
        batches = {place[2]: here.batches(place, lr) for place in places}

        def alike(device: int) -> tuple[int, int]:
            return len(batches[device].rows), batches[device].steps

        for _, group in groupby(sorted(batches, key=alike), key=alike):
            devices = list(group)
            for start in range(0, len(devices), self.largest):
                chunk = devices[start : start + self.largest]
                kept = [device_states.get(device, here.initial_device_state) for device in chunk]
                memories = {name: torch.stack([one[name] for one in kept]) for name in here.initial_device_state}
                together = StackedBatches([batches[device] for device in chunk])
                sent = here.phases[phase].train(self.flat_model(len(chunk)), received, together, memories)
                for row, device in enumerate(chunk):
                    mine = {name: rows[row].clone() for name, rows in memories.items()}
                    if mine and all(bool(torch.isfinite(tensor).all()) for tensor in mine.values()):
                        device_states[device] = mine
                    place = (cycle.round, cycle.cycle, device)
                    message = {name: rows[row] for name, rows in sent.items()}
                    message = here.transforms.on_device(message, received, phase, place)
                    yield Update(device, cycle.round, cycle.cycle, message)

    def flat_model(self, count: int) -> StackedModel:
        if count not in self.flat_models:
            self.flat_models[count] = StackedModel(self.here.flat_model, count)
        return self.flat_models[count]

    def close(self) -> None:
        pass


def memory(device: torch.device) -> int:
    """The bytes that a stack may take."""
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else MEMORY


def bytes_per_device(here: InProcess) -> int:
    """The bytes of one device in a stack: its vectors, and what the forward pass keeps for the backward pass."""
    saved = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += tensor.numel() * tensor.element_size()
        return tensor

    x, y = sample(here)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        here.flat_model.objective(here.flat_model.module, x[0], y[0])
    per_sample = saved // len(y[0])
    size = len(here.rows(0)) if here.options.batch == "full" else here.options.batch
    return COPIES * here.flat_model.w.numel() * 4 + 2 * per_sample * size


def sample(here: InProcess) -> tuple[Tensor, Tensor]:
    """Two small batches of a device's data, stacked as if they were of two devices."""
    rows = here.rows(0)
    batches = Batches(here.dataset, rows, here.options, here.seed, (0, 0, 0))
    x, y = stack_of([batches.gather(np.resize(half, 16)) for half in (rows, rows[::-1])])
    return x.to(here.flat_model.device), y.to(here.flat_model.device)


def stackable(here: InProcess) -> str | None:
    """Try to train this model in stacks; return why it cannot be, or None."""
    flat_model = here.flat_model
    if flat_model.size < flat_model.w.numel():
        return "it has buffers, such as running statistics"
    x, y = sample(here)
    together = StackedModel(flat_model, len(x))
    flat_model.module.train()
    try:
        together.compute_gradient(x, y)
    except Exception as error:  # a module may do anything
        return str(error).splitlines()[0][:120]
    for row in range(len(x)):
        flat_model.compute_gradient(x[row], y[row])
        difference = (together.gradient[row] - flat_model.gradient).abs().max()
        if difference > TOLERANCE[flat_model.precision] * flat_model.gradient.abs().max():
            return f"its gradients differ by {float(difference):.1e}"
    return None


def faster(here: InProcess, cycle: Cycle, start: Tensors, workers: int) -> bool:
    """Try both; return whether the cohort trains faster in a stack than device by device in `workers` processes."""
    stacked = Stacked(here)
    few = Cycle(cycle.round, cycle.cycle, cycle.cluster, cycle.cohort[:4], cycle.weights[:4], cycle.samples[:4])
    return seconds(stacked, cycle, start) / len(cycle.cohort) < seconds(here, few, start) / len(few.cohort) / workers


def seconds(executor: InProcess | Stacked, cycle: Cycle, start: Tensors) -> float:
    for _ in executor.train(cycle, start, 0, {}):  # once to warm up
        pass
    began = time.perf_counter()
    for _ in executor.train(cycle, start, 0, {}):
        pass
    if executor_device(executor).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def executor_device(executor: InProcess | Stacked) -> torch.device:
    return (executor.here if isinstance(executor, Stacked) else executor).flat_model.device
