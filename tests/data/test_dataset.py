"""Every way in which data can come, and how bad data are turned away."""

import os
import zipfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from fedcluster import Dataset
from fedcluster.data import images as pictures
from fedcluster.data import npz, sources
from fedcluster.data.sources import open_dataset
from fedcluster.errors import BadData
from fedcluster.experiment import Data
from fedcluster.models.flat_model import FlatModel
from tests.conftest import blobs


def test_digits() -> None:
    data = open_dataset("digits")
    assert (data.shape, data.classes, len(data.y_train), len(data.y_test)) == ((1, 8, 8), 10, 1438, 359)
    assert data.x_train.max() == 1


def test_the_embedded_digits_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    expected = sources.hold_out({"x_train": (x / 16).reshape(-1, 1, 8, 8), "y_train": y}, None)
    for key, values in sources.digits().items():
        np.testing.assert_array_equal(values, expected[key], strict=True)


def test_a_function_that_needs_arguments_gives_no_data() -> None:
    with pytest.raises(BadData, match="os:system must be a function without arguments"):
        open_dataset("os:system")


def test_npz_keeps_floats_as_they_are(tmp_path: Path) -> None:
    arrays = blobs()
    np.savez(tmp_path / "data.npz", **arrays)
    data = open_dataset(str(tmp_path / "data.npz"))
    assert torch.equal(data.inputs(data.x_train), torch.from_numpy(arrays["x_train"]))
    assert data.device_train is not None


def test_bytes_are_standardised_by_channel() -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, [100, 200, 250], size=(50, 6, 6, 3)).astype(np.uint8)
    data = Dataset(x, np.zeros(50, int), x[:5], np.zeros(5, int))
    assert data.shape == (3, 6, 6)
    seen = data.inputs(data.x_train)
    torch.testing.assert_close(seen.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(seen.std(dim=(0, 2, 3)), torch.ones(3), atol=1e-3, rtol=0)
    by_hand = (x / 255 - (x / 255).mean(axis=(0, 1, 2))) / (x / 255).std(axis=(0, 1, 2))
    np.testing.assert_allclose(seen.numpy(), by_hand.transpose(0, 3, 1, 2), atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"x_train": np.zeros((3, 2))}, "one label for each of the 3 samples"),
        ({"y_train": None}, "lacks y_train"),
        ({"y_train": "float"}, "y_train is float64 but y_test is int64; they must match"),
        ({"x_train": "nan"}, "not finite"),
        ({"x_test": np.zeros((40, 9), np.float32)}, "they must match"),
        ({"device_train": np.zeros(3)}, "device_train must name one device"),
        ({"x_train": np.array([{"a": 1}] * 3, dtype=object)}, "of plain arrays"),
    ],
)
def test_bad_arrays_are_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    arrays = blobs()
    for name, value in changes.items():
        if value is None:
            del arrays[name]
        elif isinstance(value, str) and value == "float":
            arrays[name] = arrays[name] + 0.5
        elif isinstance(value, str):
            arrays[name][2] = np.nan
        else:
            arrays[name] = value
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(BadData, match=said):
        open_dataset(str(tmp_path / "data.npz"))


def test_junk_is_not_an_npz(tmp_path: Path) -> None:
    (tmp_path / "junk.npz").write_bytes(b"PK\x03\x04junk")
    with pytest.raises(BadData, match="cannot be read as an"):
        open_dataset(str(tmp_path / "junk.npz"))


def test_an_npz_may_not_unfold_into_gigabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npz, "UNSUSPICIOUS", 100_000)  # of zeros, as a file of gigabytes would take its time
    zeros = np.zeros((50_000, 4), np.float32)
    np.savez_compressed(tmp_path / "bomb.npz", x_train=zeros, y_train=zeros[:, 0], x_test=zeros, y_test=zeros[:, 0])
    with pytest.raises(BadData, match=r"would expand to .* more than 100 times its size"):
        open_dataset(str(tmp_path / "bomb.npz"))


def test_an_array_may_not_promise_more_than_it_holds(tmp_path: Path) -> None:
    arrays = blobs()
    np.savez(tmp_path / "data.npz", **arrays)
    with zipfile.ZipFile(tmp_path / "data.npz") as honest, zipfile.ZipFile(tmp_path / "lie.npz", "w") as lie:
        for name in honest.namelist():
            content = honest.read(name)
            if name == "x_train.npy":
                header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 5), }".ljust(117) + b"\n"
                content = content[:10] + header + content[128:]
            lie.writestr(name, content)
    with pytest.raises(BadData, match=r"x_train.npy says that it has the shape \[1000000000000, 5\]"):
        open_dataset(str(tmp_path / "lie.npz"))


def test_csv_with_names_for_labels_and_a_device_column(tmp_path: Path) -> None:
    rows = "".join(f"{i},{i * 2},{'cat' if i % 2 else 'ant'},phone{i % 3}\n" for i in range(10))
    (tmp_path / "table.csv").write_text("a,b,label,device\n" + rows)
    said: list[str] = []
    data = open_dataset(Data(name=str(tmp_path / "table.csv"), standardise=False), said.append)
    assert (data.shape, data.classes, len(data.y_train), len(data.y_test)) == ((2,), 2, 8, 2)
    assert data.device_train is not None
    assert set(data.device_train) <= {"phone0", "phone1", "phone2"}
    assert all((row[0] % 2 == 1) == (label == 1) for row, label in zip(data.x_train, data.y_train, strict=True))
    assert any("held out" in text for text in said)


def test_a_table_without_labels_is_refused(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("a,b\n1,2\n3,4\n")
    with pytest.raises(BadData, match="no label column among a, b"):
        open_dataset(str(tmp_path / "table.csv"))


def rows_of(count: int, first: int = 0) -> str:
    return "a,label\n" + "".join(f"{i + 0.5},{i % 2}\n" for i in range(first, first + count))


def quietly(path: Path | str) -> Dataset:
    return open_dataset(str(path), lambda text: None)


@pytest.mark.parametrize(("name", "other"), [("run[1].csv", "run1.csv"), ("t?.csv", "t1.csv"), ("a*.csv", "ab.csv")])
def test_a_path_is_not_a_pattern(name: str, other: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(rows_of(10))
    (tmp_path / other).write_text(rows_of(50, first=100))
    data = quietly(tmp_path / name)
    assert len(data.y_train) + len(data.y_test) == 10
    assert float(data.x_train.max()) < 100


def test_a_folder_of_pictures_is_not_a_pattern(tmp_path: Path) -> None:
    for folder, count in (("pets[1]", 4), ("pets1", 8)):
        for i in range(count):
            (tmp_path / folder / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
            picture(i).save(tmp_path / folder / "ab"[i % 2] / f"{i}.png")
    data = quietly(tmp_path / "pets[1]")
    assert len(data.y_train) + len(data.y_test) == 4


def test_a_changed_file_of_the_same_size_and_time_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(rows_of(10))
    before, status = quietly(path), path.stat()
    path.write_text(rows_of(10).replace("7.5,", "9.5,"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    assert not torch.equal(quietly(path).x_train, before.x_train)


def test_a_picture_is_never_read_by_the_path_in_a_table(tmp_path: Path) -> None:
    picture(0).save(tmp_path / "secret.png")
    rows = [{"image": {"bytes": None, "path": str(tmp_path / "secret.png")}, "label": i % 2} for i in range(4)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "table.parquet")
    with pytest.raises(BadData, match="picture 0 is missing: the table must hold its bytes"):
        quietly(tmp_path / "table.parquet")


def test_the_name_of_a_reader_is_not_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's "csv" would read whatever lies in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "private.csv").write_text(rows_of(10))
    for name in ("csv", "text", "a b", "a/b/c"):
        with pytest.raises(BadData, match="nor a Hugging Face id"):
            open_dataset(name)


@pytest.mark.parametrize("label", [2**63, 2**64 - 1, 10**9])
def test_large_labels_are_refused_before_they_wrap(label: int, tmp_path: Path) -> None:
    arrays = blobs()
    arrays["y_train"] = arrays["y_train"].astype(np.uint64)
    arrays["y_train"][3] = label
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(BadData, match=rf"y_train of data\.npz has the label {label}: number the classes from 0"):
        quietly(tmp_path / "data.npz")
    table = {"a": np.arange(len(arrays["y_train"])) / 2, "label": arrays["y_train"]}
    pq.write_table(pa.table(table), tmp_path / "table.parquet")
    with pytest.raises(BadData, match=f"row 4: label {label} is too large for a class"):
        open_dataset(str(tmp_path / "table.parquet"), lambda text: None, "class")


def test_the_compiled_engine_refuses_labels_and_rows_that_do_not_exist() -> None:
    data = Dataset(np.ones((4, 3), np.float32), np.arange(4), np.ones((1, 3), np.float32), np.zeros(1, int))
    flat_model = FlatModel(torch.nn.Sequential(torch.nn.Linear(3, 2)))
    if flat_model.network is None:
        pytest.skip("no compiler")
    with pytest.raises(ValueError, match="labels from 0 to 3, but the network scores 2 classes"):
        flat_model.network.sgd(data, torch.tensor([[0, 2]]), 0.1)
    with pytest.raises(ValueError, match="a row is not one of the 4 samples"):
        flat_model.network.sgd(data, torch.tensor([[0, 4]]), 0.1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,target\n1.5,0.25\n2.5,7\n", r"line 2: target 0.25 is not a class"),
        ("user_id,a,label\n7,1.5,0\n7,2.5,1\n", "column 'user_id' looks like an identifier"),
        ("userId,a,label\n7,1.5,0\n7,2.5,1\n", "column 'userId' looks like an identifier"),
        (",a,label\n0,1.5,0\n1,2.5,1\n", "column '' looks like an identifier"),
        (
            "n,label\n" + "".join(f"{i},{i % 2}\n" for i in range(100)),
            "column 'n' has a different whole number in each",
        ),
        ("a,city,label\n1,Rome,0\n2,Paris,1\n", "line 2: city 'Rome' is not a number"),
        ("a,b,label\n1,2,0\n2,x,1\n3,4,0\n", "line 3: b 'x' is not a number"),
        ("a,b,label\n1,2,0\n2,,1\n3,4,0\n", "line 3: b is empty"),
        ("a,b,label\n1,2,0\n2,٣,1\n3,4,0\n", "line 3: b '٣' is not a number"),
        ("a,label\n1,0\n2,\n3,1\n", "line 3: label is empty"),
        ("a,label\n1,0\n2,1\n3,cat\n", "line 4: label is 'cat', but other rows have numbers"),
        ("a,label\n1,0\n2,nan\n3,1\n", "line 3: label nan is not a class"),
        ("a,label,device\n1,0,x\n2,1,\n", "line 3: device is empty"),
        (
            "a,label\n1,0\n2,1000000000\n",
            "line 3: label 1000000000 is one of 2 different whole numbers, which may be classes or numbers",
        ),
        ("a,label\n1,0\n2\n", "line 3: 1 cells, but the first line names 2 columns"),
        ("a,a,label\n1,2,0\n", "names the column 'a' twice"),
        (b"a,label\n1,0\n2\xff,1,7\n", "line 3: not UTF-8 text"),
        ("a,label\n", "has no rows"),
        ("label\n0\n1\n", "no columns besides label, so there are no features"),
    ],
)
def test_doubt_in_a_table_is_refused_by_column_and_line(text: str | bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(BadData, match=said):
        quietly(tmp_path / "table.csv")


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ([0.0, float("nan")], "row 2: label nan is not a class"),
        ([0, None], "row 2: label is empty"),
        ([{"a": 0}, {"a": 1}], "column label must be whole numbers or the names of classes, but is struct"),
        ([b"x", b"y"], "column label must be whole numbers or the names of classes, but is binary"),
    ],
)
def test_labels_of_other_kinds_are_refused(column: list[Any], said: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [0.5, 1.5], "label": column}), tmp_path / "table.parquet")
    with pytest.raises(BadData, match=said):
        quietly(tmp_path / "table.parquet")


def test_columns_of_a_parquet_table(tmp_path: Path) -> None:
    """Bytes stay bytes, categories are classes, numbers of devices are ordered as numbers."""
    rows = 20
    table: dict[str, Any] = {f"p{i}": np.arange(rows).astype(np.uint8) for i in range(3)}
    table |= {"label": pa.array(["b", "a"] * 10).dictionary_encode(), "device": [10, 2] * 10}
    pq.write_table(pa.table(table), tmp_path / "table.parquet")
    data = quietly(tmp_path / "table.parquet")
    assert (data.x_train.dtype, data.shape, data.classes) == (torch.uint8, (3,), 2)
    assert (data.x_train[:, 0] % 2 == 1 - data.y_train).all()
    assert data.device_train is not None
    assert np.unique(data.device_train).tolist() == [2, 10]


def test_splits_must_have_the_same_columns_and_classes(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a,b,label\n1,2,x\n2,3,z\n")
    (tmp_path / "test.csv").write_text("a,b,label\n1,2,y\n")
    data = quietly(tmp_path)
    assert (data.classes, data.y_train.tolist(), data.y_test.tolist()) == (3, [0, 2], [1])
    (tmp_path / "test.csv").write_text("a,label\n1,y\n")
    with pytest.raises(BadData, match=r"test\.csv has no column b, which"):
        quietly(tmp_path)


def test_data_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = datasets.Features({"img": datasets.Image(), "kind": datasets.ClassLabel(2)})
    split = datasets.Dataset.from_dict({"img": [picture(i) for i in range(4)], "kind": [0, 1, 1, 0]}, features=kinds)
    monkeypatch.setenv("FEDCLUSTER_CACHE", str(tmp_path))
    monkeypatch.setattr(datasets, "load_dataset", lambda name: {"train": split, "validation": split})
    data = quietly("someone/pets")
    assert (data.shape, data.y_train.tolist()) == ((1, 9, 9), [0, 1, 1, 0])
    np.testing.assert_array_equal(data.x_test[3, 0].numpy(), np.asarray(picture(3)))


def picture(seed: int, size: int = 9) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (size, size), np.uint8))


def test_an_image_folder(tmp_path: Path) -> None:
    for i in range(10):
        folder = tmp_path / "pets" / ("cat" if i % 2 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        picture(i).save(folder / f"{i}.png")
    data = open_dataset(str(tmp_path / "pets"))
    assert (data.shape, data.classes, len(data.y_train), len(data.y_test)) == ((1, 9, 9), 2, 8, 2)
    assert data.x_train.dtype == torch.uint8


def test_pictures_of_unequal_size_are_refused(tmp_path: Path) -> None:
    for i in range(4):
        folder = tmp_path / "pets" / ("cat" if i % 2 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        picture(i, size=9 + i).save(folder / f"{i}.png")
    with pytest.raises(BadData, match="resize them to one size"):
        open_dataset(str(tmp_path / "pets"))


@pytest.fixture
def small_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """$FEDCLUSTER_DATA with a tiny mnist in the layout of the hub, and a cache that knows nothing of it."""
    monkeypatch.setenv("FEDCLUSTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDCLUSTER_DATA", str(tmp_path / "data"))
    (tmp_path / "data" / "mnist").mkdir(parents=True)
    for split, n in (("train", 20), ("test", 10)):
        rows = {"image": [picture(i, 28) for i in range(n)], "label": [i % 10 for i in range(n)]}
        kinds = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(10)})
        datasets.Dataset.from_dict(rows, features=kinds).to_parquet(tmp_path / "data" / "mnist" / f"{split}.parquet")
    return tmp_path / "data"


def test_a_known_name_is_found_in_the_data_folder_and_decoded_once(
    small_mnist: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_dataset("mnist")
    assert (first.shape, len(first.y_train), len(first.y_test)) == ((1, 28, 28), 20, 10)
    np.testing.assert_array_equal(first.x_train[3, 0].numpy(), np.asarray(picture(3, 28)))
    monkeypatch.setattr(pictures, "decoded", lambda *_: pytest.fail("decoded twice"))
    assert torch.equal(open_dataset("mnist").x_train, first.x_train)


def test_what_another_version_has_decoded_is_decoded_again(
    small_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_dataset("mnist", lambda line: None)
    open_dataset("mnist", lambda line: None)
    assert len(list((tmp_path / "cache").glob("*.npz"))) == 1
    monkeypatch.setattr(sources, "readers_version", lambda: "another")
    open_dataset("mnist", lambda line: None)
    assert len(list((tmp_path / "cache").glob("*.npz"))) == 2


def test_a_damaged_cache_is_decoded_again(small_mnist: Path, tmp_path: Path) -> None:
    first = open_dataset("mnist")
    (cached,) = (tmp_path / "cache").glob("*.npz")
    cached.write_bytes(cached.read_bytes()[:100])
    said: list[str] = []
    assert torch.equal(open_dataset("mnist", said.append).x_train, first.x_train)
    assert any("decoding again" in text for text in said)


def test_the_real_mnist(real_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCLUSTER_DATA", str(real_data))
    data = open_dataset("mnist")
    assert (data.shape, len(data.y_train), len(data.y_test)) == ((1, 28, 28), 60_000, 10_000)
    assert np.bincount(data.y_train)[:3].tolist() == [5923, 6742, 5958]
    assert float((data.x_train / 255).mean()) == pytest.approx(0.1307, abs=1e-4)


@pytest.mark.parametrize("label", [-1, -100])
def test_a_negative_label_is_named(label: int) -> None:
    arrays = blobs()
    arrays["y_train"] = np.where(np.arange(len(arrays["y_train"])) == 3, label, arrays["y_train"])
    with pytest.raises(BadData, match=f"y_train of data has the label {label}: number the classes from 0"):
        Dataset(**arrays)


LISTED = Data(categories={"label": ("ant", "bee", "cat")})


def one_device(folder: Path, rows: str, data: Data = LISTED) -> Dataset:
    folder.mkdir()
    (folder / "train.csv").write_text("a,label\n" + rows)
    return sources.open_device(data.model_copy(update={"name": str(folder), "features": ("a",)}), "class")


def test_devices_of_a_federation_number_classes_alike(tmp_path: Path) -> None:
    first = one_device(tmp_path / "first", "".join(f"{i / 3},cat\n" for i in range(5)))
    second = one_device(tmp_path / "second", "".join(f"{i / 3},{'bee' if i % 2 else 'ant'}\n" for i in range(10)))
    assert (first.classes, first.y_train.unique().tolist()) == (3, [2])
    assert (second.classes, second.y_train.unique().tolist()) == (3, [0, 1])
    with pytest.raises(BadData, match=r"line 3: label 'dog' is not among the classes that data.categories lists"):
        one_device(tmp_path / "third", "0.5,cat\n1.5,dog\n")
    for name, rows in (
        ("texts", "0.5,cat\n1.5,ant\n"),
        ("negative", "0.5,-1\n1.5,1\n"),
        ("floats", "0.5,1.0\n1,2.0\n"),
    ):
        with pytest.raises(BadData, match="number them in the same way: use whole numbers from 0, or list the classes"):
            one_device(tmp_path / name, rows, Data())
    assert one_device(tmp_path / "numbers", "".join(f"{i / 3},4\n" for i in range(5)), Data()).y_train.unique() == 4


def test_folders_of_pictures_on_a_device_are_named_by_their_classes(tmp_path: Path) -> None:
    for k in range(2):
        for name in (f"named/{'ab'[k]}", f"numbered/{k}"):
            (tmp_path / name).mkdir(parents=True)
            for i in range(5):
                Image.new("L", (8, 8), 20 * k + i).save(tmp_path / name / f"{i}.png")
    assert sources.open_device(Data(name=str(tmp_path / "numbered")), None).classes == 2
    with pytest.raises(BadData, match=r"name them 0, 1, 2, ... without gaps, or use a table"):
        sources.open_device(Data(name=str(tmp_path / "named")), None)
