"""The examples run as they stand, and what the user writes in them stays short."""

import ast
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedcluster import run
from fedcluster.runs.progress import Display

ROOT = Path(__file__).parents[1]
COMMAND = ROOT / "examples" / "own_command.py"
ALL = sorted(COMMAND.parent.glob("own_*.py"))
EXAMPLES = [path for path in ALL if path != COMMAND]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path) -> None:
    experiment = runpy.run_path(str(path))["experiment"]
    result = run(experiment, display=Display())
    assert result.history[-1].get("test_accuracy", 1) > 0.5  # not every task has it
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]


def test_a_command_of_ones_own(tmp_path: Path, write_experiment: Callable[..., Path]) -> None:
    """As pip installs it: the entry point that the example's docstring declares, in a package's metadata."""
    declared = re.search(r"\[project\.entry-points\.\"(.*)\"\]\n *(.*)", COMMAND.read_text())
    assert declared
    metadata = tmp_path / "own-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    broken = 'broken = "no_such_module:function"'
    (metadata / "entry_points.txt").write_text(f"[{declared[1]}]\n{declared[2]}\n{broken}\n".replace('"', ""))
    path = os.pathsep.join([str(tmp_path), str(COMMAND.parent), str(ROOT)])

    def fedcluster(*words: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "fedcluster", *words]
        return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)

    done = fedcluster("shares", str(write_experiment()))
    assert done.stdout.splitlines() == [f"cluster {number}: 80 samples on 4 devices" for number in range(3)], done
    assert "Print how many samples each cluster holds." in fedcluster("--help").stdout
    wrong = fedcluster("shares", "no-such-file.toml")
    assert (wrong.returncode, "fedcluster: no-such-file.toml: there is no such experiment file\n" in wrong.stderr) == (
        3,
        True,
    )
    wrong = fedcluster("broken")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "the command broken (no_such_module:function) cannot be imported (ModuleNotFoundError" in wrong.stderr


def test_what_a_server_computes_from_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(ROOT / "examples" / "reconstruction.py"))["main"]
    distances = main()
    assert distances["no defence"] < 1e-6
    assert all(distance > 0.3 for name, distance in distances.items() if name != "no defence")
    assert (tmp_path / "reconstruction.png").stat().st_size > 5000
    said = capsys.readouterr().out.partition("labels of the device\n")[2]
    counts = {line[:25].strip(): line[25:].strip() for line in said.splitlines()}
    assert counts.pop("no defence") == counts["true"]
    assert len(set(counts.values())) == 4  # every defence hides them in part


def test_every_seam_has_an_example() -> None:
    """Each row of the table in CONTRIBUTING names a file, and each file is in the table."""
    table = (ROOT / "CONTRIBUTING.md").read_text().split("| to add |")[1].split("\n\n")[0]
    rows = table.splitlines()[2:]
    named = [name for row in rows for name in re.findall(r"`examples/(own_\w+\.py)`", row)]
    assert len(named) == len(rows)
    assert sorted(named) == [path.name for path in ALL]


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_a_new_part_takes_under_thirty_lines(path: Path) -> None:
    tree = ast.parse(path.read_text())
    own = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) != "experiment")
    ]
    assert 0 < sum((node.end_lineno or 0) - node.lineno + 1 for node in own) < 30
