"""The methods that a comparison can name, at the same budget.

"fedcluster" is the experiment itself, "fedavg" has one cluster of all devices, "centralized" is SGD on the pooled data.
"fedcluster+" is FedCluster with momentum over a round on the server (`server.optimizer = "round_momentum"`).
With "minibatch" a device takes one step in place of E, on a batch of E x local.batch samples: it uses as many samples
and does not train locally. Woodworth, Patel, Srebro: Minibatch vs Local SGD for Heterogeneous Distributed Learning,
NeurIPS 2020.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedcluster.data import sources
from fedcluster.experiment import Experiment, Local
from fedcluster.fleet import fleet
from fedcluster.fleet.clustering import clusters
from fedcluster.fleet.schedule import Schedule, taking_part
from fedcluster.models import tasks

WITH_CLUSTERS = ("fedcluster", "fedcluster+", "minibatch")


@dataclass(frozen=True)
class Methods:
    """The experiments of the methods. `participation` is, by seed, FedAvg's share of all devices for the same budget:
    clusters may differ in size, and leave out devices, by seed."""

    experiment: Experiment
    clusters: int
    participation: dict[int, float]

    def variant(self, method: str, lr: float, seed: int) -> Experiment:
        """The experiment by another method. FedAvg has one cluster of all devices."""
        keys: dict[str, Any] = {"seed": seed, "local.lr": lr, "method": "fedcluster"}
        if method == "fedavg":
            one_cluster = {"method": "random", "count": 1, "soft": False, "overlap": 0}
            one_cluster["participation"] = self.participation[seed]
            keys |= {f"clusters.{key}": value for key, value in one_cluster.items()}
        if method == "centralized":
            keys |= {"method": "centralized"}
        if method == "fedcluster+":
            keys |= {"server.optimizer": "round_momentum"}
        if method == "minibatch":
            keys |= {"local.steps": 1, "local.batch": samples(self.experiment.local)}
        return self.experiment.override(**keys)

    def paper_rate(self, method: str) -> float:
        """FedAvg's rate is M times FedCluster's, so that it goes as far in a round; a minibatch's is E times."""
        local = self.experiment.local
        if method == "minibatch":
            return local.lr * (local.epochs or sum(local.step_range) / 2)
        return local.lr * (self.clusters if method == "fedavg" else 1)


def samples(local: Local) -> int | str:
    """The samples that a device uses in its cycle; "full" where these are all that it has, perhaps several times."""
    if local.epochs is not None or local.batch == "full":
        return "full"
    return round(sum(local.step_range) / 2 * local.batch)


def describe(experiment: Experiment, seeds: Sequence[int]) -> Methods:
    """Build the fleet and its clusters for every seed to find M (that of the first seed), and the participation that
    gives FedAvg as many updates a round."""
    dataset = sources.open_dataset(experiment.data, target=tasks.target_of(experiment))
    share = experiment.clusters.participation
    counts, participation = [], {}
    for seed in seeds:
        devices, _ = fleet.build(experiment.fleet, dataset, seed)
        groups = clusters.build(experiment.clusters, devices, seed)
        counts.append(groups.count)
        updates = Schedule(experiment.clusters, devices, groups, seed).cohort_size()
        participation[seed] = fedavg_participation(share, updates, len(devices))
    return Methods(experiment, counts[0], participation)


def fedavg_participation(participation: float, updates: int, devices: int) -> float:
    """The share of all devices that gives FedAvg the same number of updates a round. It is `participation` itself,
    unless small clusters have at least one device each in their cohorts, or devices are in no cluster."""
    return participation if taking_part(participation, devices) == updates else updates / devices
