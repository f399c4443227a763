"""Many runs: side by side in processes, each in its folder, resumed where they stopped."""

import gc
import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from threading import Thread

from fedcluster.allocator import keep_memory
from fedcluster.display import Display
from fedcluster.errors import Diverged
from fedcluster.experiment import Experiment
from fedcluster.record import Line
from fedcluster.training import run


@dataclass(frozen=True)
class Job:
    """One run of many: its name is its folder."""

    name: str
    experiment: Experiment


def run_all(
    jobs: list[Job], out: Path, workers: int, progress: Callable[[int, int], None]
) -> dict[str, list[Line] | Diverged]:
    """Every job's curve from its start, or how it diverged. What has the same name is run once, and what is finished in
    the folder not again."""
    jobs = list({job.name: job for job in jobs}.values())
    total = sum(job.experiment.rounds for job in jobs)
    results: dict[str, list[Line] | Diverged] = {}
    if workers < 2:
        for job in jobs:
            before = sum(other.experiment.rounds for other in jobs[: len(results)])
            results[job.name] = run_one(job, out, Counting(lambda n, before=before: progress(before + n, total)))  # type: ignore[misc]
        return results
    context = get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=enlist) as pool:
        pending: dict[Future[list[Line] | Diverged], str] = {pool.submit(run_one, job, out): job.name for job in jobs}
        try:
            while pending:
                for future in wait(pending, timeout=0.3, return_when=FIRST_COMPLETED).done:
                    results[pending.pop(future)] = future.result()
                progress(sum(rounds_done(out / job.name) for job in jobs), total)
        except BaseException:
            processes = list(pool._processes.values())
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()
            raise
    return results


def enlist() -> None:
    """A process of the pool ends when it is told to, without a word, or when we are gone: its runs can be resumed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    keep_memory()
    Thread(target=end_with, args=(os.getppid(),), daemon=True).start()


def end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def rounds_done(folder: Path) -> int:
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def run_one(job: Job, out: Path, display: Display | None = None) -> list[Line] | Diverged:
    folder = out / job.name
    try:
        history = run(job.experiment, folder, resume=True, display=display or Display()).history
    except Diverged as error:
        return error
    finally:
        gc.collect()  # a run ends in a ring of references, and its data set may be hundreds of megabytes
    start = json.loads((folder / "run.json").read_bytes())["start"]
    return [{"round": 0, **start}, *history]


class Counting(Display):
    """Reports the rounds that a run in this process has done."""

    def __init__(self, report: Callable[[int], None]) -> None:
        self.report = report

    def round(self, line: Line) -> None:
        self.report(line["round"])
