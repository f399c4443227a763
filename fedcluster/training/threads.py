"""Threads: one for torch, so that sums do not depend on the number of cores, and several for measurements of devices.

torch computes without the interpreter's lock, so threads use all cores. Each has a module of its own and works with one
torch thread. Results are returned in the order of the devices: the number of threads changes nothing but the time.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from queue import SimpleQueue
from threading import RLock
from typing import TypeVar

import torch

Tool = TypeVar("Tool")
Found = TypeVar("Found")

AHEAD = 2  # results that may wait for each thread: a device's gradient can be large
ONE_AT_A_TIME = RLock()


@contextmanager
def repeatable() -> Iterator[None]:
    """One torch thread; torch's generator is left as it was. The generator belongs to the process, so runs in several
    threads of one process wait for one another."""
    with ONE_AT_A_TIME:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with torch.random.fork_rng(devices=[]):
                yield
        finally:
            torch.set_num_threads(threads)


def in_order(look: Callable[[Tool, int], Found], things: Iterable[int], tools: list[Tool]) -> Iterator[Found]:
    """look(tool, thing) of all things, in their order, by as many threads as there are tools."""
    if len(tools) == 1:
        yield from (look(tools[0], thing) for thing in things)
        return
    free: SimpleQueue[Tool] = SimpleQueue()
    for tool in tools:
        free.put(tool)

    def one(thing: int) -> Found:
        tool = free.get()
        try:
            return look(tool, thing)
        finally:
            free.put(tool)

    rest = iter(things)
    with ThreadPoolExecutor(len(tools)) as pool:
        waiting: deque[Future[Found]] = deque(pool.submit(one, thing) for thing in islice(rest, AHEAD * len(tools)))
        try:
            while waiting:
                found = waiting.popleft().result()
                for thing in islice(rest, 1):
                    waiting.append(pool.submit(one, thing))
                yield found
        finally:
            for future in waiting:
                future.cancel()
