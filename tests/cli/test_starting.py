"""`fedcluster new` writes files that run; `fedcluster runs` lists what was run, whatever it finds."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

import fedcluster
from fedcluster.analysis.starter import COMMENTS, KNOWN
from fedcluster.experiment import SECTIONS, Experiment
from fedcluster.experiment.sections import DATASETS
from fedcluster.runs import directory, listing, metrics
from tests.conftest import Here

Write = Callable[..., Path]
QUICK = ("-o", "rounds=1", "-o", "local.steps=2")


@pytest.fixture(autouse=True)
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedcluster.training.executors.processes.cores", lambda: 1)


def table(path: Path, header: str, row: Callable[[int], str], rows: int = 200) -> None:
    random.seed(0)
    path.write_text("\n".join([header, *map(row, range(rows))]) + "\n")


def test_the_default_file_runs_and_is_not_overwritten(here: Here, tmp_path: Path) -> None:
    code, said, err = here("new")
    assert (code, "fedcluster run digits.toml" in said) == (0, True), err
    assert here("run", "digits.toml", *QUICK)[0] == 0
    code, _, err = here("new")
    assert (code, "digits.toml exists" in err) == (5, True)
    assert here("new", "mnist", "--out", "digits.toml")[0] == 5
    assert fedcluster.load(tmp_path / "digits.toml").data.name == "digits"


@pytest.mark.parametrize("name", DATASETS)
def test_known_data_sets_have_a_file(name: str, here: Here, tmp_path: Path) -> None:
    assert name in KNOWN
    assert here("new", name)[0] == 0
    assert fedcluster.load(tmp_path / f"{name}.toml").data.name == name


def test_a_table_with_classes(here: Here, tmp_path: Path) -> None:
    """Identifiers are left out, texts are categories, and the path holds from wherever the file is."""
    columns = "id,age,city,income,label"
    table(tmp_path / "people.csv", columns, lambda n: f"{n},{n % 70},{'AB'[n % 2]}x,{n / 7:.3f},{'yn'[n % 3 == 0]}")
    (tmp_path / "sub").mkdir()
    code, _, err = here("new", "people.csv", "--out", "sub/mine.toml")
    assert (code, "left out: column 'id' looks like an identifier" in err) == (0, True), err
    experiment = fedcluster.load(tmp_path / "sub" / "mine.toml")
    assert (experiment.data.features, experiment.data.target) == (("age", "city", "income"), "label")
    assert experiment.task.name == "classification"
    assert here("run", "sub/mine.toml", *QUICK)[0] == 0


def test_a_table_with_numbers_and_devices(here: Here, tmp_path: Path) -> None:
    columns = "distance,price,shop"
    table(tmp_path / "shops.csv", columns, lambda n: f"{n / 3:.2f},{random.gauss(0, 1):.5f},shop-{n % 9}")
    code, _, err = here("new", "shops.csv")
    assert (code, "distance, price, shop: say which one to predict, -o data.target=NAME" in err) == (3, True)
    assert not (tmp_path / "shops.toml").exists()
    code, _, err = here("new", "shops.csv", "-o", "data.target=price", "-o", "data.device=shop", "-o", "local.lr=0.02")
    assert code == 0, err
    experiment = fedcluster.load(tmp_path / "shops.toml")
    assert (experiment.task.name, experiment.fleet.partition, experiment.local.lr) == ("regression", "natural", 0.02)
    assert here("run", "shops.toml", *QUICK)[0] == 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["none.csv"], 3, "there is no file or folder none.csv"),
        (["digits", "-o", "data=3"], 2, "data is a section"),
        (["digits", "-o", "rounds"], 2, "write it as key=value"),
        (["digits", "-o", "local.lr=-1"], 2, "local.lr = -1"),
        (["minst"], 3, "did you mean mnist?"),
    ],
)
def test_new_says_what_is_wrong_and_writes_nothing(
    words: list[str], code: int, said: str, here: Here, tmp_path: Path
) -> None:
    ended, _, err = here("new", *words)
    assert (ended, said in err) == (code, True), err
    assert not list(tmp_path.glob("*.toml"))


def test_comments_are_for_keys_that_exist() -> None:
    for path in COMMENTS:
        section, _, key = path.partition(".")
        options = {"fleet.rho_device", "fleet.alpha"}
        assert path in options or key in SECTIONS[section].model_fields if key else section in Experiment.model_fields


def test_an_empty_file_trains_a_model_that_fits_the_data(here: Here, tmp_path: Path) -> None:
    (tmp_path / "empty.toml").touch()
    code, out, err = here("run", "empty.toml", "-o", "rounds=1", "-o", "local.steps=1")
    assert code == 0
    assert "digits: samples are pictures of 8x8, so the model is mlp" in err
    assert "mlp with 55,210 parameters" in out


def test_runs_are_listed_with_their_states(here: Here, write_experiment: Write, tmp_path: Path) -> None:
    assert here("runs")[0] == 5
    (tmp_path / "runs").mkdir()
    assert "no runs in runs" in here("runs")[1]
    path = write_experiment()
    assert here("run", path)[0] == 0
    assert here("run", path)[0] == 0
    assert here("run", write_experiment(local={"lr": 1e30}, model={"name": "mlp"}), "--out", "runs/far/lost")[0] == 4
    assert (tmp_path / "runs/far/lost/diverged.txt").read_text().startswith("round 1: ")
    (tmp_path / "runs/experiment-2/model.safetensors").unlink()
    shown = {line.split()[0]: line.split() for line in here("runs")[1].splitlines() if "/" in line}
    assert shown["experiment"][1:3] == ["finished", "3/3"]
    assert shown["experiment"][4] == "accuracy"
    assert shown["experiment-2"][1:3] == ["interrupted", "3/3"]
    assert shown["far/lost"][1:3] == ["diverged", "0/3"]
    with FileLock(tmp_path / "runs/experiment-2/.lock"):
        assert " running " in here("runs", "runs/experiment-2")[1]


def test_a_resumed_run_no_longer_counts_as_diverged(here: Here, write_experiment: Write, tmp_path: Path) -> None:
    path = write_experiment()
    assert here("run", path, "--out", "out")[0] == 0
    (tmp_path / "out/model.safetensors").unlink()
    (tmp_path / "out/diverged.txt").write_text("round 1: ...")
    assert here("run", path, "--out", "out", "--resume")[0] == 0
    assert not (tmp_path / "out/diverged.txt").exists()


@pytest.mark.parametrize(
    ("name", "content", "state"),
    [
        ("experiment.toml", b"\xff\x00", "damaged"),
        ("experiment.toml", b"rounds = " + b"[" * 5000, "damaged"),
        ("experiment.toml", b"rounds = 'many'", "damaged"),
        ("metrics.jsonl", b"\xff\n" * 100, "finished"),
        ("metrics.jsonl", b"[" * 100_000 + b"\n", "finished"),
        ("metrics.jsonl", b'{"round": "x"}\n{"round": 1, "train_loss": [], "test_\\u001b[31m": 1}\n', "finished"),
        ("metrics.jsonl", b"9" * 5000 + b"\n", "finished"),
        ("metrics.jsonl", b"", "finished"),
    ],
)
def test_damaged_folders_are_listed(name: str, content: bytes, state: str, here: Here, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    for file, text in (("experiment.toml", "rounds = 2"), ("run.json", "{"), ("model.safetensors", "")):
        (run / file).write_text(text)
    (run / name).write_bytes(content)
    (tmp_path / "runs" / "loop").symlink_to(tmp_path / "runs")
    code, out, _ = here("runs")
    assert (code, state in out, out.count("one"), "\x1b" in out) == (0, True, 1, False)


def test_folders_that_cannot_be_read_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()

    def refuse(self: Path) -> None:
        raise PermissionError(13, "Permission denied", os.fspath(self))

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert listing.list_runs(tmp_path) == []


def test_the_list_looks_for_what_runs_write() -> None:
    assert (listing.METRICS, listing.MODEL, listing.DIVERGED) == (metrics.METRICS, directory.MODEL, directory.DIVERGED)
    assert json.loads("{}") == listing.last_line(Path("nowhere"))
