"""Under torchrun: several processes, on one machine or on many, each running the whole loop on its share of every
cohort. Each cycle they reduce the aggregate once, and all continue from the same model.

Rank 0 has the folder, the record and the evaluation. When a rank is lost, the others end, and torchrun, if told to
restart (--max-restarts), starts all again: rank 0 resumes from the checkpoint and broadcasts the state.
"""

import itertools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from hashlib import sha256

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed

from fedcluster.algorithms.aggregation.registry import Aggregator
from fedcluster.errors import LostRank, NotAlike
from fedcluster.fleet.fleet import Floats, Ints
from fedcluster.fleet.schedule import Cycle
from fedcluster.state import NORM_WINDOW, Refusal, Remote, Reply, State, Tensors, Time, Update
from fedcluster.training.executors.in_process import DeviceStates, InProcess

RUNS = itertools.count(1)  # numbers the runs of this process; every rank makes the same ones


class Distributed:
    """Trains every world-size-th device of a cohort; other ranks train the others."""

    def __init__(self, here: InProcess) -> None:
        self.here = here
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()

    def train(self, cycle: Cycle, received: Tensors, phase: int, device_states: DeviceStates) -> Iterator[Reply]:
        for number, device in enumerate(cycle.cohort.tolist()):
            if number % self.world != self.rank:
                yield Remote(device)
                continue
            place = (cycle.round, cycle.cycle, device)
            message, kept = self.here.train_device(phase, place, received, device_states.get(device))
            if kept:
                device_states[device] = kept
            yield Update(device, cycle.round, cycle.cycle, message)
        for number, device in enumerate(cycle.cohort.tolist() if self.here.initial_device_state else []):
            device_states[device] = broadcast_tensors(
                device_states.get(device, self.here.initial_device_state), number % self.world
            )

    def close(self) -> None:
        pass


def is_distributed() -> bool:
    """Whether torchrun has started this process as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def restart_count() -> int:
    """How often torchrun has restarted the ranks because one was lost."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Join the ranks' process group, if torchrun has started any."""
    if not is_distributed():
        yield
        return
    store, rank, world = next(distributed.rendezvous("env://"))  # type: ignore[attr-defined]
    # torchrun's store still holds the keys of earlier runs, and of the attempt in which a rank was lost
    place = f"attempt {restart_count()}, run {next(RUNS)}"
    own = distributed.PrefixStore(place, store)  # type: ignore[attr-defined]
    backend = "nccl" if device.startswith("cuda") else "gloo"
    distributed.init_process_group(backend, store=own, rank=rank, world_size=world)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def is_main_rank() -> bool:
    return not is_distributed() or os.environ["RANK"] == "0"


@contextmanager
def collective() -> Iterator[None]:
    """Wraps a collective: an error in it means that another rank was lost."""
    try:
        yield
    except RuntimeError as error:
        raise LostRank(f"another rank was lost ({str(error).splitlines()[0][:120]}); see its own output") from None


def all_reduce(total: Tensor) -> None:
    """The sum over all ranks, in place."""
    with collective():
        distributed.all_reduce(total)


def all_reduce_aggregate(aggregator: Aggregator) -> None:
    """Add up what the ranks have accumulated of one cohort."""
    if distributed.is_initialized():
        aggregator.reduce(all_reduce)


def all_gather_refusals(refusals: list[Refusal]) -> list[Refusal]:
    """The refusals of all ranks."""
    if not all_reduce_sum(len(refusals)):
        return []
    return [Refusal(*refusal) for text in all_gather_text(json.dumps(refusals)) for refusal in json.loads(text)]


def check_same_state(state: State) -> None:
    """Compare a digest of the state among the ranks. They can differ only by a fault: an algorithm of the user's that
    draws random numbers of its own, or a machine that computes differently."""
    if not distributed.is_initialized():
        return
    digest = sha256()
    for name, tensor in sorted({"model": state.model, **state.server}.items()):
        digest.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    check_ranks_match({f"a model after round {state.round} with digest": digest.hexdigest()[:16]})


def broadcast_state(state: State, initial_device_state: Tensors) -> State:
    """Rank 0's state, on all ranks. A device without a state yet has `initial_device_state`."""
    if not distributed.is_initialized():
        return state
    *numbers, times = astuple(state.time)
    where = [state.round, state.cycle, len(state.devices), *numbers, *times]
    position = torch.tensor(where, dtype=torch.int64, device=state.model.device)
    distributed.broadcast(position, 0)
    round, cycle, count, now, idle, dropped, late, failed, *past = position.tolist()
    known = torch.tensor(sorted(state.devices) or [0] * count, dtype=torch.int64, device=state.model.device)
    if count:
        distributed.broadcast(known, 0)
    device_states = {
        device: broadcast_tensors(state.devices.get(device, initial_device_state), 0) for device in known.tolist()
    }
    kept = broadcast_tensors({"model": state.model} | state.server, 0)
    norms = {name: broadcast_medians(medians, state.model) for name, medians in state.norms.items()}
    model = kept.pop("model")
    return replace(
        state,
        model=model,
        server=kept,
        devices=device_states,
        round=round,
        cycle=cycle,
        time=Time(now, idle, dropped, late, failed, tuple(past)),
        norms=norms,
    )


def broadcast_medians(medians: tuple[float, ...], like: Tensor) -> tuple[float, ...]:
    """Rank 0's medians."""
    table = torch.full((NORM_WINDOW,), -1.0, dtype=torch.float64)
    table[: len(medians)] = torch.tensor(medians, dtype=torch.float64)
    table = table.to(like.device)
    distributed.broadcast(table, 0)
    return tuple(median for median in table.tolist() if median >= 0)


def all_gather_norms(
    kept: dict[int, dict[str, float]], cohort: Ints, upload_spec: Tensors
) -> dict[int, dict[str, float]]:
    """The norms of the updates that any rank has accepted. One rank trains each device, so the sum is exact."""
    if not distributed.is_initialized() or not upload_spec:
        return kept
    table = torch.zeros(len(cohort), 1 + len(upload_spec), dtype=torch.float64)
    for row, device in enumerate(cohort.tolist()):
        if device in kept:
            table[row] = torch.tensor([1.0, *(kept[device][name] for name in upload_spec)], dtype=torch.float64)
    table = table.to(next(iter(upload_spec.values())).device)
    all_reduce(table)
    rows = zip(cohort.tolist(), table.tolist(), strict=True)
    return {device: dict(zip(upload_spec, norms, strict=True)) for device, (accepted, *norms) in rows if accepted}


def broadcast_tensors(message: Tensors, source: int) -> Tensors:
    """The tensors of rank `source` under these names."""
    copies = {name: tensor.clone() for name, tensor in message.items()}
    with collective():
        for tensor in copies.values():
            distributed.broadcast(tensor, source)
    return copies


def broadcast_array(rows: Floats) -> Floats:
    """Rank 0's numbers, on all ranks: another machine may round differently."""
    if not distributed.is_initialized():
        return rows
    numbers = torch.from_numpy(rows).to(collective_device())
    distributed.broadcast(numbers, 0)
    return numbers.cpu().numpy()


def all_reduce_any(flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which of the flags are set on any rank."""
    if not distributed.is_initialized():
        return flags
    counts = torch.from_numpy(flags.astype(np.int64)).to(collective_device())
    all_reduce(counts)
    return counts.cpu().numpy() > 0


def all_reduce_sum(number: int) -> int:
    """The sum of a number over all ranks."""
    if not distributed.is_initialized():
        return number
    total = torch.tensor([number], device=collective_device())
    all_reduce(total)
    return int(total)


def all_reduce_table(table: Tensor) -> Tensor:
    """The table of which every rank has filled in some rows and left the others 0."""
    if not distributed.is_initialized():
        return table
    table = table.to(collective_device())
    all_reduce(table)
    return table.cpu()


def rank_and_world() -> tuple[int, int]:
    """The number of this rank, and of all."""
    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)


def all_gather_text(text: str) -> list[str]:
    """Every rank's text, in the order of the ranks."""
    if not distributed.is_initialized():
        return [text]
    place, ours = collective_device(), text.encode()
    sizes = [torch.zeros(1, dtype=torch.int64, device=place) for _ in range(distributed.get_world_size())]
    with collective():
        distributed.all_gather(sizes, torch.tensor([len(ours)], device=place))
        longest = max(int(size) for size in sizes)
        padded = torch.tensor(list(ours.ljust(longest)), dtype=torch.uint8, device=place)
        all_of_them = [torch.zeros_like(padded) for _ in sizes]
        distributed.all_gather(all_of_them, padded)
    return [bytes(text[: int(size)].tolist()).decode() for text, size in zip(all_of_them, sizes, strict=True)]


def check_ranks_match(facts: dict[str, str]) -> None:
    """Refuse ranks that differ in a fact: they would silently train a mixture."""
    gathered = [json.loads(text) for text in all_gather_text(json.dumps(facts))]
    for rank, theirs in enumerate(gathered):
        other = [name for name, value in gathered[0].items() if theirs.get(name) != value]
        if other:
            has = [", ".join(f"{name} {one.get(name)}" for name in other) for one in (theirs, gathered[0])]
            raise NotAlike(
                f"rank {rank} has {has[0]}, and rank 0 has {has[1]}, so their updates cannot be mixed: make all "
                "ranks the same, and continue with --resume"
            )


def collective_device() -> str:
    return "cuda" if distributed.get_backend() == "nccl" else "cpu"
