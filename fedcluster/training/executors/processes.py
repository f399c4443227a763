"""Trains a cohort in several processes of one machine: this one and its workers.

Where this process may fork, the workers are forked before the first cycle, with everything that they need, and are
ready at once. Elsewhere, and to replace a worker that has died, a worker is spawned: it builds the same executor from
the same experiment, which takes about two seconds. Workers share the data set, the broadcast and the updates with this
process in memory. Devices are dispatched one by one to whichever process is free, this one included; updates are
yielded in the order of the cohort. So neither the number of workers nor their speed can change a result, and a device
whose worker dies is trained again by another one.
"""

import fcntl
import os
import pickle
import signal
import stat
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
from torch import multiprocessing as mp

from fedcluster.allocator import keep_memory
from fedcluster.attacks.attacker import Attacker
from fedcluster.data.dataset import Dataset
from fedcluster.errors import FedClusterError, NotAlike
from fedcluster.experiment import Experiment
from fedcluster.fleet.schedule import Cycle
from fedcluster.models.optimizers import FACTOR
from fedcluster.models.schedules import rate_varies
from fedcluster.privacy.on_device import CLIP, adapts
from fedcluster.processes import GUARD, UNGUARDED, defer_interrupts
from fedcluster.reporting import Say
from fedcluster.state import State, Tensors, Update
from fedcluster.training.executors.in_process import DeviceStates, InProcess

AHEAD = 2  # devices that a worker holds: one that it trains, one that waits so that it need not
REPLACEMENTS = 3  # workers started for each worker, before the run continues with fewer
WORTH_STARTING = 4.0  # seconds of training left; a worker takes about two to start, while this process trains alone


Place = tuple[int, int, int]
"""Round, cycle and device."""


@dataclass(eq=False)
class PhaseBuffers:
    """Shared memory for a phase of the algorithm: the broadcast, and slots for the uploads and states of devices."""

    received: Tensors
    sent: Tensors
    device_states: Tensors


class Ready(NamedTuple):
    """The first message of a worker: the arithmetic of its steps, and the digest of its frozen weights."""

    arithmetic: str
    frozen: str | None


@dataclass(eq=False)
class Worker:
    """A process, the connection to it, and the positions in the cohort that it has been given."""

    process: Any
    connection: Connection
    ready: bool = False
    holds: list[int] = field(default_factory=list)


class Workers:
    """`count` processes, including this one, for a run of `cycles` cycles. The others are forked now, or spawned once
    enough training is left; until one is ready, and when none is left, this process trains alone."""

    def __init__(
        self, count: int, cycles: int, here: InProcess, experiment: Experiment, start: State, say: Say
    ) -> None:
        self.here, self.experiment, self.say = here, experiment, say
        self.context = mp.get_context("spawn")
        self.slots = (AHEAD + 1) * count
        self.buffers: list[PhaseBuffers] = []
        received: Tensors = {FACTOR: torch.zeros(1)} if rate_varies(experiment) else {}
        received |= {CLIP: torch.zeros(1)} if adapts(experiment) else {}
        for phase in here.phases:
            received |= phase.broadcast(start)
            sent, kept = shared(self.slots, phase.upload_spec(start)), shared(self.slots, here.initial_device_state)
            self.buffers.append(PhaseBuffers(shared(1, received), sent, kept))
        self.to_start, self.spare, self.cycles = count - 1, REPLACEMENTS * count, cycles
        self.workers: list[Worker] = []
        while self.to_start and may_fork():
            self.to_start -= 1
            self.fork()

    def fork(self) -> None:
        ours, theirs = mp.Pipe()
        others = [ours, *(worker.connection for worker in self.workers)]
        arguments = (theirs, others, self.here, self.buffers)
        with defer_interrupts(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 counts the threads of libraries, too
            process = mp.get_context("fork").Process(target=work_forked, args=arguments, daemon=True)
            process.start()
        theirs.close()
        self.workers.append(Worker(process, ours))

    def start(self) -> None:
        ours, theirs = self.context.Pipe()
        here = self.here
        arguments = (theirs, self.experiment, here.dataset, here.flat_model.precision, here.attacker, self.buffers)
        process = self.context.Process(target=work_spawned, args=arguments, daemon=True)
        with defer_interrupts():
            process.start()
        theirs.close()
        self.workers.append(Worker(process, ours))

    def start_all(self) -> None:
        """Start all workers and wait until they are ready: for measurements that leave out the start."""
        while self.to_start:
            self.to_start -= 1
            self.start()
        while not all(worker.ready for worker in self.workers):
            self.listen(set())

    def train(self, cycle: Cycle, received: Tensors, phase: int, device_states: DeviceStates) -> Iterator[Update]:
        began = time.perf_counter()
        self.cycles -= phase == 0
        self.listen(set(), timeout=0)
        if any(worker.ready for worker in self.workers):
            yield from self.train_together(cycle, received, phase, device_states)
        else:
            yield from self.here.train(cycle, received, phase, device_states)
        while self.to_start and (time.perf_counter() - began) * self.cycles >= WORTH_STARTING:
            self.to_start -= 1
            self.start()

    def train_together(
        self, cycle: Cycle, received: Tensors, phase: int, device_states: DeviceStates
    ) -> Iterator[Update]:
        buffer = self.buffers[phase]
        write_slot(received, buffer.received, 0)
        places = [(cycle.round, cycle.cycle, device) for device in cycle.cohort.tolist()]
        waiting, done, ours = deque(range(len(places))), set[int](), dict[int, tuple[Tensors, Tensors]]()
        for first, (_, _, device) in enumerate(places):
            while first not in done and first not in ours:
                self.dispatch(waiting, places, phase, device_states, first)
                if waiting and waiting[0] < first + self.slots:
                    mine = waiting.popleft()
                    own = device_states.get(places[mine][2])
                    ours[mine] = self.here.train_device(phase, places[mine], received, own)
                    timeout: float | None = 0
                else:
                    timeout = None
                waiting.extendleft(sorted(self.listen(done, timeout), reverse=True))
            slot = first % self.slots
            there = read_slot(buffer.sent, slot), read_slot(buffer.device_states, slot)
            message, kept = ours.pop(first, there)
            if kept:
                device_states[device] = {name: tensor.clone() for name, tensor in kept.items()}
            yield Update(device, cycle.round, cycle.cycle, message)

    def dispatch(
        self, waiting: deque[int], places: list[Place], phase: int, device_states: DeviceStates, first: int
    ) -> None:
        """Give every free worker the next device while there is a slot for its update. A worker gets a second device
        in advance only if one is left for this process."""
        for held in range(AHEAD):
            for worker in self.workers:
                enough = len(waiting) > min(held, 1) and waiting[0] < first + self.slots
                if worker.ready and len(worker.holds) == held and enough:
                    place = waiting.popleft()
                    worker.holds.append(place)
                    slot = place % self.slots
                    write_slot(
                        device_states.get(places[place][2], self.here.initial_device_state),
                        self.buffers[phase].device_states,
                        slot,
                    )
                    with suppress(OSError):  # if it has just died, listen will find out
                        worker.connection.send((phase, places[place], slot))

    def listen(self, done: set[int], timeout: float | None = None) -> list[int]:
        """Note which workers are ready and which positions are done. Returns the positions of workers that died."""
        returned: list[int] = []
        workers = {worker.connection: worker for worker in self.workers}
        for connection in wait(list(workers), timeout):
            worker = workers[connection]  # type: ignore[index]
            try:
                reply = worker.connection.recv()
            except (EOFError, OSError):
                returned += worker.holds
                self.replace_worker(worker)
                continue
            if isinstance(reply, Exception):
                self.close()
                raise reply
            if isinstance(reply, Ready):
                self.check_ready(worker, reply)
            else:
                done.add(worker.holds.pop(0))
        return returned

    def check_ready(self, worker: Worker, ready: Ready) -> None:
        """A worker is ready: check that it trains as this process does."""
        ours = self.here.flat_model
        if ready.arithmetic != ours.arithmetic:
            self.close()
            raise NotAlike(
                f"a worker trains with {ready.arithmetic} steps and this process with {ours.arithmetic} "
                "ones; mixed, they would train a model that neither trains alone: make sure that a C compiler is "
                "installed and the cache ($FEDCLUSTER_CACHE) can be written, and continue with --resume"
            )
        if ready.frozen != ours.frozen_digest():
            self.close()
            raise NotAlike(
                "model.name builds other frozen weights in a worker than in this process: let it draw them from "
                "torch's generator alone, or read them from a file that stays the same, or use --workers 1"
            )
        worker.ready = True

    def replace_worker(self, worker: Worker) -> None:
        self.workers.remove(worker)
        worker.connection.close()
        worker.process.join()
        if worker.process.exitcode == UNGUARDED:
            if self.spare > 0:
                self.say(f"training in one process: {GUARD}")
            self.spare, self.to_start = 0, 0
            return
        again = self.spare > 0
        self.spare -= 1
        then = (
            "another one starts"
            if again
            else f"{len(self.workers) + 1} processes continue"
            if self.workers
            else "this process continues alone"
        )
        code = worker.process.exitcode
        self.say(f"a worker died (exit code {code}); its devices are trained again, {then}")
        if again:
            self.start()

    def close(self) -> None:
        """Kill the workers: they hold nothing that could be lost."""
        for worker in self.workers:
            worker.connection.close()
            worker.process.kill()
            worker.process.join()
        self.workers = []


def may_fork() -> bool:
    """Whether a fork of this process can train: no other Python thread runs that could hold a lock. Libraries whose
    threads Python does not see (OpenBLAS, allocators) handle forks themselves."""
    return sys.platform == "linux" and threading.active_count() == 1


def work_forked(
    connection: Connection, others: list[Connection], executor: InProcess, buffers: list[PhaseBuffers]
) -> None:
    """A forked worker. It closes what it inherited: the parent's ends of the connections, so that every worker notices
    when the parent is gone, and the files of the run, whose lock must end with the parent."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in others:
        other.close()
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            writable = fcntl.fcntl(number, fcntl.F_GETFL) & (os.O_WRONLY | os.O_RDWR)
            if number > 2 and writable and stat.S_ISREG(os.fstat(number).st_mode):
                os.close(number)
    work(connection, buffers, lambda: executor)


def work_spawned(
    connection: Connection,
    experiment: Experiment,
    dataset: Dataset,
    precision: str,
    attacker: Attacker | None,
    buffers: list[PhaseBuffers],
) -> None:
    """A spawned worker."""
    keep_memory()

    def build() -> InProcess:
        from fedcluster.training.trainer import executor_of

        return executor_of(experiment, dataset, precision, attacker)

    work(connection, buffers, build)


def work(connection: Connection, buffers: list[PhaseBuffers], build: Callable[[], InProcess]) -> None:
    """Until the connection is closed, train the devices that are sent and write each update to the given slot."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        executor = build()
        connection.send(Ready(executor.flat_model.arithmetic, executor.flat_model.frozen_digest()))
        while True:
            phase, place, slot = connection.recv()
            buffer = buffers[phase]
            received, device_states = read_slot(buffer.received, 0), read_slot(buffer.device_states, slot)
            message, kept = executor.train_device(phase, place, received, device_states)
            write_slot(message, buffer.sent, slot)
            write_slot(kept, buffer.device_states, slot)
            connection.send("done")
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except FedClusterError as error:
        connection.send(error)
    except Exception:
        connection.send(RuntimeError(f"a worker failed:\n{traceback.format_exc()}"))


def shared(count: int, upload_spec: Tensors) -> Tensors:
    """Shared memory for `count` messages of this spec."""
    return {
        name: torch.zeros(count, *tensor.shape, dtype=tensor.dtype).share_memory_()  # type: ignore[no-untyped-call]
        for name, tensor in upload_spec.items()
    }


def write_slot(message: Tensors, buffer: Tensors, slot: int) -> None:
    for name, tensor in message.items():
        buffer[name][slot].copy_(tensor)


def read_slot(buffer: Tensors, slot: int) -> Tensors:
    return {name: tensor[slot] for name, tensor in buffer.items()}


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def sendable(experiment: Experiment) -> bool:
    """Whether the experiment can be sent to a new process: a user's own functions must be importable."""
    try:
        pickle.dumps(experiment)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True
