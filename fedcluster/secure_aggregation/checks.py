"""What secure aggregation cannot do is refused before training."""

from fedcluster.algorithms.aggregation.mean import Mean
from fedcluster.algorithms.fedavg import FedAvg
from fedcluster.algorithms.transforms import Transforms, UpdateTransform
from fedcluster.errors import BadExperiment
from fedcluster.experiment import Experiment
from fedcluster.fleet.clustering import registry as clusterings
from fedcluster.fleet.schedule import Schedule

KEY = "privacy.secure_aggregation"


def is_secure(experiment: Experiment) -> bool:
    return experiment.privacy is not None and experiment.privacy.secure_aggregation


def check(experiment: Experiment, algorithm: FedAvg, transforms: Transforms, schedule: Schedule) -> None:
    """Refuse whatever needs single updates at the server, and cohorts that are too small to hide one."""
    if is_secure(experiment):
        check_sections(experiment)
        check_parts(experiment, algorithm, transforms)
        check_cohorts(experiment, schedule)


def check_sections(experiment: Experiment) -> None:
    """What the experiment alone tells."""
    if not is_secure(experiment):
        return
    if experiment.method == "centralized":
        raise BadExperiment(f'{KEY} hides the updates of devices, and method = "centralized" has none: remove it')
    keys = experiment.to_dict()
    if experiment.aggregation.find() is not Mean:
        raise BadExperiment(
            f"{KEY} shows the server the sum of the updates only, and aggregation.name = "
            f'"{keys["aggregation"]["name"]}" compares them: use "mean"'
        )
    if (needed := clusterings.needs(experiment.clusters)) in ("gradients", "labels"):
        raise BadExperiment(
            f'{KEY} hides what single devices have, and clusters.method = "{keys["clusters"]["method"]}" needs the '
            f'{needed} of each: use "random", or clusters made of what is known anyway'
        )


def check_parts(experiment: Experiment, algorithm: FedAvg, transforms: Transforms) -> None:
    for phase in algorithm.phases:
        own = type(phase)
        if own.contribution is not FedAvg.contribution or own.aggregate_spec is not FedAvg.aggregate_spec:
            raise BadExperiment(
                f"{KEY} shows the server the sum of the updates only, and algorithm.name = "
                f'"{algorithm.name}" weights or scales each of them there: use another algorithm'
            )
    for transform in transforms.transforms:
        if type(transform).on_server is not UpdateTransform.on_server:
            raise BadExperiment(
                f"{KEY} shows the server the sum of the updates only, and the transform {type(transform).__name__} "
                "changes each of them there (on_server): do it in on_device or on_aggregate"
            )


def check_cohorts(experiment: Experiment, schedule: Schedule) -> None:
    privacy = experiment.privacy
    assert privacy is not None
    smallest = min(cycle.wanted for cycle in schedule.round(0))
    if smallest < privacy.min_cohort:
        why = "a sum of two tells each what the other sent" if smallest < 3 else "too few to hide one"
        raise BadExperiment(
            f"{KEY} needs cohorts of at least {privacy.min_cohort} devices (privacy.min_cohort), and the smallest has "
            f"{smallest} ({why}): raise clusters.participation, or take fewer clusters"
        )
