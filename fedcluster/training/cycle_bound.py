"""The bound on a whole cycle's movement. A captured cohort owns the model for its cycle, whatever the aggregation rule,
and the next clusters start from what it has left.

    W_new <- W + min(1, cycle_bound m / ||W_new - W||) (W_new - W)      m: the median movement of the 100 cycles before

The movement is that of the aggregate, before the server's optimizer, so that what the optimizer keeps is bounded, too.
Later medians count the movement after the bound. The first cycle has no bound, and nor has a cycle before which nobody
moved.
"""

import math
from dataclasses import dataclass, replace
from statistics import median_low

from fedcluster.models.kernels.vectors import sum_of_squares
from fedcluster.state import NORM_WINDOW, State

CYCLE = "cycle/model"  # the key of the cycles' movements in `State.norms`


@dataclass(frozen=True)
class Clipped:
    """How far the aggregate of a cycle moved the model, and how far it was allowed to."""

    moved: float
    allowed: float


def bounded(before: State, after: State, bound: float) -> tuple[State, Clipped | None]:
    """The state after a cycle with its model's movement bounded, and what was clipped."""
    moved, past = math.sqrt(sum_of_squares(after.model, before.model)), before.norms[CYCLE]
    if after.model is before.model or not math.isfinite(moved):
        return after, None
    allowed = bound * median_low(past) if past else 0.0
    clipped = Clipped(moved, allowed) if 0 < allowed < moved else None
    if clipped:
        movement = (after.model.double() - before.model).mul_(allowed / moved)
        after = replace(after, model=movement.add_(before.model).to(after.model.dtype))
    kept = (*past, allowed if clipped else moved)[-NORM_WINDOW:]
    return replace(after, norms=after.norms | {CYCLE: kept}), clipped
