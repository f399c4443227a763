"""What processes that we start, and signals that end them, have in common.

A run ends at SIGTERM as it does at Ctrl-C: it saves its last whole cycle, says so, and leaves with an exit code.
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
    """SIGTERM as an exception, once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # saving is under way
    raise Terminated


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Processes started here never see SIGINT: Ctrl-C reaches every process of a terminal, also one that is still
    importing, and only this one reports it. This one sees SIGINT when the block is over."""
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
    """End this process, from a thread, once its parent is gone. The parent's id must come from the parent: it may be
    gone before we can ask."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def leave_if_importing() -> None:
    """In a new process that imports the script that started it, and has come to the call that did: end it without a
    word. Whoever started it says what is wrong."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(UNGUARDED)
