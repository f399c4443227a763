"""Many runs in parallel processes, each in its own folder and resumed where it stopped."""

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

MAX_RESTARTS = 3  # in a row, without a run that finishes in between
GRACE = 20.0  # seconds for a run to save its last cycle


@dataclass(frozen=True)
class Job:
    """One of many runs. Its name is that of its folder."""

    name: str
    experiment: Experiment


def run_all(
    jobs: list[Job], out: Path, workers: int, progress: Callable[[int, int], None]
) -> dict[str, list[Line] | Diverged]:
    """The curve of every job from its start (round 0), or how it diverged. Jobs of the same name are run once, and runs
    that are finished in `out` are not repeated."""
    jobs = list({job.name: job for job in jobs}.values())
    total = sum(job.experiment.rounds for job in jobs)
    results: dict[str, list[Line] | Diverged] = {}
    if workers < 2:
        for job in jobs:
            before = sum(other.experiment.rounds for other in jobs[: len(results)])
            results[job.name] = run_one(job, out, RoundCounter(lambda n, before=before: progress(before + n, total)))  # type: ignore[misc]
        return results
    lost = 0
    while left := [job for job in jobs if job.name not in results]:
        before = len(results)
        codes = run_in_processes(left, out, workers, results, lambda: progress(all_rounds_done(jobs, out), total))
        if UNGUARDED in codes:
            raise BadExperiment(GUARD)
        lost = 0 if len(results) > before else lost + 1
        if lost > MAX_RESTARTS:
            raise LostRank(
                f"the training processes were lost {lost} times in a row (exit code {codes[0]}), perhaps because "
                f"memory ran out: use fewer workers, and continue with --resume; progress is saved in {out}"
            )
        if codes:
            say(f"a training process was lost (exit code {codes[0]}); another one continues its run")
    return results


def run_in_processes(
    jobs: list[Job], out: Path, workers: int, results: dict[str, list[Line] | Diverged], progress: Callable[[], None]
) -> list[int]:
    """Run all jobs, or until a process is lost: then return the exit codes of those that failed."""
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=init_worker, initargs=(os.getpid(),))
    pending: dict[Future[list[Line] | Diverged], str] = {}
    processes: list[BaseProcess] = []
    others = active_children()
    try:
        with defer_interrupts():
            pending = {pool.submit(run_in_worker, job, out): job.name for job in jobs}
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
        deadline = time.monotonic() + GRACE
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    codes = [process.exitcode for process in processes]
    return [code for code in codes if code not in (None, 0, -signal.SIGTERM, Terminated.exit_code)] or [1] * bool(
        pending
    )


def init_worker(parent: int) -> None:
    """A worker ends silently when it is terminated, or when its parent is gone."""
    end_with(parent)
    keep_memory()


def run_in_worker(job: Job, out: Path) -> list[Line] | Diverged:
    """Run a job in a worker, which saves its last cycle when it is terminated."""
    try:
        with terminable():
            return run_one(job, out)
    except KeyboardInterrupt:
        os._exit(Terminated.exit_code)


def all_rounds_done(jobs: list[Job], out: Path) -> int:
    return sum(rounds_done(out / job.name) for job in jobs)


def rounds_done(folder: Path) -> int:
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def run_one(job: Job, out: Path, display: Display | None = None) -> list[Line] | Diverged:
    """Run a job in this process, or resume it."""
    folder = out / job.name
    try:
        history = run(job.experiment, folder, resume=True, display=display or Display()).history
    except Diverged as error:
        return error
    finally:
        gc.collect()  # a finished run is a reference cycle, with a data set of perhaps hundreds of megabytes
    start = json.loads((folder / "run.json").read_bytes())["start"]
    return [{"round": 0, **start}, *history]


class RoundCounter(Display):
    """Reports how many rounds a run in this process has done."""

    def __init__(self, report: Callable[[int], None]) -> None:
        self.report = report

    def round(self, line: Line) -> None:
        self.report(line["round"])
