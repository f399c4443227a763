"""What the studies have in common: many runs, of which one wants to know how far they are."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedcluster.errors import Diverged
from fedcluster.jobs import Job, run_all
from fedcluster.record import Line


def run(
    jobs: dict[Any, Job], runs: Path, stage: str, workers: int, meanwhile: Callable[[], None] = lambda: None
) -> dict[Any, list[Line] | Diverged]:
    """Every job's lines, saying how far it is twice a minute. What `meanwhile` raises, stops them."""
    began, shown = time.monotonic(), -60.0

    def tell(done: int, total: int) -> None:
        nonlocal shown
        meanwhile()
        if (now := time.monotonic() - began) - shown >= 30:
            shown = now
            print(f"{stage}: {done} of {total} rounds, {now / 60:.0f} min", flush=True)

    histories = run_all(list(jobs.values()), runs, workers, tell)
    return {key: histories[job.name] for key, job in jobs.items()}
