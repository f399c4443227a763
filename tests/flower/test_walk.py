"""The walk-through of a federation runs as it stands, in short."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedcluster.flower.superlink import free_port

pytestmark = pytest.mark.xdist_group("federation")

WALK = Path(__file__).parents[2] / "examples/federation/walk.py"


def test_the_walk_through(tmp_path: Path) -> None:
    words = [str(WALK), str(tmp_path / "fed"), "--rounds", "2", "--port", str(free_port())]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "cluster 0: 300 samples on devices 6, 7 (America/Los_Angeles, America/New_York)" in done.stdout
    assert done.stdout.count("$ fedcluster join") == 8
    out = tmp_path / "fed/out"
    assert (out / "curves.png").stat().st_size > 10_000
    turns = [json.loads(line) for line in (out / "cycles.jsonl").read_text().splitlines()]
    assert [turn["cohort"] for turn in turns] == [[6, 7], [0, 1], [2, 3], [4, 5]] * 2
    assert all(turn["changed"] for turn in turns)

    again = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=1200)
    assert (again.returncode, "Traceback" in again.stderr) == (1, False)
    assert "fed is not empty: choose another folder" in again.stderr
