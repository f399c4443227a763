"""Processes forked from one that has already imported torch and Flower: a federation of a dozen devices starts in a
second, where each would spend several seconds on its imports."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONTEXT = multiprocessing.get_context("forkserver")
PRELOAD = ["fedcluster.cli", "fedcluster.flower.node", "fedcluster.flower.client_app", "fedcluster.flower.server"]


class Forked:
    """`python -m MODULE WORDS` in a folder, its output appended to a log. It has `subprocess.Popen`'s methods."""

    def __init__(self, module: str, words: list[str], folder: Path, environment: dict[str, str], log: Path) -> None:
        CONTEXT.set_forkserver_preload(PRELOAD)
        self.process = CONTEXT.Process(target=run_module, args=(module, words, folder, environment, log))
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid
        self.terminate, self.kill, self.args = self.process.terminate, self.process.kill, words

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.process.exitcode


def run_module(module: str, words: list[str], folder: Path, environment: dict[str, str], log: Path) -> None:
    """The child's side."""
    import runpy

    os.setpgid(0, 0)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.chdir(folder)
    os.environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
