"""Devices looked at by several threads, with results in the order of the devices.

torch computes without the interpreter's lock, so threads use all cores. Each has a module of its own, works with one
torch thread, and no sum is taken over its results but in order: their number changes nothing but the time.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from queue import SimpleQueue
from typing import TypeVar

Tool = TypeVar("Tool")
Found = TypeVar("Found")

AHEAD = 2  # results that may wait for each thread: a device's gradient can be large


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
