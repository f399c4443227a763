"""The partitions that people compare with: what each promises, and that they are drawn as elsewhere."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedcluster
from fedcluster import Dataset, Experiment
from fedcluster.data.partition import Partition, one_device
from fedcluster.errors import BadData, BadExperiment
from fedcluster.experiment import Fleet, Section
from fedcluster.fleet import fleet as fleets
from fedcluster.runs.progress import Display
from tests.conftest import Here

CLASSES = 10
quickly = settings(max_examples=40, deadline=None)


def labelled(rows: int = 1000, classes: int = CLASSES) -> Dataset:
    y = np.arange(rows) % classes
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)
    return Dataset(x, y, x[:classes], np.arange(classes))


def pictures(rows: int = 200) -> Dataset:
    x = np.random.default_rng(0).integers(0, 255, (rows, 8, 8), np.uint8)
    return Dataset(x, np.arange(rows) % CLASSES, x[:CLASSES], np.arange(CLASSES))


def partition(data: Dataset, seed: int = 0, **fleet: Any) -> Partition:
    return fleets.build(Fleet(**fleet), data, seed)[1]


def table(found: Partition) -> Any:
    """Label counts by device."""
    return np.stack([found.label_counts(k) for k in range(len(found))])


def rows_of(found: Partition) -> list[Any]:
    return [found.sample_indices(k) for k in range(len(found))]


SHARED_OUT: dict[str, dict[str, Any]] = {
    "iid": {"partition": "iid", "samples": "all"},
    "dirichlet": {"partition": "dirichlet", "alpha": 0.5, "min_samples": 5},
    "balanced dirichlet": {"partition": "dirichlet", "alpha": 0.5, "min_samples": 5, "balance": True},
    "pathological": {"partition": "pathological", "classes": 2},
    "shards": {"partition": "shards", "shards": 2},
    "log-normal": {"partition": "quantity", "samples": "all", "sigma": 2.0},
    "power law": {"partition": "quantity", "samples": "all", "distribution": "power_law", "min_samples": 3},
    "noise": {"partition": "feature_skew"},
}


@pytest.mark.parametrize("name", SHARED_OUT)
def test_every_sample_is_on_one_device(name: str) -> None:
    data = labelled()
    found = partition(data, devices=20, **SHARED_OUT[name])
    assert sorted(np.concatenate(rows_of(found)).tolist()) == list(range(1000))
    assert found.labels is not None
    y = data.y_train.numpy()
    for k, rows in enumerate(rows_of(found)):
        assert np.bincount(y[rows], minlength=CLASSES).tolist() == found.label_counts(k).tolist()
        assert len(rows) == found.sizes[k] > 0
        assert found.label_counts(k)[found.labels.major_class[k]] == found.label_counts(k).max()


@pytest.mark.parametrize("name", SHARED_OUT)
def test_a_partition_is_a_function_of_the_seed(name: str) -> None:
    one, two, other = (partition(labelled(), seed, devices=20, **SHARED_OUT[name]) for seed in (3, 3, 4))
    assert all(map(np.array_equal, rows_of(one), rows_of(two)))
    assert not all(map(np.array_equal, rows_of(one), rows_of(other)))


@quickly
@given(devices=st.integers(1, 40), classes=st.integers(1, CLASSES), seed=st.integers(0, 99))
def test_pathological_devices_hold_samples_of_c_classes(devices: int, classes: int, seed: int) -> None:
    counts = table(partition(labelled(), seed, devices=devices, partition="pathological", classes=classes))
    assert ((counts > 0).sum(axis=1) == classes).all()
    assert (counts[np.arange(devices), np.arange(devices) % CLASSES] > 0).all()
    for c in range(CLASSES):
        held = counts[counts[:, c] > 0, c]
        assert not len(held) or np.ptp(held) <= 1
    given_sizes = table(
        partition(labelled(), seed, devices=devices, partition="pathological", classes=classes, samples=31)
    )
    assert (given_sizes.sum(axis=1) == 31).all()
    assert (np.sort(given_sizes, axis=1)[:, -classes:] >= 31 // classes).all()


def test_shards_hold_one_class_where_they_fit() -> None:
    counts = table(partition(labelled(), devices=50, partition="shards", shards=2))
    assert (counts.sum(axis=1) == 20).all()
    assert ((counts > 0).sum(axis=1) <= 2).all()
    assert ((counts % 10) == 0).all()


@quickly
@given(devices=st.integers(1, 60), least=st.integers(1, 10), seed=st.integers(0, 99))
def test_quantities_are_skewed_and_exact(devices: int, least: int, seed: int) -> None:
    laws: list[dict[str, Any]] = [{"sigma": 1.0}, {"distribution": "power_law", "exponent": 1.2}]
    for keys in laws:
        found = partition(
            labelled(), seed, devices=devices, partition="quantity", samples=50, min_samples=least, **keys
        )
        assert found.sizes.sum() == 50 * devices
        assert found.sizes.min() >= least


def test_quantities_follow_their_distribution() -> None:
    """log(size) of a log-normal fleet is normal with deviation sigma; the tail of a power law falls with its
    exponent."""
    data = labelled(100)
    sizes = partition(data, devices=4000, partition="quantity", samples=10_000, sigma=0.7).sizes
    logarithms = np.log(sizes)
    assert logarithms.std() == pytest.approx(0.7, rel=0.05)
    assert np.mean(((logarithms - logarithms.mean()) / logarithms.std()) ** 4) == pytest.approx(3, abs=0.4)
    law: dict[str, Any] = {"partition": "quantity", "distribution": "power_law", "exponent": 2.0}
    sizes = partition(data, devices=4000, samples=10_000, **law).sizes
    hill = 1 / np.log(sizes / sizes.min()).mean()
    assert hill == pytest.approx(2, rel=0.07)


def test_dirichlet_shares_have_the_moments_of_the_distribution() -> None:
    """A device's part of a class is Beta(alpha, (n - 1) alpha): mean 1/n, variance (n - 1) / (n^2 (n alpha + 1))."""
    n, alpha, data = 5, 0.5, labelled(10_000)
    parts = np.concatenate(
        [
            table(partition(data, seed, devices=n, partition="dirichlet", alpha=alpha, min_samples=1)).ravel() / 1000
            for seed in range(60)
        ]
    )
    assert parts.mean() == pytest.approx(1 / n)
    assert parts.var() == pytest.approx((n - 1) / (n**2 * (n * alpha + 1)), rel=0.1)


@pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning")  # of pyarrow, to datasets
@pytest.mark.parametrize("ours", ["dirichlet", "pathological", "shards"])
def test_label_counts_are_distributed_as_in_flwr_datasets(ours: str) -> None:
    """The share of a device's largest class, and device sizes, over 20 seeds of each."""
    partitioner = pytest.importorskip("flwr_datasets.partitioner", reason="flwr-datasets is not installed")
    datasets = pytest.importorskip("datasets")
    data, n = labelled(1000), 10
    theirs: Any = {
        "dirichlet": lambda seed: partitioner.DirichletPartitioner(
            n, "label", alpha=0.5, min_partition_size=10, self_balancing=False, seed=seed
        ),
        "pathological": lambda seed: partitioner.PathologicalPartitioner(
            n, "label", 2, class_assignment_mode="first-deterministic", seed=seed
        ),
        "shards": lambda seed: partitioner.ShardPartitioner(n, "label", num_shards_per_partition=2, seed=seed),
    }[ours]
    options: dict[str, dict[str, Any]] = {
        "dirichlet": {"alpha": 0.5, "min_samples": 10},
        "pathological": {"classes": 2},
        "shards": {"shards": 2},
    }
    samples: dict[str, list[Any]] = {"ours": [], "theirs": []}
    rows = datasets.Dataset.from_dict({"label": data.y_train.tolist()})
    for seed in range(20):
        samples["ours"].append(table(partition(data, seed, devices=n, partition=ours, **options[ours])))
        other = theirs(seed)
        other.dataset = rows
        samples["theirs"].append(
            np.stack([np.bincount(other.load_partition(k)["label"], minlength=CLASSES) for k in range(n)])
        )
    measures = {
        who: np.stack(
            [
                np.array([(t.max(axis=1) / t.sum(axis=1)).mean(), t.sum(axis=1).std(), (t > 0).sum(axis=1).mean()])
                for t in tables
            ]
        )
        for who, tables in samples.items()
    }
    difference = np.abs(measures["ours"].mean(axis=0) - measures["theirs"].mean(axis=0))
    error = np.sqrt(sum(values.var(axis=0) / len(values) for values in measures.values()))
    assert (difference <= 4 * error + 1e-9).all(), (difference, error)


def test_noise_grows_with_the_device() -> None:
    data = labelled(3000)
    found = partition(data, devices=3, partition="feature_skew", sigma=2.0)
    assert found.dataset is not None
    changed = (found.dataset.x_train - data.x_train) / data.x_train.std(dim=0, correction=0)
    spread = [float(changed[torch.from_numpy(rows)].std()) for rows in rows_of(found)]
    assert spread == pytest.approx([0, 1, 2], abs=0.05)
    assert found.dataset.x_test is data.x_test


def test_the_last_device_sees_pictures_turned_by_all_degrees() -> None:
    data = pictures()
    found = partition(data, devices=2, partition="feature_skew", kind="rotation", degrees=90)
    assert found.dataset is not None
    first, last = map(torch.from_numpy, rows_of(found))
    assert torch.equal(found.dataset.x_train[first], data.x_train[first])
    turned = torch.rot90(data.x_train[last], 1, (2, 3)), torch.rot90(data.x_train[last], -1, (2, 3))
    seen = found.dataset.x_train[last].int()
    assert min(int((seen - other.int()).abs().max()) for other in turned) <= 1
    assert found.dataset.x_train.dtype == torch.uint8
    with pytest.raises(BadExperiment, match="rotates pictures"):
        partition(labelled(), devices=2, partition="feature_skew", kind="rotation")


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_regional_labels_depend_on_the_time_zone(strength: float) -> None:
    data = labelled(4000)
    keys = {"devices": 500, "samples": 100, "world": "diurnal", "partition": "regional", "strength": strength}
    fleet, found = fleets.build(Fleet(**keys), data, 0)
    counts, offset = table(found), fleet.known.utc_offset
    assert offset is not None
    assert (counts.sum(axis=1) == 100).all()
    fleet_mix = counts.sum(axis=0) / counts.sum()
    assert np.abs(fleet_mix - 1 / CLASSES).max() < 0.01  # the fleet as a whole has all classes
    west, east = counts[offset == offset.min()].sum(axis=0), counts[offset == offset.max()].sum(axis=0)
    distance = np.abs(west / west.sum() - east / east.sum()).sum() / 2
    assert distance == pytest.approx(strength, abs=0.02)


def test_regional_features_are_those_of_the_region() -> None:
    data = labelled(4000)
    keys: dict[str, Any] = {
        "devices": 200,
        "samples": 20,
        "world": "diurnal",
        "partition": "regional",
        "what": "features",
    }
    fleet, found = fleets.build(Fleet(**keys, strength=1.0), data, 0)
    assert found.dataset is not None
    moved = found.dataset.x_train - data.x_train
    offset = fleet.known.utc_offset
    assert offset is not None
    shifts = {float(o): moved[torch.from_numpy(found.sample_indices(k))] for k, o in enumerate(offset)}
    assert len(shifts) > 5
    for shift in shifts.values():
        torch.testing.assert_close(shift, shift[:1].expand_as(shift), atol=1e-5, rtol=0)
    assert partition(data, **keys, strength=0.0).dataset is not None


def test_spawned_workers_see_the_features_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker builds its executor from the experiment and the data set that is trained on: nothing is skewed twice."""
    from fedcluster.training.setup import prepare
    from fedcluster.training.trainer import executor_of

    experiment = Experiment(
        fleet={"devices": 4, "partition": "feature_skew", "sigma": 3.0},
        clusters={"count": 2},
        model={"name": "logistic"},
    )
    setup = prepare(experiment)
    assert setup.dataset is not None
    assert torch.equal(executor_of(experiment, setup.dataset).dataset.x_train, setup.dataset.x_train)


def test_the_clusters_that_are_shown_are_those_of_a_run() -> None:
    """Gradients are those of the features that devices see."""
    from fedcluster.analysis import fleet_report
    from fedcluster.training.setup import prepare

    described = Experiment(
        fleet={"devices": 12, "partition": "feature_skew", "sigma": 3.0},
        clusters={"method": "similar", "features": "gradients", "count": 3},
        model={"name": "logistic"},
    )
    shown = fleet_report.partition(described, Display()).clusters
    np.testing.assert_array_equal(shown.assignment, prepare(described).clusters.assignment)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"partition": "dirichlet", "alpha": 0.001, "min_samples": 10},
            "left a device with fewer than min_samples = 10",
        ),
        ({"partition": "dirichlet", "min_samples": 200}, "more than the 1,000 training samples"),
        ({"partition": "dirichlet", "samples": 5, "min_samples": 2}, 'is for fleet.samples = "all"'),
        ({"partition": "pathological", "classes": 11}, "fleet.classes = 11, but data has 10 classes"),
        ({"partition": "shards", "shards": 200}, "more than the 1,000 training samples"),
        (
            {"partition": "shards", "samples": 5},
            "divides the whole training set: leave out fleet.samples",
        ),
        ({"partition": "major_class", "samples": "all"}, 'fleet.samples = "all" is not possible'),
        ({"partition": "quantity", "samples": 2, "min_samples": 5}, "is more than 20 samples"),
        ({"partition": "iid", "samples": "all", "devices": 2000}, "would hold no samples of data"),
    ],
)
def test_what_cannot_be_partitioned_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(BadExperiment, match=said):
        partition(labelled(), **{"devices": 10} | keys)


def test_the_one_device_of_a_federation_keeps_its_number() -> None:
    rows = np.array([3, 1, 4])
    assert one_device(rows, labelled()).sample_indices(7).tolist() == [3, 1, 4]


def test_a_region_must_be_known() -> None:
    with pytest.raises(BadData, match="needs to know where devices are"):
        partition(labelled(), devices=10, partition="regional")


@pytest.mark.parametrize(
    ("fleet", "said"),
    [
        ({"partition": "dirichlet", "rho_device": 0.9}, 'fleet.rho_device is an option of partition = "major_class"'),
        ({"partition": "iid", "alpah": 1}, "fleet.alpah is not a key"),
        ({"partition": "dirichlet", "alpah": 1}, "fleet.alpah is not a key; did you mean alpha?"),
        ({"devics": 10}, "fleet.devics is not a key; did you mean devices?"),
        ({"partition": "diriclet"}, "fleet.partition = 'diriclet' is not allowed"),
        ({"partition": "regional", "strength": 2.0}, "fleet.strength = 2.0 is not allowed"),
    ],
)
def test_options_are_those_of_the_partition(fleet: dict[str, Any], said: str) -> None:
    with pytest.raises(BadExperiment, match=said):
        Experiment(fleet=fleet)


def test_options_go_with_the_partition_that_is_replaced(tmp_path: Any) -> None:
    first = Experiment(fleet={"partition": "pathological", "classes": 3, "devices": 7})
    assert (first.fleet.samples, first.to_dict()["fleet"]["classes"]) == ("all", 3)
    second = first.override(fleet={"partition": "dirichlet", "alpha": 0.5})
    found = second.to_dict()["fleet"]
    assert (found["devices"], found["samples"], found["alpha"], "classes" in found) == (7, 500, 0.5, False)
    (tmp_path / "old.toml").write_text('[fleet]\npartition = "iid"\nrho_device = 0.5\nalpha = 0.3\n')  # of version 0.1
    assert "alpha" not in fedcluster.load(tmp_path / "old.toml").to_dict()["fleet"]
    (tmp_path / "major.toml").write_text("[fleet]\nrho_device = 0.9\n")
    changed = fedcluster.load(tmp_path / "major.toml", ["fleet.partition=iid"])
    assert changed.to_dict()["fleet"].get("rho_device") is None
    assert Experiment(**second.to_dict()) == second


def own(dataset: Dataset, sizes: Any, rng: Any, options: Any) -> list[Any]:
    return [np.arange(options.first, options.first + size) for size in sizes]


class OwnOptions(Section):
    first: int = 4


def test_a_partition_of_ones_own_has_options() -> None:
    own.Options = OwnOptions  # type: ignore[attr-defined]
    found = partition(labelled(), devices=2, samples=3, partition=own, first=7)
    assert found.sample_indices(1).tolist() == [7, 8, 9]
    with pytest.raises(BadExperiment, match="last is not a key"):
        Experiment(fleet={"partition": own, "last": 1})


def test_runs_over_shared_out_data(here: Here, write_experiment: Any) -> None:
    path = write_experiment(fleet={"devices": 10, "partition": "dirichlet", "alpha": 0.5, "min_samples": 10})
    code, _, err = here("run", path, "--workers", 1)
    assert code == 0, err
