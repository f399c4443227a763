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

Resource = TypeVar("Resource")
Result = TypeVar("Result")

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


def in_order(
    function: Callable[[Resource, int], Result], items: Iterable[int], resources: list[Resource]
) -> Iterator[Result]:
    """function(resource, item) of all items, in their order. Each resource, such as a model, is used by one thread."""
    if len(resources) == 1:
        yield from (function(resources[0], item) for item in items)
        return
    free: SimpleQueue[Resource] = SimpleQueue()
    for resource in resources:
        free.put(resource)

    def call(item: int) -> Result:
        resource = free.get()
        try:
            return function(resource, item)
        finally:
            free.put(resource)

    remaining = iter(items)
    with ThreadPoolExecutor(len(resources)) as pool:
        waiting: deque[Future[Result]] = deque(
            pool.submit(call, item) for item in islice(remaining, AHEAD * len(resources))
        )
        try:
            while waiting:
                result = waiting.popleft().result()
                for item in islice(remaining, 1):
                    waiting.append(pool.submit(call, item))
                yield result
        finally:
            for future in waiting:
                future.cancel()
