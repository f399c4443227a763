"""The search for the best learning rate, which ends only when a worse rate lies on either side of it."""

import math
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, TypeVar

from fedcluster.analysis.jobs import Job, run_all
from fedcluster.errors import Diverged
from fedcluster.runs.metrics import Line
from fedcluster.runs.progress import Progress

TUNING_SEEDS = (1_000_003, 1_000_004)  # not used for results
LOWEST = -12  # half-decade steps below the first rate, tried only while all rates diverge

Key = TypeVar("Key")


class Best(NamedTuple):
    """A learning rate and its mean last training loss."""

    lr: float
    loss: float


def best_rates(
    first_rates: Mapping[Key, float],
    job: Callable[[Key, float, int], Job],
    out: Path,
    workers: int,
    progress: Progress,
    stage: str = "tuning",
) -> dict[Key, Best]:
    """The rate of each key with the lowest last training loss, on average over the tuning seeds.

    The search tries 0.3, 1 and 3 times the first rate; while the best is at an end, it tries the next one beyond (10,
    30, ... or 0.1, 0.03, ...). `job` gives the run of a key at a rate on a seed.
    """
    losses: dict[Key, dict[int, float]] = {key: {} for key in first_rates}
    for number in count(1):
        wanted = [(key, step) for key, tried in losses.items() for step in next_steps(tried)]
        if not wanted:
            break
        jobs = {
            (key, step): [job(key, rate(first_rates[key], step), seed) for seed in TUNING_SEEDS] for key, step in wanted
        }
        histories = run_all(
            [one for runs in jobs.values() for one in runs],
            out,
            workers,
            lambda done, total, number=number: progress(f"{stage}, pass {number}", done, total),  # type: ignore[misc]
        )
        for (key, step), runs in jobs.items():
            losses[key][step] = fmean(last_loss(histories[one.name]) for one in runs)
    rates = {}
    for key, tried in losses.items():
        step = best_step(tried)
        rates[key] = Best(rate(first_rates[key], step), tried[step])
        if not math.isfinite(tried[step]):
            lowest = job(key, rates[key].lr, TUNING_SEEDS[0]).name
            raise Diverged(f"{lowest} diverges, and so does every higher rate: check the data, or lower local.lr")
    return rates


def rate(first: float, step: int) -> float:
    """The rate so many half decades from the first: times 1, 3, 10, 30, ..."""
    return float(f"{first * float(f'{10 ** (step / 2):.0e}'):.6g}")


def best_step(tried: dict[int, float]) -> int:
    """The step of the lowest loss; of equal losses the lower rate."""
    return min(tried, key=lambda step: (tried[step], step))


def next_steps(tried: dict[int, float]) -> list[int]:
    """The steps to try next: neighbours of the best one, or a lower one while all diverge. Empty at the end."""
    if not tried:
        return [-1, 0, 1]
    if not math.isfinite(min(tried.values())):
        return [min(tried) - 1] if min(tried) > LOWEST else []
    return [step for step in (best_step(tried) - 1, best_step(tried) + 1) if step not in tried]


def last_loss(lines: list[Line] | Diverged) -> float:
    """The last training loss; infinite for a run that diverged or that ends worse than it began."""
    if isinstance(lines, Diverged) or lines[-1]["train_loss"] > lines[0]["train_loss"]:
        return math.inf
    return float(lines[-1]["train_loss"])
