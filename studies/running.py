"""Runs many jobs with a progress display, for all studies."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedcluster.analysis.jobs import Job, run_all
from fedcluster.errors import Diverged
from fedcluster.runs.metrics import Line
from fedcluster.runs.progress import stages


def run(
    jobs: dict[Any, Job], runs: Path, stage: str, workers: int, meanwhile: Callable[[], None] = lambda: None
) -> dict[Any, list[Line] | Diverged]:
    """The curve of every job. `meanwhile` is called at every progress report; an exception from it stops the runs."""
    with stages() as progress:

        def tell(done: int, total: int) -> None:
            meanwhile()
            progress(stage, done, total)

        histories = run_all(list(jobs.values()), runs, workers, tell)
    return {key: histories[job.name] for key, job in jobs.items()}
