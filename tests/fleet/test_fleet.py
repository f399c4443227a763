"""Properties of partitions, clusters and schedules that hold for every fleet."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcluster.data.dataset import Dataset
from fedcluster.errors import BadData, BadExperiment
from fedcluster.experiment import Clusters, Fleet
from fedcluster.fleet import fleet as fleets
from fedcluster.fleet.clustering import clusters as clusterings
from fedcluster.fleet.clustering import registry
from fedcluster.fleet.schedule import Schedule, cohort_sizes, taking_part

quickly = settings(max_examples=60, deadline=None)


def dataset(classes: int = 10, rows: int = 400) -> Dataset:
    y = np.arange(rows) % classes
    return Dataset(np.zeros((rows, 2), np.float32), y, np.zeros((classes, 2), np.float32), np.arange(classes))


@quickly
@given(
    devices=st.integers(1, 40),
    samples=st.integers(1, 90),
    rho=st.floats(0, 1),
    seed=st.integers(0, 99),
    C=st.integers(2, 10),
)
def test_major_class_shares_are_exact_to_one_sample(devices: int, samples: int, rho: float, seed: int, C: int) -> None:
    data = dataset(C)
    fleet, partition = fleets.build(Fleet(devices=devices, samples=samples, rho_device=rho), data, seed)
    y = data.y_train.numpy()
    for k in range(devices):
        rows = partition.sample_indices(k)
        mix = np.bincount(y[rows], minlength=C)
        assert (mix == partition.label_counts(k)).all()
        assert mix.sum() == samples == fleet.sizes[k]
        assert abs(mix[fleet.major_class[k]] - rho * samples) <= 0.5 + 1e-9
        others = np.delete(mix, fleet.major_class[k])
        assert others.max() - others.min() <= 1
        for c in range(C):  # without replacement where the class is large enough
            own = rows[y[rows] == c]
            assert len(np.unique(own)) == len(own) or len(own) > (y == c).sum()
    assert np.ptp(np.bincount(fleet.major_class, minlength=C)) <= 1
    assert fleet.weights.sum() == pytest.approx(1)


@quickly
@given(devices=st.integers(1, 30), samples=st.integers(1, 90), alpha=st.floats(0.05, 50), seed=st.integers(0, 99))
def test_dirichlet_devices_have_the_samples_asked_for(devices: int, samples: int, alpha: float, seed: int) -> None:
    data = dataset()
    fleet, partition = fleets.build(
        Fleet(devices=devices, samples=samples, partition="dirichlet", alpha=alpha), data, seed
    )
    for k in range(devices):
        mix = np.bincount(data.y_train.numpy()[partition.sample_indices(k)], minlength=10)
        assert (mix == partition.label_counts(k)).all()
        assert mix.sum() == samples
        assert mix[fleet.major_class[k]] >= mix.max() - 1


def test_natural_devices_hold_their_own_rows() -> None:
    owner = np.array(["b", "a", "b", "c", "a", "b"])
    data = Dataset(np.zeros((6, 2)), [0, 1, 0, 1, 0, 1], np.zeros((1, 2)), [0], device_train=owner)
    fleet, partition = fleets.build(Fleet(partition="natural"), data, 0)
    assert fleet.names is not None
    assert fleet.names.tolist() == ["a", "b", "c"]
    assert [partition.sample_indices(k).tolist() for k in range(3)] == [[1, 4], [0, 2, 5], [3]]
    assert partition.pooled(100, 0).tolist() == [1, 4, 0, 2, 5, 3]


def test_iid_draws_without_replacement() -> None:
    _fleet, partition = fleets.build(Fleet(partition="iid", devices=5, samples=400), dataset(), 0)
    assert sorted(partition.sample_indices(3)) == list(range(400))


def test_pooled_sample_is_uniform_over_all_samples() -> None:
    owner = np.repeat([0, 1], [90, 10])
    data = Dataset(np.zeros((100, 2)), np.zeros(100, int), np.zeros((1, 2)), [0], device_train=owner)
    _fleet, partition = fleets.build(Fleet(partition="natural"), data, 0)
    drawn = np.concatenate([partition.pooled(10, seed) for seed in range(300)])
    assert (drawn >= 90).mean() == pytest.approx(0.1, abs=0.02)


def test_an_empty_class_is_named() -> None:
    data = Dataset(np.zeros((4, 2)), [0, 0, 2, 2], np.zeros((1, 2)), [0])
    with pytest.raises(BadData, match="class 1 of data has no training samples"):
        fleets.build(Fleet(devices=2, samples=2), data, 0)


@quickly
@given(
    devices=st.integers(1, 80),
    count=st.integers(1, 20),
    participation=st.floats(0.01, 1),
    order=st.sampled_from(["cyclic", "reshuffle"]),
    seed=st.integers(0, 99),
    j=st.integers(0, 9),
)
def test_a_round_visits_every_cluster_once(
    devices: int, count: int, participation: float, order: str, seed: int, j: int
) -> None:
    fleet, _ = fleets.build(Fleet(devices=devices, samples=7), dataset(), seed)
    options = Clusters(count=count, participation=participation, order=order)
    if count > devices:
        with pytest.raises(BadExperiment, match=r"clusters\.count"):
            clusterings.build(options, fleet, seed)
        return
    clusters = clusterings.build(options, fleet, seed)
    members = np.concatenate(clusters.members)
    assert sorted(members) == list(range(devices))  # every device in exactly one cluster
    assert np.ptp([len(m) for m in clusters.members]) <= 1
    q = clusters.weights(fleet)
    assert q.sum() == pytest.approx(1)
    for K, mine in enumerate(clusters.members):
        assert (fleet.weights[mine] / q[K]).sum() == pytest.approx(1)
    cycles = Schedule(options, fleet, clusters, seed).round(j)
    assert sorted(cycle.cluster for cycle in cycles) == list(range(count))
    assert order == "reshuffle" or [cycle.cluster for cycle in cycles] == list(range(count))
    active = np.concatenate([cycle.cohort for cycle in cycles])
    assert len(np.unique(active)) == len(active)  # at most once a round
    for cycle in cycles:
        assert len(cycle.cohort) >= 1
        assert set(cycle.cohort) <= set(clusters.members[cycle.cluster])
        assert abs(len(cycle.cohort) - participation * len(clusters.members[cycle.cluster])) <= 1


@quickly
@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=12), participation=st.floats(0.01, 1))
def test_cohorts_add_up_to_the_share_of_all_devices(sizes: list[int], participation: float) -> None:
    cohorts = cohort_sizes(participation, np.array(sizes))
    exact = participation * np.array(sizes)
    assert (cohorts <= sizes).all()
    assert ((cohorts >= 1) == (np.array(sizes) >= 1)).all()
    assert (np.abs(cohorts - exact)[exact >= 1] < 1).all()
    least = np.minimum(sizes, np.maximum(1, np.floor(exact)))
    assert cohorts.sum() == max(taking_part(participation, sum(sizes)), least.sum())


@quickly
@given(each=st.integers(1, 12), count=st.integers(1, 20), rho=st.floats(0, 1), seed=st.integers(0, 99))
def test_major_class_clusters_have_their_share_exactly_or_say_why_not(
    each: int, count: int, rho: float, seed: int
) -> None:
    devices = each * count
    fleet, _ = fleets.build(Fleet(devices=devices, samples=10), dataset(), seed)
    options = Clusters(method="major_class", count=count, rho_cluster=rho)
    wanted = int(np.floor(rho * each + 0.5))
    try:
        clusters = clusterings.build(options, fleet, seed)
    except BadExperiment:
        present = np.bincount(fleet.major_class, minlength=10)
        classes = int(fleet.major_class.max()) + 1
        of_class = np.bincount(np.arange(count) % classes, minlength=10)
        spare = devices - of_class * each
        too_many = of_class * wanted > present
        too_few = present - of_class * wanted > spare
        assert (too_many | too_few).any()
        return
    classes = int(fleet.major_class.max()) + 1
    for K, members in enumerate(clusters.members):
        assert (fleet.major_class[members] == K % classes).sum() == wanted
        assert len(members) == each


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n0,0\n", "must name the columns device,cluster"),
        ("device,cluster\n0,0\n9,0\n", "line 3: the fleet has no device '9'"),
        ("device,cluster\n0,0\n0,1\n", "line 3: device 0 has a cluster already"),
        ("device,cluster\n0,0\n1,0\n", "device 2 has no cluster"),
        ("device,cluster\n0,x\n", "line 2: cluster 'x' is neither a whole number"),
        ("device,cluster\n0,-1\n", "line 2: cluster '-1' is neither a whole number"),
        ("device,cluster\n0\n", "line 2: cluster '' is neither a whole number"),
    ],
)
def test_a_bad_cluster_file_is_refused_by_line(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "clusters.csv").write_text(text)
    fleet, _ = fleets.build(Fleet(devices=3, samples=5), dataset(), 0)
    with pytest.raises(BadData, match=said):
        clusterings.build(Clusters(method="file", path=str(tmp_path / "clusters.csv")), fleet, 0)


@pytest.mark.parametrize(("rows", "count"), [([0, 2, 0], None), ([1, 2, 2], 3), ([0, 1, 1], 3)])
def test_an_empty_cluster_is_refused(rows: list[int], count: int | None, tmp_path: Path) -> None:
    lines = "".join(f"{k},{cluster}\n" for k, cluster in enumerate(rows))
    (tmp_path / "clusters.csv").write_text("device,cluster\n" + lines)
    fleet, _ = fleets.build(Fleet(devices=3, samples=5), dataset(), 0)
    with pytest.raises(BadExperiment, match="is empty"):
        clusterings.build(Clusters(method="file", count=count, path=str(tmp_path / "clusters.csv")), fleet, 0)


def test_cluster_files_count_from_one_too(tmp_path: Path) -> None:
    (tmp_path / "clusters.csv").write_text("device,cluster\n2,1\n0,2\n1,1\n")
    fleet, _ = fleets.build(Fleet(devices=3, samples=5), dataset(), 0)
    clusters = clusterings.build(Clusters(method="file", path=str(tmp_path / "clusters.csv")), fleet, 0)
    assert clusters.assignment.tolist() == [1, 0, 0]
    assert clusters.count == 2


def test_a_clustering_declares_what_it_needs_to_know() -> None:
    needs = {name: registry.needs(Clusters(method=name)) for name in registry.CLUSTERINGS if name != "file"}
    labels = dict.fromkeys(("major_class", "balanced", "similar"), "labels")
    nothing = dict.fromkeys(("random", "redrawn"))
    assert needs == labels | nothing | {"timezone": "timezone", "availability": "availability"}
    assert registry.needs(Clusters(method="balanced", features="gradients")) == "gradients"

    def own(fleet: Any, rng: Any, options: Any) -> Any:
        return np.arange(len(fleet)) % options.count

    assert registry.needs(Clusters(method=own)) is None
    own.needs = "labels"  # type: ignore[attr-defined]
    assert registry.needs(Clusters(method=own)) == "labels"
    own.needs = "gradients"  # type: ignore[attr-defined]
    with pytest.raises(BadExperiment, match="needs = 'gradients' is not one of labels, timezone, availability"):
        registry.needs(Clusters(method=own))
