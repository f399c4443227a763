"""Whatever is given, the command ends in one sentence and an exit code, and nothing is allocated for absurd numbers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import typer

from fedcluster import inputs
from fedcluster.cli.common import exit_on_error
from fedcluster.errors import BadData
from tests.conftest import Here, blobs
from torture import inputs as torture

Write = Callable[..., Path]


def ends_plainly(here: Here, *words: Any) -> tuple[int, str]:
    code, _, err = here(*words)
    lines = [line for line in err.splitlines() if line.startswith("fedcluster: ")]
    assert (len(lines), "Traceback" in err) == (1, False), err
    assert len(lines[0]) < 400
    return code, lines[0]


@pytest.mark.parametrize(
    ("override", "code", "said"),
    [
        ("seed=" + "9" * 5000, 2, "seed = '999"),
        ("seed=0x" + "f" * 5000, 2, "seed = a int is not allowed"),
        ("local.steps=" + "[" * 500 + "]" * 500, 2, "nested too deep"),
        ("data.name=" + "[" * 50 + "]" * 50, 2, "data.name = [[["),
        ("data.name=~nosuchuser/x", 3, "there is no such home folder"),
        ("fleet.path=~nosuchuser/x", 3, "there is no such home folder"),
        ("clusters={method='file', path='~nosuchuser/x'}", 3, "there is no such home folder"),
        ("model.init=~nosuchuser/x", 3, "there is no such home folder"),
        ('data.name="a\\u0000b"', 2, "data.name = 'a\\x00b' is not allowed"),
        ('fleet.path="a\\u0000b"', 2, "fleet.path = 'a\\x00b' is not allowed"),
        ("data.name=" + "x" * 5000, 3, "neither a known name"),
        ("model.name=:x", 2, "cannot be imported"),
        ("model.name=.x:y", 2, "cannot be imported"),
        ("model.name=os:path", 2, "is a module"),
        ("model.name=os:getcwd", 2, "os:getcwd cannot be called with (shape, outputs)"),
        ("data.name=os:path", 2, "is a module"),
        ("clusters.method=os:getcwd", 2, "cannot be called with (fleet, rng, options)"),
        ("local.algorithm=builtins:int", 2, "the class builtins:int does not derive from FedAvg"),
        ("local.lr=\udcff", 2, "is not UTF-8 text"),
        ("local.lr=1e300", 2, "less than or equal to 1000000000000000000000000000000"),
        ("local.lr=٣", 2, "local.lr = '٣' is not allowed"),
        ("fleet.devices=1000000000000", 2, "less than or equal to 10000000"),
        ("fleet.devices=10000000", 2, "fleet.devices = 10,000,000, but digits has 1,438 training samples: at most 100"),
        ("fleet.samples=2147483648", 2, "less than or equal to 10000000"),
        ("local.steps=1000000000000", 2, "less than or equal to 1000000"),
        ("local.batch=1000000000000", 2, "less than or equal to 10000000"),
        ("clusters.count=1000000000000", 2, "less than or equal to 1000000"),
        ("local={steps=1000000, batch=10000000}", 2, "local.steps times the batch is 10,000,000,000,000 samples"),
        ("clock.deadline=1e300", 2, "less than or equal to 1000000000"),
        ("fleet.path=/dev/zero", 3, "/dev/zero is not a regular file"),
        ("fleet.availability=/dev/zero", 3, "/dev/zero is not a regular file"),
        ("clusters={method='file', path='/dev/zero'}", 3, "/dev/zero is not a regular file"),
        ("a.b.c.d=1", 2, "is not a key"),
    ],
)
def test_absurd_keys(override: str, code: int, said: str, here: Here, write_experiment: Write) -> None:
    ended = ends_plainly(here, "run", write_experiment(), "-o", override)
    assert (ended[0], said in ended[1]) == (code, True), ended


@pytest.mark.parametrize(
    ("device", "said"), [("meta", "--device meta cannot be used"), ("x", "--device x cannot be used")]
)
def test_absurd_devices(device: str, said: str, here: Here, write_experiment: Write) -> None:
    code, text = ends_plainly(here, "run", write_experiment(), "--device", device)
    assert (code, said in text) == (2, True)


def test_an_experiment_file_that_is_none(here: Here, tmp_path: Path) -> None:
    deep = tmp_path / "deep.toml"
    deep.write_text("a = " + "[" * 5000)
    digits = tmp_path / "digits.toml"
    digits.write_text("seed = " + "9" * 5000)
    for path, code in ((deep, 2), (digits, 2), ("/dev/zero", 3), (tmp_path, 3), (tmp_path / "nosuch.toml", 3)):
        assert ends_plainly(here, "run", path)[0] == code


def test_messages_are_of_one_line_and_not_endless(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), exit_on_error():
        raise BadData("a\x1b[31m\nfile " + "[" * 5000 + ": drop the column")
    err = capsys.readouterr().err
    assert err.startswith("fedcluster: a\\x1b[31m file [[[")
    assert err.endswith("[[: drop the column\n")
    assert len(err) < 1100


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "out of memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "out of memory"),
        (RecursionError("maximum recursion depth exceeded"), "nested too deep"),
        (OverflowError("Python int too large to convert to C long"), "a number in the input is too large"),
    ],
)
def test_the_last_catch(error: Exception, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, exit_on_error():
        raise error
    assert ended.value.exit_code == 10
    assert said in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="a defect"), exit_on_error():
        raise RuntimeError("a defect")


def test_files_have_a_largest_size(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(5 * 2**30)
    with pytest.raises(BadData, match=r"stands for 5\.0 GiB: at most"):
        inputs.read_bytes(path, "fleet.path")


@pytest.mark.parametrize("case", range(len(torture.CASES)))
def test_inputs_are_mutated_the_same_way_for_a_seed(case: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torture, "EARLIER", {"run.json": json.dumps({"a": 1}).encode()})
    one, two = (torture.CASES[case](np.random.default_rng([7, case])) for _ in range(2))
    assert one == two
    assert one[0][0] in ("run", "plan")


def test_an_absurd_loss_is_called_so(here: Here, write_experiment: Write, tmp_path: Path) -> None:
    np.savez(
        tmp_path / "data.npz", **{name: array * (1e6 if name.startswith("x") else 1) for name, array in blobs().items()}
    )
    unbounded = write_experiment(data={"name": "data.npz"}, accept={"norm_bound": "off"})
    code, _, err = here("run", unbounded, "--workers", 1)
    assert (code, "is far too high: lower local.lr, or scale the features" in err) == (0, True)


def test_a_start_that_does_not_fit(here: Here, write_experiment: Write, tmp_path: Path) -> None:
    tensors = {"linear.weight": np.zeros((10, 64), np.float32), "linear.bias": np.full(10, np.inf, np.float32)}
    (tmp_path / "model.safetensors").write_bytes(safetensors.numpy.save(tensors))
    code, text = ends_plainly(here, "run", write_experiment(model={"name": "logistic", "init": "model.safetensors"}))
    assert (code, "not finite" in text) == (3, True)
