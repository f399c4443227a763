"""Centralized training: the data of the whole fleet in one place, for the samples that the fleet's cohorts use."""

import numpy as np

from fedcluster.data.dataset import Dataset
from fedcluster.data.partition import Partition, one_device
from fedcluster.experiment import Experiment, Local
from fedcluster.fleet.clustering.clusters import Clusters
from fedcluster.fleet.fleet import Fleet
from fedcluster.fleet.schedule import Schedule, mean_steps
from fedcluster.inputs import check_size
from fedcluster.reporting import Say


def pooled_budget(experiment: Experiment, fleet: Fleet, schedule: Schedule, say: Say) -> Local:
    """Centralized SGD spends in a round the samples that the fleet's cohorts spend: the paper's 1000 x 60. A sentence
    says so where whole steps cannot."""
    options, local = experiment.centralized, experiment.local
    spent = samples_a_round(schedule, fleet, local)
    one_step = int(fleet.sizes.sum()) if options.batch == "full" else options.batch
    steps = options.steps or max(1, round(spent / one_step))
    if options.steps is None and steps * one_step != spent:
        average = "" if isinstance(local.steps, int) and local.batch != "full" else " on average"
        say(
            f"centralized training takes {steps:,} step{'s' * (steps > 1)} of {one_step:,} samples a round, "
            f"{steps * one_step:,} in all; the fleet's cohorts use {spent:,.0f}{average}"
        )
    return local.model_copy(update={"steps": steps, "epochs": None, "batch": options.batch})


def samples_a_round(schedule: Schedule, fleet: Fleet, local: Local) -> float:
    """Samples that the cohorts of a round use in their local steps, on average over the draws of cohorts and steps."""
    if local.epochs is None and local.batch != "full":
        return schedule.cohort_size() * mean_steps(local, fleet.sizes) * local.batch
    members = schedule.clusters.members_in(0, schedule.seed)
    sizes = [cycle.wanted * fleet.sizes[members[cycle.cluster]].mean() for cycle in schedule.round(0)]
    return float(sum(sizes)) * (local.epochs or mean_steps(local, fleet.sizes))


def pool(experiment: Experiment, dataset: Dataset, partition: Partition) -> tuple[Partition, Schedule]:
    """One device that holds all data, alone in its cluster: centralized training is the same code with M = n = 1."""
    total = int(partition.sizes.sum())
    check_size("the fleet's pooled data, as a list of rows,", 8 * total)
    whole = one_device(partition.pooled(total, experiment.seed), dataset)
    options = experiment.clusters.model_copy(update={"overlap": 0})
    return whole, Schedule(options, Fleet(whole.sizes), Clusters(np.zeros(1, np.int32), 1), experiment.seed)
