"""The norm bound: an update may not move much further than updates usually do. Sun, Kairouz, Suresh, McMahan: Can You
Really Backdoor Federated Learning?, 2019.

    ||w_k - W|| <= max(norm_bound * m, ||W||)        m: the median movement of the 100 cohorts before

A cohort's movement is the median of its accepted updates, the lower one where there are two. The first cycle has no
cohort before it; there m is ||W|| + c lr E sqrt(n), where the last term is E steps that change each of n weights by
c lr. c is 1 for the losses of classification and text, and 1000 for regression and for a loss of one's own.
Other parts of a message (SCAFFOLD's variates, gradients) have bounds of their own: on their norm, with a median of
their own, and with lengths divided by lr.

||W|| is there for honest devices: near convergence most of them hardly move, and a few that hold hard samples move a
thousand times as far as the median. They stay well below the length of the model, and an update that does cannot
destroy it.

A bound is fixed before the first update of its cycle comes, so that the order in which updates come changes nothing.
"""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from fedcluster.experiment import Local
from fedcluster.fleet.schedule import Cycle, steps_of
from fedcluster.models.kernels.vectors import sum_of_squares
from fedcluster.state import NORM_WINDOW, State, Tensors

GRADIENTS = ("gradient", "variate")  # parts whose scale is known before there is a median
KEY = "accept.norm_bound"


class Norms:
    """The bounds of one phase, and the norms of the updates that kept to them, by device and part."""

    def __init__(
        self, bound: float, state: State, sent: Tensors, upload_spec: Tensors, lr: float, steps: int, c: float = 1.0
    ) -> None:
        """`bound` is infinite where there is none. `lr` and `steps` are those of local training."""
        self.origin = sent.get("model")
        self.before = {name: state.norms.get(name, ()) for name in upload_spec}
        length = math.sqrt(sum_of_squares(state.model)) if upload_spec else 0.0
        first = length + c * lr * steps * math.sqrt(state.model.numel())
        self.limits = {}
        for name, past in self.before.items():
            unit = 1.0 if name == "model" else lr
            known = unit and (past or name == "model" or name in GRADIENTS)
            self.limits[name] = norm_limit(bound, past, length / unit, first / unit) if known else math.inf
        self.kept: dict[int, dict[str, float]] = {}

    def fault(self, device: int, message: Tensors) -> str | None:
        """Why this message, whose names and shapes are right, is refused; if it is not, its norms are noted."""
        norms = measure(message, self.origin, self.limits)
        if isinstance(norms, str):
            return norms
        self.kept[device] = norms
        return None

    def after(self, kept: dict[int, dict[str, float]]) -> dict[str, tuple[float, ...]]:
        """The medians of recent cohorts, given the norms that all ranks have kept of this one."""
        if not kept:
            return self.before
        return {name: remember(past, [norms[name] for norms in kept.values()]) for name, past in self.before.items()}

    def furthest(self, kept: dict[int, dict[str, float]]) -> list[tuple[float, int]]:
        """How many times the median the update that moved furthest moved, and its device, where there is one."""
        times = []
        for name, past in self.before.items():
            usual = lower_median(past or [norms[name] for norms in kept.values()]) if kept else 0.0
            times += [(norms[name] / usual, device) for device, norms in kept.items() if usual]
        return [max(times)] if times else []


def measure(message: Tensors, origin: Tensor | None, limits: Mapping[str, float]) -> dict[str, float] | str:
    """The norms of the parts of a message, that of the model from `origin`; a sentence where one is above its limit."""
    norms = {}
    for name, tensor in message.items():
        total = sum_of_squares(tensor, origin if name == "model" else None)
        if not math.isfinite(total):
            return f"{name}: not finite"
        norms[name] = math.sqrt(total)
        if norms[name] > limits[name]:
            return f"{name}: {too_far(norms[name], limits[name], KEY)}"
    return norms


def usual_steps(local: Local, cycle: Cycle) -> int:
    """E for the first bound: the upper end of a range; with epochs that of the lower median device, as devices of a
    federation may claim any number of samples."""
    if local.epochs is None:
        return local.step_range[1]
    samples = int(lower_median(cycle.samples.tolist())) if len(cycle.samples) else 1
    return steps_of(local, 0, cycle.round, 0, samples)


def norm_limit(bound: float, before: Sequence[float], length: float, first: float) -> float:
    """The largest norm that is accepted, given the medians of the cohorts before; `first` stands in for their median
    where there is none, or nobody moved. A norm of up to `length` is always accepted."""
    if math.isinf(bound):
        return bound
    usual = lower_median(before) if before else 0.0
    return max(bound * (usual or first), length)


def remember(before: Sequence[float], norms: list[float]) -> tuple[float, ...]:
    return (*before, lower_median(norms))[-NORM_WINDOW:]


def lower_median(numbers: Sequence[float]) -> float:
    return sorted(numbers)[(len(numbers) - 1) // 2]


def too_far(norm: float, limit: float, key: str) -> str:
    return f"moved by {norm:.3g}, more than the {limit:.3g} that {key} allows"
