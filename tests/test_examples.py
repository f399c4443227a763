"""The examples run as they stand, and what the user writes in them stays short."""

import ast
import runpy
from pathlib import Path

import pytest

from fedcluster import run
from fedcluster.runs.progress import Display

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("own_*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path) -> None:
    experiment = runpy.run_path(str(path))["experiment"]
    result = run(experiment, display=Display())
    assert result.history[-1]["test_accuracy"] > 0.5
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_new_part_takes_under_thirty_lines(path: Path) -> None:
    tree = ast.parse(path.read_text())
    own = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) != "experiment")
    ]
    assert 0 < sum((node.end_lineno or 0) - node.lineno + 1 for node in own) < 30
