"""What a clustering is given, and what it declares."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from numpy.random import Generator

from fedcluster.experiment import Section
from fedcluster.fleet.fleet import Fleet, Floats, Ints

Need = Literal["labels", "gradients", "timezone", "availability"]
"""What a clustering may need to know of every device: its label counts, a sketch of its gradient at W_0, its offset
from UTC, or when it is available."""


@dataclass(frozen=True, eq=False)
class Request:
    """A clustering of `fleet` into `count` clusters; None: the clustering says how many. `options` are the clustering's
    own. `sketches` of the devices' gradients, one row each, are given to a clustering that needs them."""

    fleet: Fleet
    count: int | None
    options: Any
    rng: Generator
    sketches: Floats | None = None

    @property
    def clusters(self) -> int:
        """The number of clusters, for a clustering that has a default count."""
        assert self.count is not None, "the experiment fills it in"
        return self.count


@dataclass(frozen=True)
class Method:
    """A clustering that an experiment can name.

    `function` gives the cluster of every device, numbered from 0, or -1 for a device in no cluster. With two columns a
    device is in two clusters, one of which is drawn each round. `needs` says, by the clustering's own options, what it
    needs to know of every device. `default_count` is `clusters.count` where that is left out. With `at_most`, there may
    be fewer clusters. With `every_round`, clusters are drawn anew in every round. With `slow`, a large fleet takes a
    while.
    """

    function: Callable[[Request], Ints]
    Options: type[Section] = Section
    needs: Callable[[Any], Need | None] = lambda options: None
    default_count: int | None = 10
    at_most: bool = False
    every_round: bool = False
    slow: bool = False
