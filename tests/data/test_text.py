"""Text as tokens, and the data sets that are known by name in the form of the hub and in a local one."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from fedcluster import Dataset
from fedcluster.data import sources, text
from fedcluster.data.sources import open_dataset
from fedcluster.data.targets import IGNORED
from fedcluster.errors import BadData
from fedcluster.experiment import Data

SPEECHES = {
    "HAMLET": ["To be, or not to be,", "that is the question."],
    "OPHELIA": ["Good my lord, how does your honour for this many a day?"],
}


def quietly(source: Any, kind: str | None = None, /, **data: Any) -> Dataset:
    name = str(source) if isinstance(source, Path) else source
    return open_dataset(Data(name=name, **data), lambda text: None, kind)


def rows() -> dict[str, list[str]]:
    return {
        "role": [role for role, speeches in SPEECHES.items() for _ in speeches],
        "text": [speech for speeches in SPEECHES.values() for speech in speeches],
    }


def read(x: torch.Tensor, y: torch.Tensor, alphabet: list[str]) -> tuple[str, str]:
    """What the windows of one device say, and what is to be predicted."""
    counts = y != IGNORED
    return "".join(alphabet[t - 1] for t in x[counts]), "".join(alphabet[t - 1] for t in y[counts])


def test_every_character_but_the_first_is_predicted_once() -> None:
    data = quietly(
        {"train": rows(), "test": rows()}, features=["text"], device="role", tokenizer="characters", length=7
    )
    whole = {role: "\n".join(speeches) for role, speeches in SPEECHES.items()}
    alphabet = sorted(set("".join(whole.values())))
    assert (data.target, data.vocabulary, data.outputs) == ("token", len(alphabet) + 1, len(alphabet) + 1)
    assert data.device_train is not None
    for role, speech in whole.items():
        mine = torch.from_numpy(data.device_train == role)
        assert int(mine.sum()) == -(-(len(speech) - 1) // 7)
        assert read(data.x_train[mine], data.y_train[mine], alphabet) == (speech[:-1], speech[1:])


def test_without_a_test_part_the_end_of_every_text_is_held_out() -> None:
    data = quietly(rows(), features=["text"], device="role", tokenizer="bytes", length=5)
    said = bytes(data.y_test[data.y_test != IGNORED].tolist()).decode()
    assert said == "estion.any a day?"  # but the first byte of each, which nothing comes before
    assert (data.vocabulary, data.x_train.max() < 256) == (256, True)
    whole = sum(len("\n".join(speeches)) for speeches in SPEECHES.values())
    predicted = int((data.y_train != IGNORED).sum()) + int((data.y_test != IGNORED).sum())
    assert predicted == whole - 4  # but the first character of each of the two parts of two texts


def test_a_character_that_the_training_part_does_not_have() -> None:
    parts = {"train": {"text": ["abcabc"]}, "test": {"text": ["abzc"]}}
    data = quietly(parts, features=["text"], tokenizer="characters", length=4)
    assert data.x_test.tolist() == [[1, 2, 0, 0]]
    assert data.y_test.tolist() == [[2, 0, 3, IGNORED]]


def test_text_is_classified_cut_or_padded() -> None:
    table = {"text": ["good", "bad", "so good it hurts", "bad bad bad"] * 5, "label": ["pos", "neg"] * 10}
    data = quietly(table, features=["text"], tokenizer="bytes", length=6)
    assert (data.target, data.classes, data.shape, data.vocabulary) == ("class", 2, (6,), 256)
    assert bytes(data.x_train[data.x_train[:, 0] == ord("g")][0].tolist()) == b"good\0\0"
    assert {bytes(row.tolist()) for row in data.x_train} <= {b"good\0\0", b"bad\0\0\0", b"so goo", b"bad ba"}


def test_a_tokenizer_from_disk(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="the library tokenizers is not installed")
    words = {word: i for i, word in enumerate(["[UNK]", "to", "be", "or", "not"])}
    about = {
        "version": "1.0",
        "pre_tokenizer": {"type": "Whitespace"},
        "normalizer": {"type": "Lowercase"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(about))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        parts = {"train": {"text": ["To be or not to be question"]}, "test": {"text": ["be or not"]}}
        data = quietly(parts, features=["text"], tokenizer=str(path), length=6)
        assert data.x_train.tolist() == [[1, 2, 3, 4, 1, 2]]
        assert data.y_train.tolist() == [[2, 3, 4, 1, 2, 0]]
        assert data.vocabulary == 5
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Other"}}')
    with pytest.raises(BadData, match=r"tokenizer\.json is not a tokenizer"):
        quietly({"text": ["a b c"]}, features=["text"], tokenizer=str(tmp_path), length=6)


@pytest.mark.parametrize(
    ("source", "data", "target", "said"),
    [
        ({"text": ["a"]}, {"features": ["text"], "tokenizer": "bytes"}, None, "no text of two tokens"),
        ({"text": ["ab"] * 9}, {"features": ["text"]}, None, "no label column among text: name the target"),
        (
            {"text": ["ab"] * 9},
            {"features": ["text"]},
            "token",
            "name one column of text in data.features, and data.tok",
        ),
        (
            {"text": ["ab"] * 9, "y": [1] * 9},
            {"target": "y", "tokenizer": "bytes"},
            "token",
            "task next_token predicts",
        ),
        ({"text": ["ab", None] * 9}, {"features": ["text"], "tokenizer": "bytes"}, None, "row 2: text is empty"),
        ({"text": [1, 2] * 9}, {"features": ["text"], "tokenizer": "bytes"}, None, "name one column of text"),
        (
            {"text": ["ab", "c"] * 9, "a": [1.5] * 18, "label": [0, 1] * 9},
            {"tokenizer": "bytes"},
            None,
            r"column text \(text\) cannot be combined with other features",
        ),
    ],
)
def test_bad_text_is_refused(source: Any, data: dict[str, Any], target: str | None, said: str) -> None:
    with pytest.raises(BadData, match=said):
        quietly(source, target, **data)


def test_windows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedcluster.inputs.total_memory", lambda: 10**6)
    with pytest.raises(BadData, match="at most"):
        text.windows(["ab" * 10] * 3, text.Bytes(), 100_000, "file")


def leaf(length: int = 10) -> datasets.Dataset:
    """The speeches as flwrlabs/shakespeare has them: a window and the next character, at every place."""
    found: dict[str, list[str]] = {"character_id": [], "x": [], "y": []}
    for role, speeches in SPEECHES.items():
        whole = "\n".join(speeches)
        for i in range(len(whole) - length):
            for name, value in (("character_id", role), ("x", whole[i : i + length]), ("y", whole[i + length])):
                found[name].append(value)
    return datasets.Dataset.from_dict(found)


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Neither a cache nor a data folder that knows anything; asking the hub fails the test."""
    monkeypatch.setenv("FEDCLUSTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDCLUSTER_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(datasets, "load_dataset", lambda name: pytest.fail(f"{name} was asked of the hub"))
    return tmp_path / "data"


@pytest.mark.parametrize("name", ["shakespeare", "flwrlabs/shakespeare"])
def test_shakespeare_in_the_form_of_the_hub(name: str, away: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def load(name: str) -> Any:
        asked.append(name)
        return datasets.DatasetDict(train=leaf())

    monkeypatch.setattr(datasets, "load_dataset", load)
    data = quietly(name, length=7)
    monkeypatch.setenv("FEDCLUSTER_CACHE", str(away / "another"))
    same = quietly(
        {"role": list(SPEECHES), "text": ["\n".join(s) for s in SPEECHES.values()]},
        features=["text"],
        device="role",
        tokenizer="characters",
        length=7,
    )
    assert data.digest() == same.digest()
    assert asked == ["flwrlabs/shakespeare"]
    assert data.device_train is not None
    assert set(data.device_train) == set(SPEECHES)


def test_rows_of_the_hub_in_another_order_stand_alone(away: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shuffled = leaf().select(np.random.default_rng(0).permutation(len(leaf())))
    monkeypatch.setattr(datasets, "load_dataset", lambda name: {"train": shuffled, "test": shuffled})
    data = quietly("shakespeare", length=10)
    assert int((data.y_train != IGNORED).sum()) >= len(shuffled)


def test_shakespeare_in_the_local_form(away: Path) -> None:
    (away / "shakespeare").mkdir(parents=True)
    for split in ("train", "test"):
        datasets.Dataset.from_dict(rows()).to_parquet(away / "shakespeare" / f"{split}.parquet")
    data = quietly("shakespeare")
    assert (data.target, data.shape) == ("token", (80,))


def writers(count: int = 20) -> datasets.Dataset:
    """Rows as flwrlabs/femnist has them."""
    kinds = datasets.Features(
        {
            "image": datasets.Image(),
            "writer_id": datasets.Value("string"),
            "hsf_id": datasets.Value("int64"),
            "character": datasets.ClassLabel(62),
        }
    )
    pictures = [Image.fromarray(np.full((28, 28), i, np.uint8)) for i in range(count)]
    names = [f"f{i % 4:04d}_14" for i in range(count)]
    columns = {"image": pictures, "writer_id": names, "hsf_id": [0] * count, "character": [i % 5 for i in range(count)]}
    return datasets.Dataset.from_dict(columns, features=kinds)


@pytest.mark.parametrize("local", [True, False])
def test_femnist(local: bool, away: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if local:
        (away / "femnist").mkdir(parents=True)
        writers().to_parquet(away / "femnist" / "train.parquet")
    else:
        monkeypatch.setattr(datasets, "load_dataset", lambda name: datasets.DatasetDict(train=writers()))
    data = quietly("femnist")
    assert (data.shape, data.classes, len(data.y_train), len(data.y_test)) == ((1, 28, 28), 62, 16, 4)
    assert data.device_train is not None
    assert set(data.device_train) == {"f0000_14", "f0001_14", "f0002_14", "f0003_14"}
    assert (data.x_train[:, 0, 0, 0] % 5 == data.y_train).all()


@pytest.mark.parametrize(
    ("name", "meant"), [("mnst", "mnist"), ("shakspeare", "shakespeare"), ("cifar", "cifar10"), ("fligts", "flights")]
)
def test_a_typing_error_is_answered_without_the_network(name: str, meant: str, away: Path) -> None:
    (away / "flights").mkdir(parents=True)
    (away / "flights" / "train.csv").write_text("a,label\n")
    with pytest.raises(BadData, match=rf"did you mean {meant}\?"):
        quietly(name)


def test_a_typing_error_in_an_id_is_suspected_before_the_network_is_asked(
    away: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def offline(name: str) -> None:
        assert said
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(BadData, match=r"did you mean ylecun/mnist\?"):
        open_dataset(Data(name="ylecun/mnst"), said.append)
    assert said == ["fetching ylecun/mnst from the Hugging Face hub, once; did you mean ylecun/mnist?"]


@pytest.mark.parametrize("name", ["shakespeare", "flwrlabs/shakespeare"])
def test_a_known_name_that_cannot_be_fetched_is_no_typing_error(
    name: str, away: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(name: str) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(BadData, match=r"cannot load flwrlabs/shakespeare \(no network\)") as caught:
        quietly(name)
    assert "did you mean" not in str(caught.value)


def test_a_folder_of_the_data_folder_has_its_name(away: Path) -> None:
    (away / "pets").mkdir(parents=True)
    (away / "pets" / "train.csv").write_text("a,label\n" + "".join(f"{i / 3},{i % 2}\n" for i in range(10)))
    assert quietly("pets").classes == 2
    assert sources.folders() == ["pets"]


def test_the_real_shakespeare(real_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCLUSTER_DATA", str(real_data))
    if not (real_data / "shakespeare").exists():
        pytest.skip("no shakespeare")
    data = quietly("shakespeare")
    assert data.device_train is not None
    assert (data.shape, data.target, len(set(data.device_train))) == ((80,), "token", 141)
    assert int((data.y_train != IGNORED).sum()) == pytest.approx(768_448, rel=0.01)
