"""Under torchrun: several processes, on one machine or on many, each running the whole loop on its share of every
cohort. They meet once a cycle, in the reduction of the average, and all go on from the same model.

Rank 0 has the folder, the record and the evaluation. A rank that is lost ends the others, and torchrun, if told to
restart (--max-restarts), starts all again: rank 0 goes on from the checkpoint and tells the others where.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed

from fedcluster.accept import ELSEWHERE, Update
from fedcluster.executor import InProcess
from fedcluster.schedule import Cycle
from fedcluster.state import Message, State


class Ranks:
    """Trains every world-size-th device of a cohort; the others are trained elsewhere."""

    def __init__(self, here: InProcess) -> None:
        self.here = here
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()

    def train(self, cycle: Cycle, received: Message) -> Iterator[Update]:
        for place, device in enumerate(cycle.cohort.tolist()):
            mine = place % self.world == self.rank
            message = self.here.train_device(cycle.round, cycle.cycle, device, received) if mine else ELSEWHERE
            yield Update(device, cycle.round, cycle.cycle, message)

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


def agree(state: State) -> State:
    """Everybody goes on from where rank 0 is."""
    if not distributed.is_initialized():
        return state
    position = torch.tensor([state.round, state.cycle], device=state.model.device)
    model = state.model.clone()
    distributed.broadcast(position, 0)
    distributed.broadcast(model, 0)
    round, cycle = position.tolist()
    return State(model, round, cycle)


def everywhere(number: int) -> int:
    """The sum of a number over all ranks."""
    if not distributed.is_initialized():
        return number
    total = torch.tensor([number])
    distributed.all_reduce(total)
    return int(total)
