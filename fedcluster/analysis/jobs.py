"""Many runs: side by side in processes, each in its folder, resumed where they stopped."""

import gc
import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

from fedcluster.allocator import keep_memory
from fedcluster.errors import BadExperiment, Diverged, LostRank, Terminated
from fedcluster.experiment import Experiment
from fedcluster.processes import GUARD, UNGUARDED, defer_interrupts, end_with, terminable
from fedcluster.runs.metrics import Line
from fedcluster.runs.progress import Display, say
from fedcluster.training.run import run

AGAIN = 3  # times in a row that processes are started anew without a run getting done in between
GRACE = 20.0  # seconds that a run has to save itself


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
    lost = 0
    while left := [job for job in jobs if job.name not in results]:
        before = len(results)
        codes = side_by_side(left, out, workers, results, lambda: progress(rounds_of(jobs, out), total))
        if UNGUARDED in codes:
            raise BadExperiment(GUARD)
        lost = 0 if len(results) > before else lost + 1
        if lost > AGAIN:
            raise LostRank(
                f"the processes that train were lost {lost} times in a row (exit code {codes[0]}), perhaps for want of "
                f"memory: go on with --resume when there is more, or with fewer workers; what is done is in {out}"
            )
        if codes:
            say(f"a process that trains was lost (exit code {codes[0]}); its run goes on in another")
    return results


def side_by_side(
    jobs: list[Job], out: Path, workers: int, results: dict[str, list[Line] | Diverged], progress: Callable[[], None]
) -> list[int]:
    """Run all jobs, or until a process is lost: then the exit codes of those that ended by themselves."""
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=enlist, initargs=(os.getpid(),))
    pending: dict[Future[list[Line] | Diverged], str] = {}
    processes: list[BaseProcess] = []
    others = active_children()
    try:
        with defer_interrupts():
            pending = {pool.submit(run_here, job, out): job.name for job in jobs}
        processes = [process for process in active_children() if process not in others]
        while pending:
            for future in wait(pending, timeout=0.3, return_when=FIRST_COMPLETED).done:
                results[pending[future]] = future.result()
                del pending[future]
            progress()
    except BrokenProcessPool:
        pass
    except BaseException:
        processes = [process for process in active_children() if process not in others]
        for process in processes:
            process.terminate()  # each saves its last whole cycle
        until = time.monotonic() + GRACE
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
            process.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    codes = [process.exitcode for process in processes]
    return [code for code in codes if code not in (None, 0, -signal.SIGTERM, Terminated.exit_code)] or [1] * bool(
        pending
    )


def enlist(parent: int) -> None:
    """A process of the pool ends when it is told to, without a word, or when its parent is gone."""
    end_with(parent)
    keep_memory()


def run_here(job: Job, out: Path) -> list[Line] | Diverged:
    """In a process of the pool: told to end, it saves first."""
    try:
        with terminable():
            return run_one(job, out)
    except KeyboardInterrupt:
        os._exit(Terminated.exit_code)


def rounds_of(jobs: list[Job], out: Path) -> int:
    return sum(rounds_done(out / job.name) for job in jobs)


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
