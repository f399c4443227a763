"""Under torchrun: several processes, on one machine or on many, each running the whole loop on its share of every
cohort. They meet once a cycle, in the reduction of the average, and all go on from the same model.

Rank 0 has the folder, the record and the evaluation. A rank that is lost ends the others, and torchrun, if told to
restart (--max-restarts), starts all again: rank 0 goes on from the checkpoint and tells the others where.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple

import torch
from torch import distributed

from fedcluster.accept import ELSEWHERE, Update
from fedcluster.executor import InProcess, Memory
from fedcluster.fleet import Floats
from fedcluster.schedule import Cycle
from fedcluster.state import Message, State, Time


class Ranks:
    """Trains every world-size-th device of a cohort; the others are trained elsewhere."""

    def __init__(self, here: InProcess) -> None:
        self.here = here
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()

    def train(self, cycle: Cycle, received: Message, exchange: int, memory: Memory) -> Iterator[Update]:
        message: Message
        for number, device in enumerate(cycle.cohort.tolist()):
            message = ELSEWHERE
            if number % self.world == self.rank:
                place = (cycle.round, cycle.cycle, device)
                message, kept = self.here.train_device(exchange, place, received, memory.get(device))
                if kept:
                    memory[device] = kept
            yield Update(device, cycle.round, cycle.cycle, message)
        for number, device in enumerate(cycle.cohort.tolist() if self.here.new else []):
            memory[device] = hand_round(memory.get(device, self.here.new), number % self.world)

    def close(self) -> None:
        pass


def among_ranks() -> bool:
    """Whether torchrun has started us, with others."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def restarts() -> int:
    """How often torchrun has started us anew, because a rank was lost."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@contextmanager
def joined(device: str) -> Iterator[None]:
    """Among the ranks, where there are any."""
    if not among_ranks():
        yield
        return
    store, rank, world = next(distributed.rendezvous("env://"))  # type: ignore[attr-defined]
    # torchrun's store remembers the rank that was lost: begin on a clean page
    attempt = distributed.PrefixStore(f"attempt {restarts()}", store)  # type: ignore[attr-defined]
    backend = "nccl" if device.startswith("cuda") else "gloo"
    distributed.init_process_group(backend, store=attempt, rank=rank, world_size=world)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def leading() -> bool:
    return not among_ranks() or os.environ["RANK"] == "0"


def agree(state: State, new: Message) -> State:
    """Everybody goes on from where rank 0 is. `new` is what a device that has not taken part keeps."""
    if not distributed.is_initialized():
        return state
    where = [state.round, state.cycle, len(state.devices), *astuple(state.time)]
    position = torch.tensor(where, dtype=torch.int64, device=state.model.device)
    distributed.broadcast(position, 0)
    round, cycle, count, *time = position.tolist()
    known = torch.tensor(sorted(state.devices) or [0] * count, dtype=torch.int64, device=state.model.device)
    if count:
        distributed.broadcast(known, 0)
    memory = {device: hand_round(state.devices.get(device, new), 0) for device in known.tolist()}
    kept = hand_round({"model": state.model} | state.server, 0)
    return State(kept.pop("model"), kept, memory, round, cycle, Time(*time))


def hand_round(message: Message, source: int) -> Message:
    """What `source` has under these names."""
    copies = {name: tensor.clone() for name, tensor in message.items()}
    for tensor in copies.values():
        distributed.broadcast(tensor, source)
    return copies


def from_rank_0(rows: Floats) -> Floats:
    """Rank 0's numbers for everybody: another machine may round otherwise."""
    if not distributed.is_initialized():
        return rows
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    numbers = torch.from_numpy(rows).to(device)
    distributed.broadcast(numbers, 0)
    return numbers.cpu().numpy()


def everywhere(number: int) -> int:
    """The sum of a number over all ranks."""
    if not distributed.is_initialized():
        return number
    total = torch.tensor([number])
    distributed.all_reduce(total)
    return int(total)
