"""What a partition is asked for, and what it declares."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from fedcluster.data.dataset import Dataset
from fedcluster.data.partition import Ints, Partition
from fedcluster.errors import BadExperiment
from fedcluster.experiment import Section


@dataclass(frozen=True, eq=False)
class Request:
    """A partition of `dataset` over so many `devices`. `sizes[k]` is the number of samples that device k is to hold;
    None: the training set is shared out, every row to one device. `regions[k]` orders the regions of the world from
    west to east, as hours ahead of UTC, where the fleet knows them. `options` are the partition's own."""

    dataset: Dataset
    devices: int
    sizes: Ints | None
    options: Any
    seed: int
    regions: Ints | None = None

    def given_sizes(self, partition: str) -> Ints:
        if self.sizes is None:
            raise BadExperiment(
                f'fleet.samples = "all" is not possible with fleet.partition = "{partition}": give a number'
            )
        return self.sizes

    def refuse_sizes(self, partition: str) -> None:
        if self.sizes is not None:
            raise BadExperiment(
                f'fleet.partition = "{partition}" divides the whole training set: leave out fleet.samples'
            )


@dataclass(frozen=True)
class Method:
    """A partition that an experiment can name: its function, its own options, and `fleet.samples` where that is left
    out; None: the data say it."""

    function: Callable[[Request], Partition]
    Options: type[Section] = Section
    samples: int | Literal["all"] | None = 500
