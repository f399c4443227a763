"""Divergence: a cycle whose result is not finite is undone, and a run that can no longer learn ends. Both messages name
the update that moved furthest."""

import math
from collections.abc import Callable
from itertools import takewhile
from typing import NamedTuple

from fedcluster.errors import Diverged
from fedcluster.models.kernels.vectors import all_finite
from fedcluster.runs.metrics import Line
from fedcluster.state import State
from fedcluster.training.norm_bound import KEY
from fedcluster.training.setup import Setup

Name = Callable[[int], str]
LARGE = 20.0  # a standardised number hardly is


class Moved(NamedTuple):
    """The update of a cycle that moved furthest, as a multiple of the median."""

    times: float
    device: int
    cycle: int


def is_finite(state: State) -> bool:
    """Whether the model and the server's state are finite."""
    return all_finite(state.model) and all(all_finite(tensor) for tensor in state.server.values())


def undone(cycle: int, moved: list[Moved], name: Name) -> str:
    return f"cycle {cycle}: the new model is not finite, so the cycle is undone{blame(moved, name)}"


def blame(moved: list[Moved], name: Name) -> str:
    if not moved:
        return ""
    times, device, cycle = max(moved)
    return f"; the update of device {name(device)} in cycle {cycle} moved furthest, {times:.3g} times the median"


def check(setup: Setup, cycles: list[Line], round: int, scores: dict[str, float], moved: list[Moved]) -> None:
    """End a run that can no longer learn, before anything of this round (counted from 0) is recorded."""
    nothing = stuck(cycles, setup.clusters.count, len(setup.fleet))
    if not nothing and all(math.isfinite(score) for score in scores.values()):
        return
    what = f"every update was refused as not finite or beyond {KEY}" if nothing else "the loss is not finite"
    raise Diverged(
        f"round {round + 1}: {what}, so training has diverged: lower local.lr (now {setup.experiment.local.lr:g})"
        f"{unscaled(setup)}{blame(moved, setup.schedule.name)}"
    )


def unscaled(setup: Setup) -> str:
    """The advice to scale features or targets, where large ones are trained on as they are."""
    if setup.experiment.data.standardise is False:
        return ", or leave out data.standardise = false"
    if (data := setup.dataset) is None:
        return ""
    given = {"features": data.x_train, "targets": data.y_train}
    reach = {what: float(x.abs().max()) for what, x in given.items() if x.is_floating_point()}
    large = [f"{what}, which reach {most:.3g}" for what, most in reach.items() if most > LARGE]
    return f", or standardise the {' and the '.join(large)}" if large else ""


def check_failed_round(setup: Setup, cycles: list[Line], round: int, moved: list[Moved]) -> None:
    """The same for a round in which no cycle succeeded. A device that did not answer excuses it."""
    if not any(line["missing"] for line in cycles[-setup.clusters.count :]):
        check(setup, cycles, round, {}, moved)


def stuck(cycles: list[Line], count: int, devices: int) -> bool:
    """Whether no cycle of the last round or longer (`count` cycles) has changed the model because of what updates were.
    One device that is refused, alone in its round, does not end a run. Neither does a cycle without a secure sum if
    devices were missing."""
    still = list(takewhile(lambda line: not line["changed"], reversed(cycles)))
    reported = {device for line in still for device in line["cohort"] if device not in line["missing"]}
    blameless = [line for line in still if "no_sum" in line and line["missing"]]
    refused = any(("diverged" in line or "undone" in line) and line not in blameless for line in still)
    return len(still) >= count and refused and len(reported) >= min(2, devices)
