"""What the columns of a table are taken for, by name, and how what is wrong or in doubt is refused."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import fedcluster
from fedcluster import Dataset
from fedcluster.data.encoding import Category, Encoding, Moments
from fedcluster.data.sources import open_dataset
from fedcluster.data.tables import Table
from fedcluster.errors import BadData
from fedcluster.experiment import Data
from tests.conftest import Here

ROWS = 400


def flights(rows: int = ROWS) -> dict[str, Any]:
    """A table of the general kind: numbers, categories, a device column, and a numeric target."""
    rng = np.random.default_rng(0)
    delay = rng.integers(-10, 120, rows)
    carrier = rng.choice(["UA", "AA", "DL"], rows)
    return {
        "tailnum": rng.choice([f"N{k:03d}" for k in range(8)], rows),
        "delay": delay,
        "distance": rng.integers(100, 3000, rows),
        "carrier": carrier,
        "month": rng.integers(1, 13, rows),
        "test": np.arange(rows) % 4 == 0,
        "arrival": delay + 5.0 * (carrier == "AA") + rng.normal(size=rows),
    }


COLUMNS: dict[str, Any] = {"features": ["delay", "carrier"], "target": "arrival", "device": "tailnum"}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    pq.write_table(pa.table(flights()), tmp_path / "flights.parquet")
    return tmp_path / "flights.parquet"


def quietly(source: Any, kind: str | None = None, /, **data: Any) -> Dataset:
    name = str(source) if isinstance(source, Path) else source
    return open_dataset(Data(name=name, **data), lambda text: None, kind)


def test_columns_are_taken_by_name(table: Path) -> None:
    said: list[str] = []
    data = open_dataset(Data(name=str(table), split="test", **COLUMNS), said.append)
    given = flights()
    train = ~given["test"]
    assert (data.target, data.outputs, data.shape) == ("number", 1, (4,))
    delay, arrival = given["delay"], given["arrival"]
    mean, deviation = arrival[train].mean(), arrival[train].std()
    np.testing.assert_allclose(data.y_train, (arrival[train] - mean) / deviation, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(data.in_units(data.y_test), arrival[~train], rtol=1e-5, atol=1e-4)
    for split, rows in (("train", train), ("test", ~train)):
        x = getattr(data, f"x_{split}").numpy()
        np.testing.assert_allclose(x[:, 0], (delay[rows] - delay[train].mean()) / delay[train].std(), rtol=1e-5)
        np.testing.assert_array_equal(
            x[:, 1:].argmax(axis=1), np.searchsorted(["AA", "DL", "UA"], given["carrier"][rows])
        )
        assert (x[:, 1:].sum(axis=1) == 1).all()
    assert data.device_train is not None
    assert data.device_train.tolist() == given["tailnum"][train].tolist()
    assert said[-1] == (
        f"{table}: numbers, standardised: delay; categories, one-hot: carrier (3); target: arrival (numbers, "
        f"standardised by mean {mean:.4g} and deviation {deviation:.4g}; scores are in its own units); device: tailnum"
    )
    assert "100 rows are the test part, by the column test" in said[0]


@pytest.mark.parametrize(
    "form", ["csv", "parquet", "datasets", "DatasetDict", "saved", "saved dict", "arrow", "arrays"]
)
def test_every_form_of_a_table_gives_the_same_data(form: str, table: Path, tmp_path: Path) -> None:
    arrow = pa.table(flights())
    rows = datasets.Dataset(arrow)
    source: Any = {"parquet": table, "datasets": rows, "arrow": arrow, "arrays": flights()}.get(form)
    test = np.asarray(flights()["test"])
    parts = {"train": rows.select(np.flatnonzero(~test)), "test": rows.select(np.flatnonzero(test))}
    split: dict[str, Any] = {"split": "test"}
    match form:
        case "csv":
            source = tmp_path / "flights.csv"
            datasets.Dataset(arrow).to_pandas().to_csv(source, index=False)
        case "DatasetDict":
            source, split = datasets.DatasetDict(parts), {}
        case "saved":
            source = tmp_path / "saved"
            rows.save_to_disk(source)
        case "saved dict":
            source, split = tmp_path / "saved", {}
            datasets.DatasetDict(parts).save_to_disk(source)
    one, other = quietly(table, **COLUMNS, split="test"), quietly(source, **COLUMNS, **split)
    for name in ("x_train", "y_train", "x_test", "y_test"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-6, atol=1e-6)
    assert one.device_train is not None
    assert other.device_train is not None
    assert one.device_train.tolist() == other.device_train.tolist()


class Torch(torch.utils.data.Dataset[Any]):
    """A map-style data set of (x, y, device), or of columns."""

    def __init__(self, rows: int, columns: bool) -> None:
        self.rows, self.columns = rows, columns

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, i: int) -> Any:
        if self.columns:
            return {"a": i / 7, "b": i % 5 + 0.5, "label": i % 3, "device": i % 4}
        return torch.tensor([i / 7, i % 5 + 0.5]), i % 3, i % 4


@pytest.mark.parametrize("columns", [True, False])
def test_torch_data_sets(columns: bool) -> None:
    parts = {"train": Torch(30, columns), "test": Torch(12, columns)}
    data = quietly(parts, standardise=False) if columns else quietly(parts)
    assert (data.shape, data.classes, len(data.y_train), len(data.y_test)) == ((2,), 3, 30, 12)
    assert float(data.x_train[14, 0]) == 2
    assert data.device_train is not None
    assert data.device_train.tolist()[:5] == [0, 1, 2, 3, 0]
    alone = quietly(Torch(30, columns))
    assert len(alone.y_test) == 6


def test_a_run_over_a_data_frame() -> None:
    frame = pandas.DataFrame({name: list(column) for name, column in flights().items()})
    experiment = fedcluster.Experiment(
        rounds=1,
        data={"name": frame} | COLUMNS,
        clusters={"count": 2, "participation": 1.0},
        model={"name": "logistic"},
        local={"steps": 2},
    )
    assert experiment.to_dict()["data"]["name"] == "pandas:DataFrame"
    assert fedcluster.run(experiment).history[-1]["test_rmse"] > 0
    with pytest.raises(BadData, match=r"the train frame cannot be read as a table .*Duplicate column names"):
        quietly(pandas.concat([frame, frame], axis=1), **COLUMNS)
    with pytest.raises(
        BadData, match=r"the train frame cannot be read as a table .*Conversion failed for column delay"
    ):
        quietly(frame.assign(delay=[b"x", 1] * 200), **COLUMNS)


def test_what_arrays_are_taken_for_is_said() -> None:
    said: list[str] = []
    open_dataset(Data(name={"train": Torch(30, False), "test": Torch(12, False)}), said.append)
    assert said == ["dict: samples [2] of numbers, as they are; target: 3 classes; 4 devices"]
    with pytest.raises(BadData, match=r"data\.standardise is for tables, and data\.name gives arrays"):
        quietly(Torch(30, False), standardise=True)


def test_a_copy_of_a_table_is_called_by_its_own_name(tmp_path: Path) -> None:
    for name in ("one.csv", "two.csv"):
        (tmp_path / name).write_text("a,label\n" + "".join(f"{i / 3},{i % 2}\n" for i in range(20)))
        said: list[str] = []
        open_dataset(str(tmp_path / name), said.append)
        assert [name in line for line in said] == [True, True]


def test_decimals_are_numbers() -> None:
    given = flights()
    cents = pa.array(given["distance"]).cast(pa.decimal128(20, 0)).cast(pa.decimal128(22, 2))
    keys = COLUMNS | {"features": ["distance"]}
    assert torch.equal(quietly(pa.table(given | {"distance": cents}), **keys).x_train, quietly(given, **keys).x_train)


def test_arrays_by_name() -> None:
    x, y = np.random.default_rng(0).normal(size=(20, 3)), np.arange(20) % 2
    data = quietly({"x_train": x, "y_train": y})
    assert (data.shape, len(data.y_train), len(data.y_test)) == ((3,), 16, 4)
    with pytest.raises(BadData, match="this one has 'z'"):
        quietly({"x_train": x, "y_train": y, "z": y})


def test_several_targets(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    columns = {
        "a": rng.normal(size=50),
        "b": rng.normal(size=50),
        "rain": np.arange(50) % 2,
        "wind": np.arange(50) % 3 // 2,
    }
    labels = quietly(dict(columns), features=["a", "b"], target=["rain", "wind"])
    assert (labels.target, labels.outputs) == ("multilabel", 2)
    numbers = quietly(dict(columns), features=["rain", "wind"], target=["a", "b"])
    assert (numbers.target, numbers.outputs) == ("number", 2)
    lists = pa.table({"a": columns["a"], "tags": [[i % 2, 1 - i % 2, i % 3 // 2] for i in range(50)]})
    assert quietly(lists, target="tags").spec[:3] == ((1,), "multilabel", 3)


def test_series_are_rows_of_numbers() -> None:
    series = np.random.default_rng(0).normal(3, 2, size=(40, 6))
    data = quietly(pa.table({"series": series.tolist(), "label": np.arange(40) % 2}))
    assert data.shape == (6,)
    assert (float(data.x_train.mean()), float(data.x_train.std())) == pytest.approx((0, 1), abs=0.02)
    ids = quietly(pa.table({"input_ids": (series > 3).astype(int).tolist(), "label": np.arange(40) % 2}))
    assert (ids.x_train.dtype, ids.vocabulary) == (torch.int64, 2)


def test_devices_without_training_rows_are_named() -> None:
    columns = {"a": np.arange(8) / 3, "label": np.arange(8) % 2}
    train, test = columns | {"device": ["x", "y"] * 4}, columns | {"device": ["x", "z"] * 4}
    said: list[str] = []
    open_dataset(Data(name={"train": train, "test": test}), said.append)
    assert "1 devices have rows in the test part only, so they are not in the fleet: z" in said[0]
    texts = {"text": ["long enough", "s"], "device": ["x", "y"]}
    open_dataset(Data(name={"train": texts, "test": texts}, features=("text",), tokenizer="bytes"), said.append)
    assert "1 devices have fewer than two tokens and are left out: y" in said[2]


def test_one_hot_inputs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedcluster.inputs.total_memory", lambda: 10**5)
    with pytest.raises(BadData, match="at most"):
        quietly({"a": [f"{i % 90}x" for i in range(900)], "label": np.arange(900) % 2}, categories=["a"])


def test_data_themselves_stand_by_their_kind_in_the_experiment_file() -> None:
    experiment = fedcluster.Experiment(data={"name": {"a": [1, 2], "label": [0, 1]}})
    assert experiment.to_dict()["data"]["name"] == "builtins:dict"


def test_a_category_of_the_test_part_only_is_other() -> None:
    train = {"kind": ["a", "b"] * 10, "x": np.arange(20) / 3, "label": np.arange(20) % 2}
    test = {"kind": ["a", "c"], "x": [0.5, 0.5], "label": [0, 1]}
    said: list[str] = []
    data = open_dataset(Data(name={"train": train, "test": test}, features=("kind", "x")), said.append)
    assert data.x_test[:, :2].tolist() == [[1, 0], [0, 0]]
    assert "1 rows have a kind that is not in the training part: encoded as other" in said[0]
    codes = quietly({"train": train, "test": test}, features=["kind"], encoding="codes")
    assert (codes.x_test.tolist(), codes.vocabulary) == ([[0], [2]], 3)
    assert codes.x_train.dtype == torch.int64
    listed = quietly({"train": train, "test": test}, features=["kind"], categories={"kind": ["c", "b", "a"]})
    assert listed.x_test.tolist() == [[0, 0, 1], [1, 0, 0]]
    given = Data(name={"train": train, "test": test}, features=("kind",), categories={"kind": ("a", "b")})
    open_dataset(given, said.append)
    assert any("1 rows have a kind that is not in data.categories: encoded as other" in line for line in said)
    mixed = quietly({"train": train, "test": test}, features=["kind", "x"], encoding="codes", standardise=False)
    assert mixed.x_test.tolist() == [[0, 0.5], [2, 0.5]]


def test_whole_numbers_are_categories_where_they_are_listed() -> None:
    data = quietly(flights(), features=["month"], target="arrival", categories=["month"])
    assert data.shape == (12,)
    encoding = Encoding((Category("month", tuple(str(m) for m in range(1, 13))),), "one-hot")
    inputs, _ = encoding.encode(Table("t", pa.table({"month": [2, 10, 1]})))
    assert inputs.argmax(axis=1).tolist() == [1, 9, 0]


def test_statistics_can_be_given_or_left_out() -> None:
    fixed = quietly(flights(), features=["delay", "distance"], target="arrival", standardise={"delay": [50, 10.0]})
    plain = quietly(flights(), features=["delay", "distance"], target="arrival", standardise=False)
    pooled = quietly(flights(), features=["delay", "distance"], target="arrival")
    torch.testing.assert_close(fixed.x_train[:, 0], (plain.x_train[:, 0] - 50) / 10)
    torch.testing.assert_close(fixed.x_train[:, 1], pooled.x_train[:, 1])


def test_targets_follow_the_rules_for_features() -> None:
    """Numbers are standardised, by statistics of the training part or those given, unless [data] says not to."""
    given, keys = flights(), {"features": ["delay"], "split": "test"}
    train = ~given["test"]
    plain = quietly(given, target="arrival", standardise=False, **keys)
    np.testing.assert_array_equal(plain.y_train, given["arrival"][train].astype(np.float32))
    assert plain.target_scale is None
    fixed = quietly(given, target="arrival", standardise={"arrival": [40, 20.0]}, **keys)
    torch.testing.assert_close(fixed.y_train, (plain.y_train - 40) / 20)
    torch.testing.assert_close(fixed.x_train, quietly(given, target="arrival", **keys).x_train)
    both = quietly(given, "number", target=["arrival", "distance"], **keys)
    assert both.y_train.mean(dim=0).abs().max() < 1e-5
    np.testing.assert_allclose(both.in_units(both.y_test)[:, 1], given["distance"][~train], rtol=1e-6)
    series = given | {"arrival": np.stack([given["arrival"], 3 * given["arrival"]], axis=1)}
    lists = quietly(series, "number", target="arrival", **keys)
    assert lists.target_scale is not None
    assert lists.target_scale.tolist() == [[lists.target_scale[0, 0]] * 2, [lists.target_scale[1, 0]] * 2]
    np.testing.assert_allclose(lists.in_units(lists.y_train), series["arrival"][train], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("target", ["arrival", "carrier"])
def test_the_preparation_prepares_other_rows_alike(target: str) -> None:
    """Ten rows alone get the numbers that they have among all: scales, levels and classes are on record."""
    given = flights()
    keys: dict[str, Any] = {"features": ["delay", "carrier" if target == "arrival" else "month"], "target": target}
    keys["categories"] = keys["features"][1:]
    whole = quietly(given, split="test", **keys)
    few = {name: np.asarray(column)[given["test"]][:10] for name, column in given.items()}
    again = quietly({"train": few, "test": few}, whole.target, **keys | json.loads(whole.preparation))
    assert torch.equal(again.x_test, whole.x_test[:10])
    assert torch.equal(again.y_test, whole.y_test[:10])


def test_statistics_of_devices_pool_to_those_of_all_rows() -> None:
    """Whoever adds up, and in whatever order the devices come: the same to the bit."""
    rng = np.random.default_rng(0)
    values, owner = rng.normal(1e6, 3, 5000), rng.integers(0, 40, 5000)
    together = Moments.of(values, owner)
    alone = [Moments.of(values[owner == k]) for k in rng.permutation(40)]
    mixed = Moments(*(np.concatenate([getattr(m, key) for m in alone]) for key in ("count", "mean", "squares")))
    assert together.pooled() == mixed.pooled() == Moments.gathered([m.told() for m in alone]).pooled()
    assert together.pooled() == pytest.approx((values.mean(), values.std()), rel=1e-10)
    assert Moments.of(np.full(7, 0.1)).pooled() == pytest.approx((0.1, 1.0))


def changed(column: str, row: int, value: Any) -> dict[str, Any]:
    columns = {name: np.asarray(values).tolist() for name, values in flights().items()}
    columns[column][row] = value
    return columns


@pytest.mark.parametrize(
    ("source", "data", "said"),
    [
        (flights(), {"features": ["delai"]}, "data.features: .* has no column delai; did you mean delay?"),
        (flights(), {"target": "arival"}, "data.target: .* has no column arival; did you mean arrival?"),
        (flights(), {"device": "plane"}, "data.device: .* has no column plane; it has tailnum, delay"),
        (flights(), {"features": ["delay", "arrival"]}, "names the column arrival twice"),
        (flights(), {"categories": ["month"]}, "data.categories names month, which is not among data.features"),
        (flights(), {"target": "month", "features": ["delay"], "split": "carrier"}, "each row must say train or test"),
        (changed("delay", 5, None), {}, "row 6: delay is empty"),
        (changed("carrier", 5, None), {}, "row 6: carrier is empty"),
        (changed("carrier", 5, " "), {}, "row 6: carrier is empty"),
        (changed("arrival", 5, None), {}, "row 6: arrival is empty"),
        (changed("tailnum", 5, None), {}, "row 6: tailnum is empty"),
        (changed("delay", 5, float("inf")), {}, "row 6: delay inf is not allowed"),
        (flights() | {"arrival": np.full(ROWS, 3.5)}, {}, "arrival is the same in all training rows"),
        (flights() | {"arrival": np.arange(ROWS) - 200}, {}, "may be classes or numbers: give task.name"),
        (flights() | {"arrival": np.arange(ROWS) % 2 + 0.0}, {}, "may be classes or numbers: give task.name"),
        (flights() | {"arrival": ["0.0", "1.0"] * 200}, {}, "may be classes or numbers: give task.name"),
        (flights() | {"arrival": [0, 1] * 199 + [0, 500]}, {}, "row 400: arrival 500 is one of 3 different whole num"),
        (flights() | {"arrival": [0.5] * 399 + [7.0]}, {}, "row 1: arrival 0.5 is not a class"),
        (flights() | {"arrival": ["0.5", "1.5", "2", "late"] * 100}, {}, "row 4: arrival 'late' is not a number"),
        (
            flights(),
            {"target": ["month", "delay"], "features": ["carrier"]},
            "row 1: the targets month, delay are whole",
        ),
        (flights() | {"carrier": [str(i) + "x" for i in range(ROWS)]}, {}, "different texts .* give data.tokenizer"),
        (
            flights() | {"carrier": ["1"] * 399 + ["x"]},
            {},
            "row 400: carrier 'x' is not a number: correct it, or list carrier in data.cat",
        ),
        (
            flights() | {"delay": ["late"] * ROWS, "carrier": ["1"] * ROWS, "arrival": ["x"] * ROWS},
            {},
            "the same in all",
        ),
        (flights(), {"features": None}, "row 1: carrier '..' is not a number: name the features in data.features"),
        (flights() | {"user_id": np.arange(ROWS)}, {"features": None}, "'user_id' looks like an identifier"),
        (flights() | {"delay": np.arange(ROWS)}, {"features": None}, "'delay' has a different whole number in each"),
        (flights(), {"features": ["carrier"], "tokenizer": "words"}, "data.tokenizer: there is no file words"),
        (
            pa.table(flights() | {"delay": [[1.0, 2.0]] * 399 + [[1.0]]}),
            {"features": ["delay"]},
            "row 400: delay has 1 values",
        ),
        (flights(), {"standardise": False, "features": ["delay"], "split": "test"}, None),
        (flights() | {"delay": np.full(ROWS, 1.7e9)}, {"standardise": False}, "row 2: delay 1.7e.09 is too large"),
    ],
)
def test_doubt_is_refused_with_the_key_that_settles_it(source: Any, data: dict[str, Any], said: str | None) -> None:
    keys = {key: value for key, value in (COLUMNS | data).items() if value is not None}
    if said is None:
        quietly(source, **keys)
        return
    with pytest.raises(BadData, match=said):
        quietly(source, **keys)


def test_the_task_settles_what_whole_numbers_are() -> None:
    whole = flights() | {"arrival": np.arange(ROWS) - 200}
    assert quietly(whole, "number", **COLUMNS).target == "number"
    with pytest.raises(BadData, match=r"arrival -200 is negative: number the classes from 0, or list them"):
        quietly(whole, "class", **COLUMNS)
    signs = quietly(flights() | {"arrival": np.arange(ROWS) % 2 * 2 - 1}, **COLUMNS)
    assert (signs.classes, json.loads(signs.preparation)["categories"]["arrival"]) == (2, ["-1", "1"])
    with pytest.raises(BadData, match=r"is 0\.5: a label applies"):
        quietly(flights() | {"delay": np.arange(ROWS) / 2}, "multilabel", features=["month"], target=["delay"])
    with pytest.raises(BadData, match="arrival 'x' is not a number"):
        quietly(flights() | {"arrival": ["x", "y"] * 200}, "number", **COLUMNS)


def test_a_class_that_the_schema_does_not_have() -> None:
    kinds = datasets.Features({"a": datasets.Value("float32"), "kind": datasets.ClassLabel(4)})
    rows = datasets.Dataset.from_dict({"a": [0.5, 1.5, 2.5, 3.5], "kind": [0, 1, 1, 0]}, features=kinds)
    assert quietly(rows).classes == 4
    many = datasets.Features(kinds | {"kind": datasets.ClassLabel(1000)})
    assert quietly(datasets.Dataset.from_dict({"a": [0.5, 1.5, 2.5], "kind": [3, 800, 3]}, many)).classes == 1000
    wrong = pa.table({"a": [0.5, 1.5, 2.5], "kind": [0, -1, 1]}).replace_schema_metadata(rows.data.schema.metadata)
    with pytest.raises(BadData, match="row 2: kind -1 is not one of the 4 classes"):
        quietly(wrong)


def test_columns_are_for_tables(tmp_path: Path) -> None:
    for source in ("digits", Dataset(np.zeros((4, 2)), [0, 1, 0, 1], np.zeros((2, 2)), [0, 1])):
        with pytest.raises(BadData, match=r"data\.features is for tables"):
            quietly(source, features=["a"])


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"state.json": "[]"}, "holds a list"),
        ({"state.json": "{"}, "is not JSON"),
        ({"state.json": '{"_data_files": [{"filename": "../secret.arrow"}]}'}, "does not name data files"),
        ({"state.json": '{"_data_files": [{"filename": "a.arrow"}]}', "a.arrow": "junk"}, "cannot be read as a table"),
        ({"state.json": '{"_data_files": [{"filename": "a.arrow"}]}'}, "cannot read"),
        ({"dataset_dict.json": '{"splits": ["/etc"]}'}, "does not name splits"),
    ],
)
def test_a_damaged_or_hostile_saved_data_set(files: dict[str, str], said: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(BadData, match=said):
        quietly(tmp_path)


@pytest.mark.parametrize(
    ("override", "code", "said"),
    [
        ('data.features=["delai"]', 3, "has no column delai; did you mean delay?"),
        ("data.target=carrier", 3, "names the column carrier twice"),
        ("data.device=month", 0, ""),
        ("data.name=mnst", 3, "did you mean mnist?"),
        ("data.split=1.5", 2, "data.split = 1.5 is not allowed"),
        ("data.standardise={delay=[0, 0]}", 2, "data.standardise"),
        ("data.encoding=hot", 2, "data.encoding = 'hot' is not allowed"),
        ("data.length=5", 3, "data.length is a number of tokens"),
        ('data.featurs=["a"]', 2, "data.featurs is not a key; did you mean features?"),
    ],
)
def test_a_bad_column_ends_in_a_sentence(
    override: str, code: int, said: str, here: Here, write_experiment: Any, table: Path, tmp_path: Path
) -> None:
    data = {"name": str(table), "features": ["delay", "carrier"], "target": "arrival", "device": "tailnum"}
    path = write_experiment(
        data=data,
        fleet={"partition": "natural"},
        clusters={"count": 2, "participation": 0.5},
        local={"steps": 3, "batch": 5, "lr": 0.01},
        accept={"norm_bound": "off"},  # the first cycle's bound is for targets of about 1
    )
    found, _, err = here("run", path, "--workers", 1, "--out", tmp_path / "out", "-o", override)
    assert (found, said in err, "Traceback" in err) == (code, True, False), err
    assert (tmp_path / "out").exists() == (code == 0)


def test_the_real_flights(real_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCLUSTER_DATA", str(real_data))
    if not (real_data / "flights").exists():
        pytest.skip("no flights")
    data = quietly("flights", "number", features=["dep_delay", "distance"], target="arr_delay", device="tailnum")
    assert (data.shape, len(data.y_train), len(data.y_test)) == ((2,), 235_538, 50_592)
    x = np.column_stack([data.x_train.numpy(), np.ones(len(data.x_train))])
    line = np.linalg.lstsq(x, data.y_train.numpy(), rcond=None)[0]
    predicted = np.column_stack([data.x_test.numpy(), np.ones(len(data.x_test))]) @ line
    error = (data.in_units(torch.from_numpy(predicted)) - data.in_units(data.y_test)).numpy()
    assert np.sqrt((error**2).mean()) == pytest.approx(17.6, abs=0.2)


def test_a_straight_line_is_learned_on_the_real_flights(real_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCLUSTER_DATA", str(real_data))
    if not (real_data / "flights").exists():
        pytest.skip("no flights")
    example = fedcluster.load(Path(__file__).parents[2] / "examples" / "flights.toml")
    result = fedcluster.run(example.override(rounds=2))
    assert result.history[-1]["test_rmse"] < 18  # the least squares line in dep_delay has 17.6


def test_a_run_over_columns_is_the_same_from_the_cache(table: Path) -> None:
    experiment = fedcluster.Experiment(
        rounds=2,
        data={"name": str(table), "split": 0.25} | COLUMNS,
        fleet={"partition": "natural"},
        clusters={"count": 2, "participation": 1.0},
        model={"name": "logistic"},
        local={"steps": 4, "lr": 0.05},
        accept={"norm_bound": "off"},
    )
    one, two = (fedcluster.run(experiment).history[-1]["train_loss"] for _ in range(2))
    assert one == two < 1500
