"""The best learning rate of everything that is compared: fair only if a worse rate lies on either side of it."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, TypeVar

from fedcluster.analysis.jobs import Job, run_all
from fedcluster.errors import Diverged
from fedcluster.runs.metrics import Line
from fedcluster.runs.progress import Progress

TUNING_SEEDS = (1_000_003, 1_000_004)  # never those of a comparison
LOWEST = -12  # steps down to a millionth of the rate that was begun with, if all others diverge


Key = TypeVar("Key")


class Best(NamedTuple):
    lr: float
    loss: float


def best_rates(
    around: Mapping[Key, float],
    job: Callable[[Key, float, int], Job],
    out: Path,
    workers: int,
    progress: Progress,
    stage: str = "tuning",
) -> dict[Key, Best]:
    """Each key's rate of the lowest last training loss, on average over the tuning seeds.

    Rates are 0.3, 1 and 3 times the one to look around; where the best is at an end, the next beyond (10, 30, ... or
    0.1, 0.03, ...) until it is not. `job` is the run of a key at a rate on a seed.
    """
    losses: dict[Key, dict[int, float]] = {key: {} for key in around}
    turn = 0
    while wanted := [(key, step) for key, tried in losses.items() for step in missing(tried)]:
        turn += 1
        jobs = {(key, step): [job(key, rate(around[key], step), seed) for seed in TUNING_SEEDS] for key, step in wanted}
        histories = run_all(
            [one for runs in jobs.values() for one in runs],
            out,
            workers,
            lambda done, total, turn=turn: progress(f"{stage}, pass {turn}", done, total),  # type: ignore[misc]
        )
        for (key, step), runs in jobs.items():
            losses[key][step] = fmean(last_loss(histories[one.name]) for one in runs)
    found = {}
    for key, tried in losses.items():
        step = best(tried)
        found[key] = Best(rate(around[key], step), tried[step])
        if not math.isfinite(tried[step]):
            lowest = job(key, found[key].lr, TUNING_SEEDS[0]).name
            raise Diverged(f"{lowest} diverges, and so does every higher rate: look at the data, or lower local.lr")
    return found


def rate(around: float, step: int) -> float:
    """Two steps are a factor of ten: 1, 3, 10, 30, ..."""
    return float(f"{around * float(f'{10 ** (step / 2):.0e}'):.6g}")


def best(tried: dict[int, float]) -> int:
    """Of equals the lower rate."""
    return min(tried, key=lambda step: (tried[step], step))


def missing(tried: dict[int, float]) -> list[int]:
    """What to try next: neighbours of the best; lower rates as long as all diverge."""
    if not tried:
        return [-1, 0, 1]
    if not math.isfinite(min(tried.values())):
        return [min(tried) - 1] if min(tried) > LOWEST else []
    return [step for step in (best(tried) - 1, best(tried) + 1) if step not in tried]


def last_loss(lines: list[Line] | Diverged) -> float:
    """Infinite for a run that diverged, or that ends worse than it began."""
    if isinstance(lines, Diverged) or lines[-1]["train_loss"] > lines[0]["train_loss"]:
        return math.inf
    return float(lines[-1]["train_loss"])
