"""The table of aggregators, which reduce the accepted updates of a cycle to one message.

An aggregator is created for every phase of every cycle as `Aggregator(spec, options, rng)`, with the names and shapes
of the messages, its section of the experiment and a random stream of its own. Its methods are called in this order:

    accumulate(message, weight)     for every accepted update; weights add up to the accepted share of the cohort
    reduce(all_reduce)              under torchrun: merge the parts of the ranks; `all_reduce` sums a tensor in place
    finish()                        the aggregate, or None when no rank has an update

An aggregator without `reduce` is refused under torchrun.
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from fedcluster.algorithms.aggregation.mean import Mean
from fedcluster.state import Aggregate, Tensors


class Aggregator(Protocol):
    def accumulate(self, message: Tensors, weight: float) -> None: ...
    def reduce(self, all_reduce: Callable[[Tensor], None]) -> None: ...
    def finish(self) -> Aggregate | None: ...


AGGREGATORS: dict[str, Any] = {"mean": Mean}
