"""Child processes, and the signals that end a run.

SIGTERM ends a run like Ctrl-C: the run saves its last whole cycle, says so, and exits with a code of its own.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType

from fedcluster.errors import Terminated

UNGUARDED = 70  # exit code of a process that would have to import a script that starts the training again
GUARD = (
    "this script calls fedcluster when it is imported, as every new process has to do: put the call under "
    "if __name__ == '__main__':"
)


@contextmanager
def terminable() -> Iterator[None]:
    """Turn the first SIGTERM into the exception `Terminated`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the run is being saved
    raise Terminated


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Block SIGINT until the end of the block, and in processes started in it for good. Ctrl-C reaches every process of
    a terminal, even one that is still importing, and only this one shall report it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # the first spawned process would start it, and it unblocks SIGINT
    caught: list[int] = []  # by a thread that does not block SIGINT: Python calls the main thread's handler
    handler = signal.getsignal(signal.SIGINT)
    ours = handler is not None and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if caught:
            signal.raise_signal(caught[0])


def end_with(parent: int) -> None:
    """Start a thread that ends this process once its parent is gone. The parent must have passed its id: it may be gone
    before getppid() is called."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def leave_if_importing() -> None:
    """Silently end a new process that, importing the script that started it, has reached the call that started it. The
    parent reports the mistake."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(UNGUARDED)
