"""Tables in a federation: devices agree on what columns are, tell of them only what they allow, and see what the
simulation sees."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import fedcluster
from fedcluster.data.sources import open_dataset
from fedcluster.errors import BadData, BadExperiment
from fedcluster.experiment import Data
from fedcluster.flower.device import Device, Identity, read_scales
from fedcluster.flower.messages import InvalidMessage
from fedcluster.flower.registry import Registry, read_registration

COLUMNS = """
[task]
name = "regression"
[data]
name = "devices"
features = ["delay", "distance", "carrier"]
categories = {carrier = ["AA", "UA"]}
target = "arrival"
"""


def table(rows: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    delay = rng.normal(30 + 10 * seed, 3 + seed, rows)
    carrier = rng.choice(["AA", "UA"], rows)
    return {"delay": delay, "distance": rng.normal(900, 300, rows), "carrier": carrier, "arrival": delay * 1.5 + seed}


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """Three devices' folders of train and test, and what their columns are."""
    (tmp_path / "columns.toml").write_text(COLUMNS)
    for k in range(3):
        (tmp_path / str(k)).mkdir()
        pq.write_table(pa.table(table(20 + 7 * k, k)), tmp_path / str(k) / "train.parquet")
        pq.write_table(pa.table(table(5, k)), tmp_path / str(k) / "test.parquet")
    return tmp_path


def device(places: Path, k: int, tell: bool = True) -> Device:
    config = {"device": str(k), "data": str(places / str(k)), "columns": str(places / "columns.toml")}
    return Device(Identity.of(config | {"tell-statistics": tell}))


def roster(places: Path, order: list[int]) -> Registry:
    registry = Registry(fedcluster.load(places / "columns.toml", ["clusters.count=1"]))
    for k in order:
        assert registry.register(read_registration(device(places, k).registration().model_dump_json())) is None
    registry.admit(0, print)
    return registry


def test_devices_see_to_the_bit_what_the_simulation_sees(places: Path) -> None:
    whole = {name: np.concatenate([table(20 + 7 * k, k)[name] for k in range(3)]) for name in table(1, 0)}
    owner = np.repeat(np.arange(3), [20, 27, 34])
    keys = fedcluster.load(places / "columns.toml").data.model_copy(update={"device": "owner"})
    keys = keys.model_copy(update={"name": {"train": whole | {"owner": owner}, "test": whole | {"owner": owner}}})
    simulated = open_dataset(keys, lambda line: None, "number")
    scales = [roster(places, order).scales for order in ([0, 1, 2], [2, 0, 1])]
    assert scales[0] == scales[1]
    assert scales[0] is not None
    for k in range(3):
        own = device(places, k)
        own.dataset = own.open(read_scales(json.loads(json.dumps(scales[0])), own.statistics))
        assert torch.equal(own.dataset.x_train, simulated.x_train[torch.from_numpy(owner == k)])
        assert torch.equal(own.dataset.y_train, simulated.y_train[torch.from_numpy(owner == k)])


def test_series_are_standardised_over_all_devices(places: Path) -> None:
    (places / "columns.toml").write_text(
        '[task]\nname = "regression"\n[data]\nname = "devices"\nfeatures = ["series"]\ntarget = "arrival"\n'
    )
    rng = np.random.default_rng(0)
    parts = [{"series": rng.normal(k, 2, (9 + k, 4)), "arrival": rng.normal(k, 2, 9 + k)} for k in range(3)]
    for k, part in enumerate(parts):
        for split in ("train", "test"):
            columns = part | {"series": part["series"].tolist()}
            pq.write_table(pa.table(columns), places / str(k) / f"{split}.parquet")
    owner = np.repeat(np.arange(3), [9, 10, 11])
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} | {"owner": owner}
    keys: dict[str, Any] = {"features": ("series",), "target": "arrival", "device": "owner"}
    simulated = open_dataset(Data(name={"train": whole, "test": whole}, **keys), lambda line: None, "number")
    scales = roster(places, [2, 0, 1]).scales
    own = device(places, 1)
    own.dataset = own.open(read_scales(json.loads(json.dumps(scales)), own.statistics))
    assert torch.equal(own.dataset.x_train, simulated.x_train[torch.from_numpy(owner == 1)])
    assert "rows of 4 numbers, standardised: series; target: arrival" in own.said[-1]


def test_nothing_is_told_without_leave(places: Path) -> None:
    with pytest.raises(
        BadExperiment, match=r"delay, distance, arrival: devices have to agree .* or join with --tell-statistics"
    ):
        device(places, 0, tell=False)
    text = (places / "columns.toml").read_text()
    (places / "columns.toml").write_text(
        text + "standardise = {delay = [30, 5], distance = [900, 300], arrival = [0, 1]}\n"
    )
    silent = device(places, 0, tell=False)
    assert silent.registration().statistics is None
    delay = (table(20, 0)["delay"] - 30) / 5
    np.testing.assert_allclose(silent.dataset.x_train[:, 0], delay, rtol=1e-6)


def test_levels_and_characters_have_to_be_agreed_on(places: Path) -> None:
    text = (places / "columns.toml").read_text()
    (places / "columns.toml").write_text(text.replace('categories = {carrier = ["AA", "UA"]}', ""))
    with pytest.raises(BadData, match=r"give them as data.categories = \{carrier"):
        device(places, 0)


def test_a_device_with_one_target_only_takes_part(places: Path) -> None:
    pq.write_table(pa.table(table(20, 0) | {"arrival": np.full(20, 3.0)}), places / "0" / "train.parquet")
    assert device(places, 0).samples == 20


def test_devices_that_tell_of_other_columns_are_refused(places: Path) -> None:
    registry = roster(places, [0, 1])
    registration = device(places, 2).registration()
    assert "tells of other columns" in str(registry.register(registration.model_copy(update={"statistics": None})))


@pytest.mark.parametrize(
    "statistics",
    [
        {"a": [0, 1, 1]},
        {"a": [1, 1]},
        {"a": [1, float("inf"), 1]},
        {"a": [1, 1, -1]},
        {"a": "x"},
        [1],
        {"a": [1, 1, 1e99]},
    ],
)
def test_statistics_that_are_none(statistics: Any) -> None:
    about = {"device": "1", "samples": 1, "shape": [1], "target": "number", "outputs": 1, "statistics": statistics}
    with pytest.raises(ValueError, match="statistics"):
        read_registration(json.dumps(about))


@pytest.mark.parametrize(
    "plan",
    [None, {}, {"a": [0, 1], "b": [0, 1]}, {"a": [0, 0]}, {"a": [float("nan"), 1]}, {"a": [0]}, [], {"a": ["x", 1]}],
)
def test_a_plan_whose_scales_are_none(plan: Any) -> None:
    with pytest.raises(InvalidMessage, match="without the mean and deviation"):
        read_scales(plan, ["a"])
