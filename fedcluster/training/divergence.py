"""Divergence: a cycle whose result is not finite is undone, and a run that can no longer learn is ended. Both messages
name the update that moved furthest."""

import math
from itertools import takewhile
from typing import NamedTuple

from fedcluster.errors import Diverged
from fedcluster.runs import checkpoint
from fedcluster.runs.metrics import Line, Recorder
from fedcluster.state import State
from fedcluster.training.acceptance import finite
from fedcluster.training.norm_bound import KEY
from fedcluster.training.setup import Setup


class Moved(NamedTuple):
    """The update of a cycle that moved furthest, as a multiple of the median."""

    times: float
    device: int
    cycle: int


def whole(state: State) -> bool:
    """Whether the next cycle can begin from here."""
    return finite(state.model) and all(finite(tensor) for tensor in state.server.values())


def undone(recorder: Recorder, cycle: int, moved: list[Moved]) -> str:
    return f"cycle {cycle}: the new model is not finite, so the cycle is undone{blame(recorder, moved)}"


def blame(recorder: Recorder, moved: list[Moved]) -> str:
    if not moved:
        return ""
    times, device, cycle = max(moved)
    return (
        f"; the update of device {recorder.name(device)} in cycle {cycle} moved furthest, {times:.3g} times the median"
    )


def check(setup: Setup, recorder: Recorder, j: int, scores: dict[str, float], moved: list[Moved]) -> None:
    """Stop a run that can no longer learn, before anything of this round is written. What was stored of the round is
    forgotten, so that a resumed run begins it anew."""
    nothing = stuck(recorder.cycles.lines, setup.clusters.count, len(setup.fleet))
    if not nothing and all(math.isfinite(score) for score in scores.values()):
        return
    if recorder.folder:
        checkpoint.roll_back(recorder.folder / "checkpoint", j)
    what = f"every update was refused as not finite or beyond {KEY}" if nothing else "the loss is not finite"
    kept = f"; rounds 1 to {j} are in {recorder.folder}" if recorder.folder and j else ""
    rate = setup.experiment.local.lr
    raise Diverged(
        f"round {j + 1}: {what}, so training has diverged: lower local.lr (now {rate:g}){blame(recorder, moved)}{kept}"
    )


def stuck(turns: list[Line], cycles: int, devices: int) -> bool:
    """Whether nothing has changed the model for a round or longer because of what updates were. One device that is
    refused, alone in its round, does not end a run."""
    still = list(takewhile(lambda turn: not turn["changed"], reversed(turns)))
    came = {device for turn in still for device in turn["cohort"] if device not in turn["missing"]}
    astray = any("diverged" in turn or "undone" in turn for turn in still)
    return len(still) >= cycles and astray and len(came) >= min(2, devices)
