"""The state of a run: everything that the next cycle depends on, besides the experiment itself."""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

Tensors = dict[str, Tensor]
"""Flat vectors by name: what travels between server and device, and what either keeps."""


NORM_WINDOW = 100
"""Cohorts whose median norms a state keeps."""


@dataclass(frozen=True, eq=False)
class Update:
    """What one device uploads, and what it claims about itself. Nothing in it is trusted yet. `fault` says why an
    upload that came over a network could not be read."""

    device: int
    round: int
    cycle: int
    message: Tensors
    fault: str | None = None


@dataclass(frozen=True)
class Remote:
    """Stands for the update of a device that another rank trains, and accepts or refuses."""

    device: int


@dataclass(frozen=True)
class Unsent:
    """Stands for the update of a device to which the broadcast could not be sent."""

    device: int


Reply = Update | Remote | Unsent
"""What an executor yields for each device of a cohort that does not fail silently."""


@dataclass(frozen=True, eq=False)
class Accepted:
    """An update that passed `accept`, with the device's share of the cohort's weight as the server knows it."""

    device: int
    weight: float
    message: Tensors


class Refusal(NamedTuple):
    """An update that `accept` refused: its position among the uploads of the cycle, its device, why, and whether this
    was for its values (not finite, or too far from the model) rather than its form or origin."""

    position: int
    device: int
    reason: str
    diverged: bool


@dataclass(frozen=True, eq=False)
class Aggregate:
    """The result of an aggregator: one message, the sum of the weights of the updates, the devices whose updates it
    discarded or changed, with a few words on how, and what it changes of the server's state."""

    message: Tensors
    weight: float
    discarded: tuple[tuple[int, str], ...] = ()
    kept: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Time:
    """Simulated time since the start in milliseconds, how much of it no device worked, and the numbers of devices
    lost, devices late, and cycles that failed. All 0 in a run without a clock. `past` has the times at which
    W_{t - 1}, W_{t - 2}, ... were there, where cycles overlap."""

    now: int = 0
    idle: int = 0
    dropped: int = 0
    late: int = 0
    failed: int = 0
    past: tuple[int, ...] = ()

    def available(self, staleness: int) -> int:
        """When W_{t - staleness} was there."""
        return (self.now, *self.past)[staleness]


@dataclass(frozen=True, eq=False)
class State:
    """The global model W_{jM+K}, what the server and the devices keep, and the position: round j and cycle K come
    next, at this simulated time. Only devices that have taken part and have something to keep are in `devices`, which
    grows in place. The first `size` numbers of the model are trained (None: all), the rest are running statistics.
    `norms` has the median norms of the updates of recent cohorts, by part of the message (`training/norm_bound.py`).
    `cycles` is M."""

    model: Tensor
    server: Tensors = field(default_factory=dict)
    devices: dict[int, Tensors] = field(default_factory=dict)
    round: int = 0
    cycle: int = 0
    time: Time = Time()
    size: int | None = None
    norms: dict[str, tuple[float, ...]] = field(default_factory=dict)
    cycles: int = 1

    @property
    def t(self) -> int:
        """The number of cycles before the next one: j M + K."""
        return self.round * self.cycles + self.cycle

    @property
    def w(self) -> Tensor:
        """The trained part of the model."""
        return self.model[: self.size]
