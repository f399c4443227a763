"""Balanced and similar clusters: better than their start, better than chance and equal in size."""

from typing import Any

import numpy as np
import pytest

from fedcluster.analysis import heterogeneity
from fedcluster.data.dataset import Dataset
from fedcluster.experiment import Fleet, sections
from fedcluster.fleet import fleet as fleets
from fedcluster.fleet.clustering import anticlustering
from fedcluster.fleet.clustering import clusters as clusterings
from fedcluster.fleet.clustering.clusters import Clusters
from fedcluster.fleet.clustering.request import Request
from fedcluster.rng import stream
from tests.fleet.test_fleet import dataset


def uneven(devices: int, seed: int) -> fleets.Fleet:
    """Devices of 1 to 60 samples, whose label mixes differ."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 60, devices)
    y = np.concatenate([rng.choice(6, n, p=rng.dirichlet(np.full(6, 0.4))) for n in sizes])
    data = Dataset(
        np.zeros((len(y), 2)), y, np.zeros((6, 2)), np.arange(6), device_train=np.repeat(range(devices), sizes)
    )
    return fleets.build(Fleet(partition="natural"), data, 0)[0]


FLEETS: dict[str, Any] = {
    "major class": lambda: fleets.build(Fleet(devices=100, samples=50, rho_device=0.9), dataset(), 0)[0],
    "dirichlet": lambda: fleets.build(Fleet(devices=101, samples=50, partition="dirichlet"), dataset(), 0)[0],
    "uneven": lambda: uneven(90, 0),
    "iid": lambda: fleets.build(Fleet(devices=60, samples=20, partition="iid"), dataset(), 0)[0],
}


@pytest.mark.parametrize("count", [2, 7, 10, 30])
@pytest.mark.parametrize("name", FLEETS)
def test_never_worse_than_the_start_or_the_best_of_100_random_ones(name: str, count: int) -> None:
    fleet = FLEETS[name]()
    n, p = len(fleet), fleet.weights
    u = anticlustering.contributions(fleet, None)

    def H(assignment: Any) -> float:
        return heterogeneity.split(anticlustering.label_shares(fleet), p, Clusters(assignment, count)).cluster

    chance = [H(stream(i, "chance").permutation(np.arange(n) % count)) for i in range(100)]
    alike = anticlustering.balanced(Request(fleet, count, None, stream(0, "clusters")))
    apart = anticlustering.similar(Request(fleet, count, None, stream(0, "clusters")))
    assert H(alike) == pytest.approx(anticlustering.objective(alike, u, p, count), abs=1e-12)  # J is H_cluster
    assert H(alike) <= H(anticlustering.deal(u, count)) * (1 + 1e-9) + 1e-12
    assert H(apart) >= H(anticlustering.cut(u, count)) * (1 - 1e-9) - 1e-12
    assert H(alike) < min(chance)
    assert H(apart) > max(chance)
    for assignment in (alike, apart):
        assert np.ptp(np.bincount(assignment, minlength=count)) <= 1


def test_swaps_lower_a_bad_start_every_time() -> None:
    fleet = uneven(60, 3)
    u, p = anticlustering.contributions(fleet, None), fleet.weights
    for seed in range(10):
        start = stream(seed, "start").permutation(np.arange(60) % 6)
        better = anticlustering.improve(start, u, p, 6, stream(seed, "swaps"), 1)
        assert anticlustering.objective(better, u, p, 6) < 0.2 * anticlustering.objective(start, u, p, 6)
        assert (np.bincount(better) == 10).all()
        worse = anticlustering.improve(start, u, p, 6, stream(seed, "swaps"), -1)
        assert anticlustering.objective(worse, u, p, 6) > 2 * anticlustering.objective(start, u, p, 6)


def test_one_device_a_cluster_and_one_cluster() -> None:
    fleet = uneven(5, 0)
    for method in ("balanced", "similar"):
        for count in (1, 5):
            clusters = clusterings.build(sections.Clusters(method=method, count=count), fleet, 0)
            assert clusters.count == count


def test_pure_devices_are_dealt_out_evenly_or_kept_together() -> None:
    fleet, _ = fleets.build(Fleet(devices=100, samples=10, rho_device=1.0), dataset(), 0)
    balanced = clusterings.build(sections.Clusters(method="balanced", count=10), fleet, 0)
    for members in balanced.members:
        assert sorted(fleet.major_class[members]) == list(range(10))
    similar = clusterings.build(sections.Clusters(method="similar", count=10), fleet, 0)
    kept = [np.bincount(fleet.major_class[members], minlength=10).max() for members in similar.members]
    assert np.mean(kept) > 9


def test_features_decide() -> None:
    """By features that say nothing of labels: pairs of opposite devices are put together."""
    fleet, _ = fleets.build(Fleet(devices=40, samples=10), dataset(), 0)
    features = np.repeat(np.eye(20), 2, axis=0) * np.tile([1, -1], 20)[:, None]
    clusters = clusterings.build(sections.Clusters(method="balanced", count=20), fleet, 0, features)
    assert heterogeneity.split(features, fleet.weights, clusters).cluster == pytest.approx(0, abs=1e-12)
