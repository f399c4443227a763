"""What cannot be combined with [privacy], because it would release more of a device than epsilon counts."""

from fedcluster.algorithms import FedAvg
from fedcluster.errors import BadExperiment
from fedcluster.experiment import NORM_BOUND, Experiment
from fedcluster.fleet.clustering import registry as clusterings
from fedcluster.fleet.schedule import Schedule
from fedcluster.privacy.mechanism import LEAKY
from fedcluster.state import State

ORDERS = {  # where they do not fit
    "random": "a device's cluster may have no cycle in a round, or several",
    "balanced": "it follows from what devices uploaded, without noise",
}


def check(experiment: Experiment, schedule: Schedule, algorithm: FedAvg, start: State) -> None:
    """BadExperiment with the first thing that does not fit."""
    section = experiment.differential_privacy
    if section is None:
        return
    for problem in (
        method_problem(experiment),
        order_problem(experiment, schedule),
        clusters_problem(experiment),
        algorithm_problem(experiment, algorithm, start),
        None if section.mechanism == "local" else aggregate_problem(experiment),
        None if section.mechanism == "local" else secure_problem(experiment),
        scores_problem(experiment),
    ):
        if problem:
            raise BadExperiment(problem)


def method_problem(experiment: Experiment) -> str | None:
    if experiment.method == "centralized":
        return 'method = "centralized" has no devices that [privacy] could protect: remove one of them'
    if experiment.clock is not None:
        return (
            "[clock] is not allowed with [privacy]: who reports in time depends on who was asked before, which epsilon "
            "does not count; remove [clock]"
        )
    return None


def order_problem(experiment: Experiment, schedule: Schedule) -> str | None:
    section, order = experiment.privacy, experiment.clusters.order
    assert section is not None, "checked before"
    if order in ORDERS:
        return f'clusters.order = "{order}" is not allowed with [privacy], because {ORDERS[order]}: use "cyclic"'
    moving = clusterings.find(experiment.clusters).every_round or schedule.clusters.second is not None
    if moving and not section.poisson and section.mechanism != "local":
        return 'privacy.sampling = "fixed" needs clusters that stay the same: use "poisson", or another clusters.method'
    if section.mechanism == "banded" and section.bands != 1 and schedule.clusters.count > 1:
        if order == "reshuffle":
            return (
                'privacy.mechanism = "banded" needs the same order in every round, so that a device\'s cycles are M '
                'apart: use clusters.order = "cyclic" or "once", or bands = 1'
            )
        if moving:
            return (
                'privacy.mechanism = "banded" needs clusters that stay the same, so that a device\'s cycles are M '
                "apart: use another clusters.method, or bands = 1"
            )
    return None


def clusters_problem(experiment: Experiment) -> str | None:
    section, needs = experiment.privacy, clusterings.needs(experiment.clusters)
    assert section is not None, "checked before"
    if needs in LEAKY and not section.allow_leaky_clusters:
        return (
            f"clusters.method makes clusters from devices' {needs}, which gives some of that away uncounted: "
            "use other clusters, or accept that with privacy.allow_leaky_clusters = true"
        )
    if experiment.clusters.weighting == "sample":
        return 'clusters.weighting = "sample" gives away how many samples devices have: with [privacy] use "cluster"'
    return None


def algorithm_problem(experiment: Experiment, algorithm: FedAvg, start: State) -> str | None:
    name = experiment.to_dict()["algorithm"]["name"]
    uploads = [sorted(phase.upload_spec(start)) for phase in algorithm.phases]
    if uploads != [["model"]]:
        sent = " and ".join(", ".join(names) for names in uploads if names) or "nothing"
        return (
            f"algorithm = {name} uploads {sent}; with [privacy] an upload has to be one model, whose movement is "
            "clipped: use fedavg, fedprox, fedmax, local_ghbm or fedhbm"
        )
    kind = type(algorithm)
    if kind.contribution is not FedAvg.contribution or kind.aggregate_spec is not FedAvg.aggregate_spec:
        return f"algorithm = {name} weighs or changes uploads before they are averaged: with [privacy] use fedavg"
    if start.size is not None and start.size < start.model.numel():
        return (
            "model.name: the model has running statistics (batch normalisation), which noise would ruin: with "
            "[privacy] use another normalisation, such as GroupNorm"
        )
    return None


def aggregate_problem(experiment: Experiment) -> str | None:
    name = experiment.to_dict()["aggregation"]["name"]
    if name != "mean":
        return f'aggregation = {name}: epsilon is counted for the mean of clipped movements: use "mean" with [privacy]'
    if experiment.accept.norm_bound not in ("off", NORM_BOUND):
        return (
            "accept.norm_bound refuses updates by what other devices uploaded, which epsilon does not count: with "
            '[privacy] remove it, as privacy.clip bounds every update, or set it to "off"'
        )
    return None


def secure_problem(experiment: Experiment) -> str | None:
    assert experiment.privacy is not None, "checked before"
    if experiment.privacy.secure_aggregation:
        return (
            "privacy.secure_aggregation hides the updates that the server has to clip before it adds noise, so that "
            'one device could move the model without bound: use one of the two, or mechanism = "local"'
        )
    return None


def scores_problem(experiment: Experiment) -> str | None:
    chosen = {"stop.metric": experiment.stop.metric if experiment.stop else None, "eval.best": experiment.eval.best}
    for key, score in chosen.items():
        if score is not None and not score.startswith("test_"):
            return (
                f'{key} = "{score}" is computed from what devices hold, which epsilon does not count: use a test score'
            )
    return None
