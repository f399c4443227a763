"""Learning-rate schedules: the rate eta_{j,K} of round j and cycle K, as a factor of `lr`.

    eta_{j,K} = lr  x  f(j - warmup)  x  cycle_decay^K  x  (j + 1) / (warmup + 1) while j < warmup

    constant       f(j) = 1
    step           f(j) = factor^floor(j / every)
    exponential    f(j) = factor^j
    cosine         f(j) = floor + (1 - floor) (1 + cos(pi j / T)) / 2
    inverse_sqrt   f(j) = 1 / sqrt(j + 1)
    theorem        f(j) = 1 / (lr sqrt(T M E)), so that eta is the theorem's rate (TME)^(-1/2) whatever `lr` is

j counts rounds from 0, K the cycles of a round; f(j) = 1 during the warm-up; T is the number of rounds after it. With
cycle_decay < 1 later cycles of a round take smaller steps, because the last cluster influences the model most.
A schedule of your own is a function (round, cycle) -> factor.
"""

import math
from collections.abc import Callable
from numbers import Real
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field

from fedcluster.errors import BadExperiment
from fedcluster.experiment import Experiment, LearningRateSchedule, Local, Section
from fedcluster.fleet.schedule import Cycle
from fedcluster.models.optimizers import FACTOR
from fedcluster.state import Tensors

Factor = Annotated[float, Field(gt=0, le=1)]
LARGEST = 1e30  # what a rate may be
SMALLEST = torch.finfo(torch.float32).tiny  # what a local rate may be besides 0, which smaller ones become


class Constant:
    """f(j) = 1. The other schedules say what f is."""

    horizon: ClassVar[bool] = False  # whether f depends on T

    class Options(Section):
        warmup: Annotated[int, Field(ge=0, le=10**9)] = 0
        cycle_decay: Factor = 1.0

    def __init__(self, options: Any, rounds: int, base: float) -> None:
        """`rounds` is T, `base` the number that f(0) of "theorem" is."""
        self.options, self.rounds, self.base = options, rounds, base

    def __call__(self, round: int, cycle: int) -> float:
        warmup = self.options.warmup
        shape = self.shape(round - warmup) if round >= warmup else (round + 1) / (warmup + 1) * self.shape(0)
        return float(shape * self.options.cycle_decay**cycle)

    def shape(self, j: int) -> float:
        return 1.0


class Step(Constant):
    """f(j) = factor^floor(j / every)"""

    class Options(Constant.Options):
        every: Annotated[int, Field(ge=1, le=10**9)]
        factor: Factor = 0.1

    def shape(self, j: int) -> float:
        return float(self.options.factor ** (j // self.options.every))


class Exponential(Constant):
    """f(j) = factor^j"""

    class Options(Constant.Options):
        factor: Factor

    def shape(self, j: int) -> float:
        return float(self.options.factor**j)


class Cosine(Constant):
    """f(j) = floor + (1 - floor) (1 + cos(pi j / T)) / 2"""

    horizon = True

    class Options(Constant.Options):
        floor: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def shape(self, j: int) -> float:
        low, T = self.options.floor, max(1, self.rounds - self.options.warmup)
        return float(low + (1 - low) * (1 + math.cos(math.pi * j / T)) / 2)


class InverseSqrt(Constant):
    """f(j) = 1 / sqrt(j + 1)"""

    def shape(self, j: int) -> float:
        return 1 / math.sqrt(j + 1)


class Theorem(Constant):
    """f(j) = 1 / (lr sqrt(T M E))"""

    horizon = True

    def shape(self, j: int) -> float:
        return self.base


SCHEDULES: dict[str, type[Constant]] = {
    "constant": Constant,
    "step": Step,
    "exponential": Exponential,
    "cosine": Cosine,
    "inverse_sqrt": InverseSqrt,
    "theorem": Theorem,
}


class Rates:
    """The local and the server's learning rate in every cycle of a run. `cycles` is M."""

    def __init__(self, experiment: Experiment, cycles: int) -> None:
        self.experiment = experiment
        local, server = experiment.local, experiment.server
        self.factors = {
            "local": find(local.schedule, experiment.rounds, cycles, local),
            "server": find(server.schedule, experiment.rounds, cycles, None),
        }

    def local(self, cycle: Cycle) -> Tensors:
        """What multiplies `local.lr` in the cycle's local steps, as it is sent; nothing where it is 1 throughout the
        run."""
        if not rate_varies(self.experiment):
            return {}
        factor = self.factors["local"](cycle.round, cycle.cycle) * cycle.scale
        rate = self.check("local", self.experiment.local.lr, factor, cycle.round)
        return {FACTOR: torch.tensor([factor if min(rate, factor) >= SMALLEST else 0.0], dtype=torch.float32)}

    def server(self, round: int, cycle: int) -> float:
        return self.check("server", self.experiment.server.lr, self.factors["server"](round, cycle), round)

    def check(self, section: str, lr: float, factor: float, round: int) -> float:
        """The rate of the cycle."""
        rate = lr * factor
        if not (0 <= rate <= LARGEST and factor <= LARGEST):
            raise BadExperiment(
                f"{section}.schedule gives the rate {rate:g} in round {round + 1}: it must be from 0 to {LARGEST:g}"
            )
        return rate


def rate_varies(experiment: Experiment) -> bool:
    """Whether the rate of local steps is another than `local.lr` in some cycle."""
    return experiment.local.schedule is not None or experiment.clusters.weighting == "sample"


def find(
    schedule: LearningRateSchedule | None, rounds: int, cycles: int, local: Local | None
) -> Callable[[int, int], float]:
    """The factor in a round and cycle. `local` is the section of the schedule, None for the server's."""
    if schedule is None:
        return lambda round, cycle: 1.0
    found: Any = schedule.find()
    if not (isinstance(found, type) and issubclass(found, Constant)):
        return lambda round, cycle: own_factor(found, round, cycle)
    base = 1.0
    if found is Theorem:
        if local is None:
            raise BadExperiment('server.schedule.name = "theorem" is a rate of local steps: use it in [local.schedule]')
        if local.steps is None:
            raise BadExperiment('local.schedule.name = "theorem" needs local.steps: E is in the rate (TME)^(-1/2)')
        base = 1 / (local.lr * math.sqrt(rounds * cycles * sum(local.step_range) / 2))
    rates: Constant = found(schedule.options, rounds, base)
    return rates


def own_factor(schedule: Callable[[int, int], Any], round: int, cycle: int) -> float:
    """What a schedule of one's own gives, which may do anything."""
    name = getattr(schedule, "__name__", type(schedule).__name__)
    try:
        factor = schedule(round, cycle)
    except Exception as error:
        raise BadExperiment(
            f"schedule.name: {name}({round}, {cycle}) fails ({type(error).__name__}: {error}): it must be a function "
            "(round, cycle) -> factor, both counted from 0"
        ) from error
    if not isinstance(factor, Real):
        raise BadExperiment(
            f"schedule.name: {name}({round}, {cycle}) must give a number, the factor of the learning rate, but gave "
            f"{factor!r:.40}"
        )
    return float(factor)


def depends_on_rounds(experiment: Experiment) -> list[str]:
    """The keys of schedules whose rates depend on the number of rounds."""
    sections = {"local.schedule": experiment.local.schedule, "server.schedule": experiment.server.schedule}
    return [key for key, given in sections.items() if given is not None and getattr(given.find(), "horizon", False)]
