"""Under torchrun: several processes, on one machine or on many, each running the whole loop on its share of every
cohort. They meet once a cycle, in the reduction of the average, and all go on from the same model.

Rank 0 has the folder, the record and the evaluation. A rank that is lost ends the others, and torchrun, if told to
restart (--max-restarts), starts all again: rank 0 goes on from the checkpoint and tells the others where.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed

from fedcluster.algorithms.aggregation.mean import add_up, meeting
from fedcluster.errors import NotAlike
from fedcluster.fleet.fleet import Floats, Ints
from fedcluster.fleet.schedule import Cycle
from fedcluster.state import Message, State, Time
from fedcluster.training.acceptance import ELSEWHERE, Update
from fedcluster.training.executors.in_process import InProcess, Memory
from fedcluster.training.norm_bound import WINDOW


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
    norms = {name: recent_medians(medians, state.model) for name, medians in state.norms.items()}
    return State(kept.pop("model"), kept, memory, round, cycle, Time(*time), state.size, norms)


def recent_medians(medians: tuple[float, ...], like: Tensor) -> tuple[float, ...]:
    """Rank 0's."""
    table = torch.full((WINDOW,), -1.0, dtype=torch.float64)
    table[: len(medians)] = torch.tensor(medians, dtype=torch.float64)
    table = table.to(like.device)
    distributed.broadcast(table, 0)
    return tuple(median for median in table.tolist() if median >= 0)


def of_all(kept: dict[int, dict[str, float]], cohort: Ints, form: Message) -> dict[int, dict[str, float]]:
    """The norms of the updates that any rank has accepted. Every device is one rank's, so that the sum is exact."""
    if not distributed.is_initialized() or not form:
        return kept
    table = torch.zeros(len(cohort), 1 + len(form), dtype=torch.float64)
    for row, device in enumerate(cohort.tolist()):
        if device in kept:
            table[row] = torch.tensor([1.0, *(kept[device][name] for name in form)], dtype=torch.float64)
    table = table.to(next(iter(form.values())).device)
    add_up(table)
    rows = zip(cohort.tolist(), table.tolist(), strict=True)
    return {device: dict(zip(form, norms, strict=True)) for device, (accepted, *norms) in rows if accepted}


def hand_round(message: Message, source: int) -> Message:
    """What `source` has under these names."""
    copies = {name: tensor.clone() for name, tensor in message.items()}
    with meeting():
        for tensor in copies.values():
            distributed.broadcast(tensor, source)
    return copies


def from_rank_0(rows: Floats) -> Floats:
    """Rank 0's numbers for everybody: another machine may round otherwise."""
    if not distributed.is_initialized():
        return rows
    numbers = torch.from_numpy(rows).to(meeting_place())
    distributed.broadcast(numbers, 0)
    return numbers.cpu().numpy()


def anywhere(flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which of the flags are set on any rank."""
    if not distributed.is_initialized():
        return flags
    counts = torch.from_numpy(flags.astype(np.int64)).to(meeting_place())
    add_up(counts)
    return counts.cpu().numpy() > 0


def everywhere(number: int) -> int:
    """The sum of a number over all ranks."""
    if not distributed.is_initialized():
        return number
    total = torch.tensor([number], device=meeting_place())
    add_up(total)
    return int(total)


def gathered(text: str) -> list[str]:
    """What every rank says, in the order of the ranks."""
    if not distributed.is_initialized():
        return [text]
    place, ours = meeting_place(), text.encode()
    sizes = [torch.zeros(1, dtype=torch.int64, device=place) for _ in range(distributed.get_world_size())]
    with meeting():
        distributed.all_gather(sizes, torch.tensor([len(ours)], device=place))
        longest = max(int(size) for size in sizes)
        padded = torch.tensor(list(ours.ljust(longest)), dtype=torch.uint8, device=place)
        all_of_them = [torch.zeros_like(padded) for _ in sizes]
        distributed.all_gather(all_of_them, padded)
    return [bytes(said[: int(size)].tolist()).decode() for said, size in zip(all_of_them, sizes, strict=True)]


def check_alike(facts: dict[str, str]) -> None:
    """That all ranks train the same thing in the same way; those that do not would spoil it in silence."""
    said = [json.loads(text) for text in gathered(json.dumps(facts))]
    for rank, theirs in enumerate(said):
        other = [name for name, value in said[0].items() if theirs.get(name) != value]
        if other:
            has = [", ".join(f"{name} {one.get(name)}" for name in other) for one in (theirs, said[0])]
            raise NotAlike(
                f"rank {rank} has {has[0]}, and rank 0 has {has[1]}: the model would be neither's; bring all ranks to "
                "the same, and go on with --resume"
            )


def meeting_place() -> str:
    return "cuda" if distributed.get_backend() == "nccl" else "cpu"
