"""Two runs are bit-identical, and so is a run that was killed, at any moment, and resumed."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import fedcluster
from fedcluster import checkpoint, record
from fedcluster.display import Display
from fedcluster.errors import BadRun

KEYS: dict[str, Any] = {
    "rounds": 6,
    "fleet": {"devices": 20, "samples": 30},
    "clusters": {"count": 4, "participation": 0.5},
    "model": {"name": "mlp"},
    "local": {"steps": 5, "batch": 8, "optimizer": "adam"},
}
EXPERIMENT = fedcluster.Experiment(**KEYS)


def essence(folder: Path) -> tuple[bytes, list[dict[str, Any]], list[dict[str, Any]]]:
    """What two runs must share to the bit: all but the times."""
    lines = []
    for name in ("metrics.jsonl", "cycles.jsonl"):
        rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        lines.append([{k: v for k, v in row.items() if k not in ("seconds", "elapsed")} for row in rows])
    return (folder / "model.safetensors").read_bytes(), lines[0], lines[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    fedcluster.run(EXPERIMENT, folder, display=Display())
    return folder


@pytest.fixture
def save_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "SAVE_EVERY", 0.0)
    monkeypatch.setattr(record, "SAVE_SHARE", 0)


def test_two_runs_are_bit_identical(whole: Path, tmp_path: Path) -> None:
    fedcluster.run(EXPERIMENT, tmp_path / "again", display=Display())
    assert essence(tmp_path / "again") == essence(whole)


def test_saving_often_changes_nothing(whole: Path, tmp_path: Path, save_always: None) -> None:
    fedcluster.run(EXPERIMENT, tmp_path / "run", display=Display())
    assert essence(tmp_path / "run") == essence(whole)


VICTIM = """
import os, signal, sys
import fedcluster
from fedcluster import files, record
from fedcluster.display import Display
record.SAVE_EVERY = 0.0
kill_at, calls = int(sys.argv[2]), 0
real = {name: getattr(os, name) for name in ("fsync", "replace")}
def counted(name):
    def call(*arguments):
        global calls
        calls += 1
        if calls == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real[name](*arguments)
    return call
os.fsync, os.replace = counted("fsync"), counted("replace")
import json
experiment = fedcluster.Experiment(**json.loads(sys.argv[3]))
fedcluster.run(experiment, sys.argv[1], resume=True, display=Display())
"""


def test_killed_inside_a_save_and_resumed(whole: Path, tmp_path: Path) -> None:
    """SIGKILL before a sync or a rename of a save, again and again, until the run gets through."""
    folder = tmp_path / "run"
    moments = random.Random(0)
    for _ in range(8):
        at = str(moments.randint(5, 60))
        code = subprocess.run([sys.executable, "-c", VICTIM, str(folder), at, json.dumps(KEYS)], timeout=60).returncode
        assert code in (0, -signal.SIGKILL)
        if code == 0:
            break
    fedcluster.run(EXPERIMENT, folder, resume=True, display=Display())
    assert essence(folder) == essence(whole)
    assert not list(folder.rglob("*.tmp"))


def test_killed_at_a_random_moment_and_resumed(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    moments = random.Random(1)
    for _ in range(3):
        victim = subprocess.Popen([sys.executable, "-c", VICTIM, str(folder), "0", json.dumps(KEYS)])
        deadline = time.monotonic() + 60
        while not (folder / "metrics.jsonl").exists() and victim.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.15))
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait()
    fedcluster.run(EXPERIMENT, folder, resume=True, display=Display())
    assert essence(folder) == essence(whole)


class Remember(Display):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def stopped(tmp_path: Path, save_always: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run stopped in the middle of its fifth round, with its two newest checkpoints."""
    folder = tmp_path / "stopped"

    class Stop(Display):
        def cycle(self, round: int, cycle: int, devices_per_second: float) -> None:
            if (round, cycle) == (4, 2):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedcluster.run(EXPERIMENT, folder, display=Stop())
    assert [path.stem for path in checkpoint.names(folder / "checkpoint")] == ["00000004-000002", "00000004-000001"]
    return folder


def test_stopped_inside_a_round_and_resumed(whole: Path, stopped: Path) -> None:
    display = Remember()
    fedcluster.run(EXPERIMENT, stopped, resume=True, display=display)
    assert essence(stopped) == essence(whole)
    assert any("resuming" in said and "after 4 of 6 rounds" in said for said in display.said)


def test_stopped_between_the_last_cycle_and_the_evaluation(
    whole: Path, tmp_path: Path, save_always: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(record.Recorder, "round", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fedcluster.run(EXPERIMENT, tmp_path / "run", display=Display())
    assert checkpoint.names(tmp_path / "run" / "checkpoint")[0].stem == "00000000-000004"
    display = Remember()
    fedcluster.run(EXPERIMENT, tmp_path / "run", resume=True, display=display)
    assert essence(tmp_path / "run") == essence(whole)
    assert not any("going back" in said for said in display.said)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "damage", ["tensors torn", "tensors altered", "position altered", "position torn", "tensors gone"]
)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_used(damage: str, whole: Path, stopped: Path) -> None:
    newest = checkpoint.names(stopped / "checkpoint")[0]
    tensors = newest.with_suffix(".safetensors")
    match damage:
        case "tensors torn":
            tensors.write_bytes(tensors.read_bytes()[:1000])
        case "tensors altered":
            content = bytearray(tensors.read_bytes())
            content[-5] ^= 1
            tensors.write_bytes(content)
        case "position altered":
            newest.write_text(newest.read_text().replace('"round": 4', '"round": 5'))
        case "position torn":
            newest.write_text(newest.read_text()[:40])
        case "tensors gone":
            tensors.unlink()
    display = Remember()
    fedcluster.run(EXPERIMENT, stopped, resume=True, display=display)
    assert any("00000004-000002" in said and "going back to the one before" in said for said in display.said)
    assert essence(stopped) == essence(whole)


def test_without_any_good_checkpoint_it_begins_again(whole: Path, stopped: Path) -> None:
    shutil.rmtree(stopped / "checkpoint")
    fedcluster.run(EXPERIMENT, stopped, resume=True, display=Display())
    assert essence(stopped) == essence(whole)


def test_a_checkpoint_ahead_of_its_record_is_not_used(whole: Path, stopped: Path) -> None:
    path = stopped / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    fedcluster.run(EXPERIMENT, stopped, resume=True, display=Display())
    assert essence(stopped) == essence(whole)


def test_resuming_a_finished_run_does_nothing(whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.name != ".lock"}
    display = Remember()
    result = fedcluster.run(EXPERIMENT, whole, resume=True, display=display)
    assert [line["round"] for line in result.history] == [1, 2, 3, 4, 5, 6]
    assert any("finished: nothing to do" in said for said in display.said)
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.name != ".lock"} == before


def test_a_changed_experiment_is_refused_by_key(stopped: Path) -> None:
    changed = EXPERIMENT.with_(**{"local.lr": 0.5, "rounds": 9})
    with pytest.raises(BadRun, match=r"local\.lr \(was 0\.01, now 0\.5\), rounds \(was 6, now 9\)"):
        fedcluster.run(changed, stopped, resume=True, display=Display())


def test_changed_data_under_the_same_name_are_refused(tmp_path: Path, stopped: Path) -> None:
    facts = json.loads((stopped / "run.json").read_text())
    facts["fingerprints"]["data"] = "0" * 64
    (stopped / "run.json").write_text(json.dumps(facts))
    with pytest.raises(BadRun, match="begun with other data"):
        fedcluster.run(EXPERIMENT, stopped, resume=True, display=Display())


def test_a_run_is_not_overwritten(stopped: Path) -> None:
    with pytest.raises(BadRun, match="already holds a run"):
        fedcluster.run(EXPERIMENT, stopped, display=Display())


def test_one_process_at_a_time(stopped: Path) -> None:
    hold = "lock = filelock.FileLock(sys.argv[1]); lock.acquire(); print('held', flush=True); input()"
    holder = f"import sys, filelock; {hold}"
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(stopped / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(BadRun, match="being written by another process"):
            fedcluster.run(EXPERIMENT, stopped, resume=True, display=Display())
        other.communicate("\n")
