"""Every way in which data can come, and how bad data are turned away."""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from fedcluster import Dataset
from fedcluster.errors import BadData
from fedcluster.sources import open_dataset
from tests.conftest import blobs


def test_digits() -> None:
    data = open_dataset("digits")
    assert (data.shape, data.classes, len(data.y_train), len(data.y_test)) == ((1, 8, 8), 10, 1438, 359)
    assert data.x_train.max() == 1


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
        ({"y_train": "float"}, "must be whole numbers from 0"),
        ({"x_train": "nan"}, "not finite"),
        ({"x_test": np.zeros((40, 9), np.float32)}, "they must be alike"),
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


def test_csv_with_names_for_labels_and_a_device_column(tmp_path: Path) -> None:
    rows = "".join(f"{i},{i * 2},{'cat' if i % 2 else 'ant'},phone{i % 3}\n" for i in range(10))
    (tmp_path / "table.csv").write_text("a,b,label,device\n" + rows)
    said: list[str] = []
    data = open_dataset(str(tmp_path / "table.csv"), said.append)
    assert (data.shape, data.classes, len(data.y_train), len(data.y_test)) == ((2,), 2, 8, 2)
    assert data.device_train is not None
    assert set(data.device_train) <= {"phone0", "phone1", "phone2"}
    assert all((row[0] % 2 == 1) == (label == 1) for row, label in zip(data.x_train, data.y_train, strict=True))
    assert any("held out" in text for text in said)


def test_a_table_without_labels_is_refused(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("a,b\n1,2\n3,4\n")
    with pytest.raises(BadData, match="no label column among a, b"):
        open_dataset(str(tmp_path / "table.csv"))


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
    with pytest.raises(BadData, match="bring them to one size"):
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
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("decoded twice"))
    assert torch.equal(open_dataset("mnist").x_train, first.x_train)


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
