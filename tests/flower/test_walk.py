"""The walk-through of a federation, in short. Its commands are forked from a process that has imported fedcluster
already: ten processes that import torch would take most of the time."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from fedcluster.flower.superlink import free_port
from tests.forked import Forked

pytestmark = pytest.mark.xdist_group("federation")

WALK = Path(__file__).parents[2] / "examples/federation/walk.py"


def test_the_walk_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    serve_log = tmp_path / "serve.log"

    def popen(words: list[str], stdout: IO[bytes] | None = None, stderr: Any = None) -> Forked:
        assert words[:3] == [sys.executable, "-m", "fedcluster"]
        log = serve_log if stdout is None else Path(stdout.name).resolve()
        return Forked("fedcluster", words[3:], Path.cwd(), {}, log)

    def run(words: list[str]) -> SimpleNamespace:
        return SimpleNamespace(returncode=popen(words).wait(600))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.Popen", popen)
    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.setattr(sys, "argv", ["walk.py", "fed", "--rounds", "2", "--port", str(free_port())])
    runpy.run_path(str(WALK), run_name="__main__")

    printed = capsys.readouterr().out
    assert printed.count("$ fedcluster join") == 8
    assert "Plot saved to" in printed
    served = serve_log.read_text()
    assert "cluster 0: 300 samples on devices 6, 7 (America/Los_Angeles, America/New_York)" in served
    out = tmp_path / "fed/out"
    assert (out / "curves.png").stat().st_size > 10_000
    cycles = [json.loads(line) for line in (out / "cycles.jsonl").read_text().splitlines()]
    assert [cycle["cohort"] for cycle in cycles] == [[6, 7], [0, 1], [2, 3], [4, 5]] * 2
    assert all(cycle["changed"] for cycle in cycles)

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="fed is not empty: choose another folder"):
        runpy.run_path(str(WALK), run_name="__main__")
