"""Two runs are bit-identical, and so is a run that was killed, at any moment, and resumed."""

import json
import random
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedcluster
from fedcluster.algorithms.scaffold import Scaffold
from fedcluster.errors import BadRun
from fedcluster.runs import checkpoint
from fedcluster.runs.directory import Folder
from fedcluster.runs.ledger import Ledger
from fedcluster.runs.metrics import Record
from fedcluster.runs.progress import Display
from fedcluster.training import checkpoints
from fedcluster.training import evaluation as evaluate
from fedcluster.training.callbacks import CallbackList
from fedcluster.training.loop import train
from fedcluster.training.recorder import Recorder
from fedcluster.training.setup import prepare

KEYS: dict[str, Any] = {
    "rounds": 6,
    "fleet": {"devices": 20, "samples": 30},
    "clusters": {"count": 4, "participation": 0.5},
    "model": {"name": "mlp"},
    "local": {"steps": 5, "batch": 8, "optimizer": "adam"},
}
EXPERIMENT = fedcluster.Experiment(**KEYS)


def stop_and_resume(experiment: fedcluster.Experiment, folder: Path, after: int) -> None:
    """A run that is interrupted after so many cycles and resumed."""

    class Stop(fedcluster.Callback):
        def on_cycle_end(self, line: dict[str, Any], state: Any) -> None:
            if state.t == after:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedcluster.run(experiment, folder, display=Display(), callbacks=[Stop()])
    fedcluster.run(experiment, folder, resume=True, display=Display())


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
    monkeypatch.setattr(checkpoints, "SAVE_EVERY", 0.0)
    monkeypatch.setattr(checkpoints, "SAVE_SHARE", 0)


def test_two_runs_are_bit_identical(whole: Path, tmp_path: Path) -> None:
    fedcluster.run(EXPERIMENT, tmp_path / "again", display=Display())
    assert essence(tmp_path / "again") == essence(whole)


def test_saving_often_changes_nothing(whole: Path, tmp_path: Path, save_always: None) -> None:
    fedcluster.run(EXPERIMENT, tmp_path / "run", display=Display())
    assert essence(tmp_path / "run") == essence(whole)


VICTIM = """
import os, signal, sys, threading
import fedcluster
from fedcluster import files; from fedcluster.training import checkpoints
from fedcluster.runs.progress import Display
checkpoints.SAVE_EVERY = 0.0
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
        code = subprocess.run([sys.executable, "-c", VICTIM, str(folder), at, json.dumps(KEYS)], timeout=300).returncode
        assert code in (0, -signal.SIGKILL)
        if code == 0:
            break
    fedcluster.run(EXPERIMENT, folder, resume=True, display=Display())
    assert essence(folder) == essence(whole)
    assert not list(folder.rglob("*.tmp"))


ANY_MOMENT = """
cycles_left, now = int(sys.argv[4]), threading.Event()
class Watched(Display):
    def cycle(self, *_):
        global cycles_left
        cycles_left -= 1
        if cycles_left == 0:
            now.set()
def kill():
    now.wait()
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=kill, daemon=True).start()
Display = Watched
"""


def test_killed_at_any_moment_and_resumed(whole: Path, tmp_path: Path) -> None:
    """SIGKILL from another thread, wherever the run is by then."""
    folder = tmp_path / "run"
    code = VICTIM.replace("import json\n", f"{ANY_MOMENT}import json\n")
    for cycles in ("1", "5", "8"):  # of 24
        victim = subprocess.run([sys.executable, "-c", code, str(folder), "0", json.dumps(KEYS), cycles], timeout=300)
        assert victim.returncode == -signal.SIGKILL
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
        patch.setattr(Record, "round", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fedcluster.run(EXPERIMENT, tmp_path / "run", display=Display())
    assert checkpoint.names(tmp_path / "run" / "checkpoint")[0].stem == "00000000-000004"
    display = Remember()
    fedcluster.run(EXPERIMENT, tmp_path / "run", resume=True, display=display)
    assert essence(tmp_path / "run") == essence(whole)
    assert not any("; using " in said for said in display.said)


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
    assert any("00000004-000002" in said and "using the one before" in said for said in display.said)
    assert essence(stopped) == essence(whole)


def test_the_start_is_evaluated_once(whole: Path, stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a run begins: neither when it ends nor when it is resumed."""
    seen: list[str] = []
    real = evaluate.Evaluator.__call__

    def counted(self: evaluate.Evaluator, w: torch.Tensor) -> dict[str, float]:
        seen.append(sha256(w.numpy().tobytes()).hexdigest())
        return real(self, w)

    monkeypatch.setattr(evaluate.Evaluator, "__call__", counted)
    fedcluster.run(EXPERIMENT, stopped, resume=True, display=Display())
    start = json.loads((stopped / "run.json").read_text())["fingerprints"]["model"]
    assert start not in seen
    assert len(seen) == 2  # rounds 5 and 6
    fedcluster.run(EXPERIMENT, stopped.parent / "again", display=Display())
    assert seen.count(start) == 1
    noted = [json.loads((folder / "run.json").read_text())["start"] for folder in (stopped, whole)]
    assert noted[0] == noted[1]


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
    changed = EXPERIMENT.override(**{"local.lr": 0.5, "rounds": 9})
    with pytest.raises(BadRun, match=r"local\.lr \(was 0\.01, now 0\.5\): resume"):
        fedcluster.run(changed, stopped, resume=True, display=Display())


def test_changed_data_under_the_same_name_are_refused(tmp_path: Path, stopped: Path) -> None:
    facts = json.loads((stopped / "run.json").read_text())
    facts["fingerprints"]["data"] = "0" * 64
    (stopped / "run.json").write_text(json.dumps(facts))
    with pytest.raises(BadRun, match="started with different data"):
        fedcluster.run(EXPERIMENT, stopped, resume=True, display=Display())


def test_a_run_is_not_overwritten(stopped: Path) -> None:
    with pytest.raises(BadRun, match="already holds a run"):
        fedcluster.run(EXPERIMENT, stopped, display=Display())


@pytest.mark.parametrize("left", ["experiment.toml", "run.json", "metrics.jsonl", "cycles.jsonl", "evaluated"])
def test_what_is_left_of_a_run_is_not_overwritten(left: str, stopped: Path, tmp_path: Path) -> None:
    folder = tmp_path / "left"
    folder.mkdir()
    shutil.move(stopped / left, folder / left)
    with pytest.raises(BadRun, match="already holds a run"):
        fedcluster.run(EXPERIMENT, folder, display=Display())


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


def test_a_checkpoint_of_another_run_is_refused(stopped: Path, tmp_path: Path, save_always: None) -> None:
    """The same shapes, another rate: nothing in the tensors tells them apart."""
    other = EXPERIMENT.override(**{"local.lr": 0.5})
    fedcluster.run(other, tmp_path / "other", display=Display())
    before = contents(stopped, "experiment.toml", "run.json")
    shutil.rmtree(stopped / "checkpoint")
    shutil.copytree(tmp_path / "other" / "checkpoint", stopped / "checkpoint")
    with pytest.raises(BadRun, match=r"00000006-000000\.json is of another run: .* remove it"):
        fedcluster.run(EXPERIMENT, stopped, resume=True, display=Display())
    assert contents(stopped, "experiment.toml", "run.json") == before


def contents(folder: Path, *names: str) -> list[bytes]:
    return [(folder / name).read_bytes() for name in names]


@pytest.mark.parametrize("resume", [False, True])
def test_without_its_experiment_a_folder_still_belongs_to_its_run(resume: bool, stopped: Path) -> None:
    (stopped / "experiment.toml").unlink()
    other = EXPERIMENT.override(**{"local.lr": 0.5})
    refused = "holds a run of another experiment" if resume else "already holds a run"
    with pytest.raises(BadRun, match=refused):
        fedcluster.run(other, stopped, resume=resume, display=Display())
    (stopped / "run.json").unlink()
    refused = "is of another run" if resume else "already holds a run"
    with pytest.raises(BadRun, match=refused):
        fedcluster.run(other, stopped, resume=resume, display=Display())
    assert not (stopped / "experiment.toml").exists()


def test_without_its_experiment_a_run_is_resumed_by_the_same(stopped: Path, whole: Path) -> None:
    (stopped / "experiment.toml").unlink()
    fedcluster.run(EXPERIMENT, stopped, resume=True, display=Display())
    assert essence(stopped) == essence(whole)


def test_a_checkpoint_of_version_0_1_is_refused(stopped: Path) -> None:
    for path in checkpoint.names(stopped / "checkpoint"):
        old = {k: v for k, v in json.loads(path.read_text()).items() if k not in ("run", "record", "digest")}
        path.write_text(json.dumps(old | {"digest": checkpoint.digest(old)}))
    with pytest.raises(BadRun, match=r"written by fedcluster 0\.1, .* remove it"):
        fedcluster.run(EXPERIMENT, stopped, resume=True, display=Display())


@pytest.mark.parametrize("name", ["metrics.jsonl", "cycles.jsonl"])
@pytest.mark.parametrize("damage", ["flipped", "swapped"])
def test_an_altered_record_is_refused(name: str, damage: str, stopped: Path, tmp_path: Path) -> None:
    path = stopped / name
    if damage == "flipped":
        content = bytearray(path.read_bytes())
        content[60] ^= 1
    else:
        fedcluster.run(EXPERIMENT.override(seed=7), tmp_path / "other", display=Display())
        content = bytearray((tmp_path / "other" / name).read_bytes())
    path.write_bytes(content)
    tensors = {path: path.read_bytes() for path in (stopped / "checkpoint").iterdir()}
    with pytest.raises(BadRun, match=rf"{name} was altered .*: put the file back"):
        fedcluster.run(EXPERIMENT, stopped, resume=True, display=Display())
    assert {path: path.read_bytes() for path in (stopped / "checkpoint").iterdir()} == tensors


def test_a_record_altered_in_its_last_line_goes_back_to_the_checkpoint_before(stopped: Path, whole: Path) -> None:
    newest = json.loads(checkpoint.names(stopped / "checkpoint")[0].read_text())
    path = stopped / "cycles.jsonl"
    content = bytearray(path.read_bytes())
    content[newest["record"]["cycles.jsonl"]["bytes"] - 3] ^= 1
    path.write_bytes(content)
    display = Remember()
    fedcluster.run(EXPERIMENT, stopped, resume=True, display=display)
    assert any("cycles.jsonl was altered" in said and "00000004-000001" in said for said in display.said)
    assert essence(stopped) == essence(whole)


def test_cycles_truncated_to_nothing_are_trained_again(stopped: Path, whole: Path) -> None:
    (stopped / "cycles.jsonl").write_bytes(b"")
    display = Remember()
    fedcluster.run(EXPERIMENT, stopped, resume=True, display=display)
    assert any("ahead of cycles.jsonl" in said for said in display.said)
    assert essence(stopped) == essence(whole)


@pytest.fixture
def finished(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "finished")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("model.safetensors", "is damaged: delete it"),
        ("metrics.jsonl", "was altered after the run had finished"),
        ("cycles.jsonl", "was altered after the run had finished"),
        ("run.json", "is damaged: restore it"),
    ],
)
def test_a_finished_run_is_checked(name: str, sentence: str, finished: Path, whole: Path) -> None:
    content = bytearray((finished / name).read_bytes())
    content[-20] ^= 1
    (finished / name).write_bytes(content)
    with pytest.raises(BadRun, match=rf"{name} {sentence}"):
        fedcluster.run(EXPERIMENT, finished, resume=True, display=Display())
    (finished / name).unlink()
    if name != "model.safetensors":
        with pytest.raises(BadRun, match=rf"{name} (was deleted|is missing)"):
            fedcluster.run(EXPERIMENT, finished, resume=True, display=Display())
    if name in ("model.safetensors", "run.json"):  # the remedy that the sentence offers
        (finished / "model.safetensors").unlink(missing_ok=True)
        fedcluster.run(EXPERIMENT, finished, resume=True, display=Display())
        assert essence(finished) == essence(whole)
        assert json.loads((finished / "run.json").read_text()) == json.loads((whole / "run.json").read_text())


def test_a_finished_run_of_version_0_1_is_taken_as_it_is(finished: Path) -> None:
    facts = json.loads((finished / "run.json").read_text())
    (finished / "run.json").write_text(json.dumps({k: facts[k] for k in facts if k not in ("digest", "finished")}))
    display = Remember()
    fedcluster.run(EXPERIMENT, finished, resume=True, display=display)
    assert any("not checked" in said for said in display.said)


def test_orphaned_tensors_do_not_stay(stopped: Path) -> None:
    shutil.copy(stopped / "checkpoint" / "00000004-000002.safetensors", stopped / "checkpoint" / "1-1.safetensors")
    fedcluster.run(EXPERIMENT, stopped, resume=True, display=Display())
    stems = [path.stem for path in (stopped / "checkpoint").iterdir()]
    assert sorted(stems) == sorted(2 * [path.stem for path in checkpoint.names(stopped / "checkpoint")])


def test_resuming_under_other_versions_says_so(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedcluster, "__version__", "9.9")
    monkeypatch.setattr(np, "__version__", "8.8")
    display = Remember()
    fedcluster.run(EXPERIMENT, stopped, resume=True, display=display)
    (said,) = [said for said in display.said if said.startswith("started under fedcluster")]
    assert "numpy" in said
    assert said.endswith("continued under fedcluster 9.9, numpy 8.8: the last digits may differ")


def rule(factor: float) -> Any:
    def shrink(gradient: torch.Tensor, w: object, received: object) -> None:
        gradient.mul_(factor)

    return shrink


def other_rule() -> Any:
    scope: dict[str, Any] = {}
    exec("def shrink(gradient, w, received): gradient.mul_(0.5).add_(0.0)", scope)  # noqa: S102
    scope["shrink"].__module__, scope["shrink"].__qualname__ = __name__, rule(0.5).__qualname__
    return scope["shrink"]


@pytest.mark.parametrize("other", [rule(0.25), other_rule()])
def test_another_function_of_the_same_name_is_refused(other: Any, tmp_path: Path) -> None:
    def described(algorithm: Any) -> fedcluster.Experiment:
        return EXPERIMENT.override(**{"rounds": 1, "local.algorithm": algorithm})

    fedcluster.run(described(rule(0.5)), tmp_path, display=Display())
    fedcluster.run(described(rule(0.5)), tmp_path, resume=True, display=Display())
    with pytest.raises(BadRun, match="started with different algorithm under the same name"):
        fedcluster.run(described(other), tmp_path, resume=True, display=Display())


def test_an_interrupted_run_has_lost_no_whole_cycle(tmp_path: Path) -> None:
    """Interrupted in the middle of a cycle, long before the next checkpoint is due."""
    experiment = EXPERIMENT.override(**{"local.algorithm": "scaffold", "local.optimizer": "sgd"})
    fedcluster.run(experiment, tmp_path / "whole", display=Display())
    real, trained = Scaffold.train, list[int]()

    def interrupted(self: Scaffold, *arguments: Any) -> Any:
        trained.append(1)
        if len(trained) == 25:  # 10 devices a round, 3 in its first cycle and 3 in its second
            raise KeyboardInterrupt
        return real(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scaffold, "train", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fedcluster.run(experiment, tmp_path / "run", display=Display())
    (path,) = checkpoint.names(tmp_path / "run" / "checkpoint")
    assert path.stem == "00000002-000001"
    fedcluster.run(experiment, tmp_path / "run", resume=True, display=Display())
    assert essence(tmp_path / "run") == essence(tmp_path / "whole")


@pytest.mark.parametrize(
    ("every", "rounds"), [("", [4]), ("round", [1, 2, 3, 4]), ("cycle", [0, 0, 1, 1, 2, 2, 3, 3, 4])]
)
def test_a_checkpoint_follows_every_round_or_cycle_where_devices_depend_on_it(
    every: str, rounds: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device of a federation keeps its state from before and after its latest cycle. Were the server to resume from
    more than a round ago, the device would have to begin anew. The last one is that of the end of the run."""
    saved: list[int] = []
    monkeypatch.setattr(checkpoint, "store", lambda folder, state, *rest: saved.append(state.round))
    monkeypatch.setattr(checkpoints, "SAVE_EVERY", 1e9)
    small = fedcluster.Experiment(
        rounds=4,
        fleet={"devices": 6, "samples": 10},
        clusters={"count": 2, "participation": 1.0},
        model={"name": "logistic"},
        local={"algorithm": "scaffold", "steps": 2},
    )
    setup = prepare(small)
    recorder, record = Recorder(tmp_path), Record(Ledger(setup.devices))
    saving = checkpoints.Checkpoints(recorder, record, every_round=every == "round", every_cycle=every == "cycle")
    with closing(recorder):
        train(setup, record, setup.start, CallbackList([recorder, saving]))
    assert saved == rounds


def test_a_finished_run_trains_longer_as_if_asked_at_once(whole: Path, tmp_path: Path) -> None:
    short, run = EXPERIMENT.override(rounds=3), tmp_path / "run"
    fedcluster.run(short, run, display=Display())
    result = fedcluster.run(EXPERIMENT, run, resume=True, display=Display())
    assert [line["round"] for line in result.history] == [1, 2, 3, 4, 5, 6]
    assert essence(run) == essence(whole)
    assert contents(run, "experiment.toml") == contents(whole, "experiment.toml")
    assert fedcluster.run(EXPERIMENT, run, resume=True, display=Display()).history == result.history
    with pytest.raises(BadRun, match=r"rounds can be raised but not lowered \(now 3\)"):
        fedcluster.run(short, run, resume=True, display=Display())


def test_an_interrupted_run_trains_longer(whole: Path, tmp_path: Path) -> None:
    class Stop(Display):
        def cycle(self, round: int, cycle: int, devices_per_second: float) -> None:
            if (round, cycle) == (1, 2):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedcluster.run(EXPERIMENT.override(rounds=3), tmp_path / "run", display=Stop())
    fedcluster.run(EXPERIMENT, tmp_path / "run", resume=True, display=Display())
    assert essence(tmp_path / "run") == essence(whole)


def test_killed_while_it_is_reopened_a_run_is_whole_either_way(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended between the removal of the model and the note of the new number of rounds."""
    short, run = EXPERIMENT.override(rounds=3), tmp_path / "run"
    fedcluster.run(short, run, display=Display())
    before = essence(run)
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "note", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fedcluster.run(EXPERIMENT, run, resume=True, display=Display())
    assert not (run / "model.safetensors").exists()
    fedcluster.run(short, run, resume=True, display=Display())
    assert essence(run) == before
    fedcluster.run(EXPERIMENT, run, resume=True, display=Display())
    assert essence(run) == essence(whole)


def test_a_finished_run_without_its_last_checkpoint_does_not_train_longer(tmp_path: Path) -> None:
    fedcluster.run(EXPERIMENT.override(rounds=1), tmp_path / "run", display=Display())
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    before = essence(tmp_path / "run")
    with pytest.raises(BadRun, match=r"the checkpoint of its last round, .* is missing or damaged"):
        fedcluster.run(EXPERIMENT, tmp_path / "run", resume=True, display=Display())
    assert essence(tmp_path / "run") == before


def test_a_schedule_that_depends_on_the_number_of_rounds_is_said(tmp_path: Path) -> None:
    short = EXPERIMENT.override(**{"local.schedule": {"name": "cosine"}, "rounds": 2})
    fedcluster.run(short, tmp_path, display=Display())
    display = Remember()
    fedcluster.run(short, tmp_path, resume=True, display=display)
    assert not any("depends on the number of rounds" in said for said in display.said)
    fedcluster.run(short.override(rounds=3), tmp_path, resume=True, display=display)
    (said,) = [said for said in display.said if "depends on the number of rounds" in said]
    assert said.startswith("local.schedule depends on the number of rounds: rounds up to 2 followed that of 2 rounds")
