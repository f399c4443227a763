"""The state of a run: everything that the next cycle depends on, besides the experiment itself."""

from dataclasses import dataclass

from torch import Tensor

Message = dict[str, Tensor]
"""What travels between server and device: flat vectors by name."""


@dataclass(frozen=True, eq=False)
class State:
    """The global model W_{jM+K} and the position: round j and cycle K come next."""

    model: Tensor
    round: int = 0
    cycle: int = 0
