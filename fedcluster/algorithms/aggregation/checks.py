"""What is known before training of whether an aggregator fits the algorithm and the cohorts."""

from inspect import signature
from typing import Any

from fedcluster.algorithms.aggregation.robust import Robust
from fedcluster.algorithms.fedavg import FedAvg
from fedcluster.errors import BadExperiment
from fedcluster.experiment import Aggregation
from fedcluster.fleet.schedule import Schedule
from fedcluster.state import State


def check(section: Aggregation, algorithm: FedAvg, start: State, schedule: Schedule) -> None:
    """Refuse an aggregator that cannot work in this experiment."""
    aggregator, name = section.find(), written(section)
    check_methods(aggregator, name)
    for phase in algorithm.phases:
        if not (spec := phase.aggregate_spec(start)):
            continue
        if not isinstance(aggregator, type) or not issubclass(aggregator, Robust):
            continue
        if type(phase).contribution is not FedAvg.contribution:
            raise BadExperiment(
                f"aggregation.name = {name} needs the updates as devices send them, and algorithm.name = "
                f'"{algorithm.name}" weights or scales them by their steps: use "mean", or another algorithm'
            )
        aggregator(spec, section.options)
    if not hasattr(aggregator, "least") or (least := aggregator.least(section.options)) < 2:
        return
    smallest = min(cycle.wanted for cycle in schedule.round(0))
    if smallest < least:
        raise BadExperiment(
            f"aggregation.name = {name}{described(section)} needs {least} updates a cycle, but cohorts have as few as "
            f"{smallest}: raise clusters.participation, take fewer clusters, or use another rule"
        )


def check_methods(aggregator: Any, name: str) -> None:
    """Version 0.1 did not tell an aggregator which device an update is from."""
    try:
        signature(aggregator.accumulate).bind(None, {}, 1.0, 0)
    except (AttributeError, TypeError):
        raise BadExperiment(
            f"aggregation.name = {name} needs a method accumulate(message, weight, device): see examples/"
            "own_aggregator.py"
        ) from None


def written(section: Aggregation) -> str:
    return f'"{section.name}"' if isinstance(section.name, str) else getattr(section.name, "__name__", "an object")


def described(section: Aggregation) -> str:
    """The options that decide how many updates a rule needs."""
    given = {key: value for key, value in section.options if key in ("f", "m", "beta", "bucketing") and value}
    given = {key: value for key, value in given.items() if (key, value) != ("bucketing", 1)}
    return f" with {', '.join(f'{key} = {value}' for key, value in given.items())}" if given else ""
