"""The table of aggregators, which reduce the accepted updates of a cycle to one message.

An aggregator is created for every phase of every cycle as `Aggregator(spec, options, rng)`, with the names and shapes
of the messages, its section of the experiment and a random stream of its own. Its methods are called in this order:

    start(cohort)                        optional: whose updates may come, and what is known before they do
    accumulate(message, weight, device)  for every accepted update; weights add up to the accepted share of the cohort
    reduce(all_reduce)                   under torchrun: merge what ranks have; `all_reduce` sums a tensor in place
    finish()                             the aggregate, or None when no rank has an update

An aggregator without `reduce` is refused under torchrun. One that needs several updates has a class method
`least(options)`, their number: experiments whose cohorts are smaller are refused before training. `finish` raises
`TooFewUpdates` where fewer came, which fails the cycle.
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from fedcluster.algorithms.aggregation.coordinates import Median, TrimmedMean
from fedcluster.algorithms.aggregation.geometric_median import GeometricMedian
from fedcluster.algorithms.aggregation.krum import Krum, MultiKrum
from fedcluster.algorithms.aggregation.mean import Mean
from fedcluster.algorithms.aggregation.norm_clip import NormClip
from fedcluster.state import Aggregate, Tensors


class Aggregator(Protocol):
    def accumulate(self, message: Tensors, weight: float, device: int) -> None: ...
    def reduce(self, all_reduce: Callable[[Tensor], None]) -> None: ...
    def finish(self) -> Aggregate | None: ...


AGGREGATORS: dict[str, Any] = {
    "mean": Mean,
    "median": Median,
    "trimmed_mean": TrimmedMean,
    "krum": Krum,
    "multi_krum": MultiKrum,
    "geometric_median": GeometricMedian,
    "norm_clip": NormClip,
}
