"""Signals, lost processes and threads: a run ends with a sentence, and leaves nothing behind that trains on."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import nn

import fedcluster
from fedcluster.analysis import jobs as many
from fedcluster.analysis.jobs import Job, run_all
from fedcluster.errors import BadExperiment, Diverged, LostRank, NotAlike
from fedcluster.runs import checkpoint
from fedcluster.runs.progress import Display
from fedcluster.training.executors import processes as workers
from tests.analysis.test_compare import SMALL
from tests.conftest import until

ROOT = Path(__file__).parents[2]
LONG = SMALL.override(**{"rounds": 100_000, "model.name": "mlp"})
SAID = "progress is saved, continue with --resume"


def start(*words: Any) -> "subprocess.Popen[str]":
    """A command in a session of its own, so that its group can be signalled as a terminal does."""
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def children(process: "subprocess.Popen[str]") -> list[int]:
    """Python processes that it has started, but for the one that looks after shared memory."""
    text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [pid for pid in map(int, text.split()) if b"spawn_main" in command(pid)]


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()  # empty for a zombie
    except OSError:
        return b""


@pytest.mark.parametrize("name", ["run", "compare"])
def test_sigterm_saves_and_says_so(name: str, tmp_path: Path) -> None:
    (tmp_path / "long.toml").write_text(LONG.to_toml())
    folder = tmp_path / "out" / ("fedavg-seed0" if name == "compare" else "")
    process = start("-m", "fedcluster", name, tmp_path / "long.toml", "--out", tmp_path / "out")
    cycles = folder / "cycles.jsonl"
    until(lambda: (cycles.exists() and cycles.read_bytes()) or process.poll() is not None)
    process.terminate()
    _, err = process.communicate(timeout=600)
    assert process.returncode == 143
    assert [line for line in err.splitlines() if "terminated" in line] == [f"fedcluster: terminated; {SAID}"]
    assert "Traceback" not in err
    newest = json.loads(checkpoint.names(folder / "checkpoint")[0].read_text())
    rest = cycles.read_bytes()[newest["record"]["cycles.jsonl"]["bytes"] :]
    assert rest.count(b"\n") <= 1  # a cycle that was on record, and not yet over


def test_sigterm_ends_a_server_that_waits_for_devices(tmp_path: Path) -> None:
    (tmp_path / "long.toml").write_text(LONG.override(data={"name": "devices"}).to_toml())
    words = "--insecure", "--listen", "127.0.0.1:0", "--out", tmp_path / "out"
    process = start("-m", "fedcluster", "serve", tmp_path / "long.toml", *words)
    assert process.stdout is not None
    assert "listening for devices" in process.stdout.readline()
    process.terminate()
    _, err = process.communicate(timeout=600)
    assert process.returncode == 143
    assert err.splitlines()[-1] == f"fedcluster: terminated; {SAID}"


@pytest.mark.parametrize("name", ["run", "compare"])
def test_an_interrupt_while_processes_start_prints_no_traceback(name: str, tmp_path: Path) -> None:
    (tmp_path / "long.toml").write_text(LONG.to_toml())
    eager = """from fedcluster import cli
from fedcluster.training.executors import processes
processes.WORTH_STARTING, processes.may_fork = 0.0, bool
cli.main()"""
    options = ["--workers", "2"] if name == "run" else []
    process = start("-c", eager, name, tmp_path / "long.toml", "--out", tmp_path / "out", *options)
    until(lambda: children(process) or process.poll() is not None)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 130
    assert f"fedcluster: interrupted; {SAID}" in err
    assert "Traceback" not in err


def test_nothing_trains_on_when_compare_is_killed(tmp_path: Path) -> None:
    (tmp_path / "long.toml").write_text(LONG.to_toml())
    process = start("-m", "fedcluster", "compare", tmp_path / "long.toml", "--out", tmp_path / "out")
    until(lambda: children(process) or process.poll() is not None)
    orphans = children(process)  # still importing
    assert orphans
    process.kill()
    process.communicate()
    until(lambda: not any(command(pid) for pid in orphans))


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Two jobs that wait in their third round for the file `go`."""
    monkeypatch.setenv("GO", str(tmp_path / "go"))
    waiting = SMALL.override(**{"rounds": 6, "algorithm.name": "tests.rank_faults:Waits"})
    return [Job(f"seed{seed}", waiting.override(seed=seed)) for seed in (0, 1)]


def test_the_run_of_a_killed_process_goes_on_in_another(
    jobs: list[Job], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    killed = list[int]()

    def kill(done: int, total: int) -> None:
        if done and not killed:
            killed.append(multiprocessing.active_children()[0].pid or 0)
            os.kill(killed[0], signal.SIGKILL)
            (tmp_path / "go").touch()

    def losses(found: dict[str, list[dict[str, Any]] | Diverged]) -> dict[str, list[float]]:
        return {name: [x["train_loss"] for x in lines] for name, lines in found.items() if isinstance(lines, list)}

    disturbed = run_all(jobs, tmp_path / "two", 2, kill)
    assert killed
    assert "a training process was lost (exit code -9)" in capfd.readouterr().err
    assert losses(disturbed) == losses(run_all(jobs, tmp_path / "one", 1, lambda done, total: None))


def test_processes_that_are_always_killed_end_in_a_sentence(
    jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedcluster.analysis.jobs.MAX_RESTARTS", 0)

    def kill(done: int, total: int) -> None:
        for victim in multiprocessing.active_children():
            os.kill(victim.pid or 0, signal.SIGKILL)

    with pytest.raises(LostRank, match=r"lost 1 times in a row \(exit code -9\)"):
        run_all(jobs, tmp_path, 2, kill)


UNGUARDED = """
import sys
import fedcluster
from fedcluster.training.executors import processes as workers
from fedcluster.runs.progress import Display
workers.WORTH_STARTING = 0.0
workers.may_fork = lambda: False
train = workers.Workers.train

def train_and_wait(self, *arguments):
    yield from train(self, *arguments)
    self.start_all()  # returns when all have ended

workers.Workers.train = train_and_wait

class Say(Display):
    def say(self, text):
        print(text, file=sys.stderr)

keys = {"fleet": {"devices": 12, "samples": 20}, "clusters": {"count": 1, "participation": 1.0}}
experiment = fedcluster.Experiment(rounds=2, model={"name": "logistic"}, **keys)
"""
SENTENCE = "put the call under if __name__ == '__main__'"


def test_a_run_without_a_main_guard_says_so_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{UNGUARDED}fedcluster.run(experiment, workers=3, display=Say())\nprint('done')")
    process = start(script)
    out, err = process.communicate(timeout=600)
    assert (process.returncode, out) == (0, "done\n")
    assert err.count(SENTENCE) == 1
    assert "Traceback" not in err


def test_a_comparison_without_a_main_guard_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    call = "fedcluster.compare(experiment, seeds=1, workers=2)"
    script.write_text(f"{UNGUARDED}try:\n    {call}\nexcept fedcluster.FedClusterError as error:\n    print(error)")
    process = start(script)
    out, err = process.communicate(timeout=600)
    assert out.count(SENTENCE) == 1
    assert "Traceback" not in err


def test_a_worker_that_computes_differently_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "WORTH_STARTING", 0.0)
    monkeypatch.setattr(workers, "may_fork", lambda: False)
    experiment = SMALL.override(**{"rounds": 100_000, "model.name": "tests.rank_faults:without_a_compiler"})
    with pytest.raises(NotAlike, match="a worker trains with torch steps and this process with compiled ones"):
        fedcluster.run(experiment, tmp_path / "run", display=Display(), workers=2)
    assert checkpoint.names(tmp_path / "run" / "checkpoint")
    assert not (tmp_path / "run" / "model.safetensors").exists()


def drops(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, classes))


def test_runs_in_two_threads_find_what_one_finds() -> None:
    experiment = SMALL.override(**{"rounds": 5, "model.name": drops})
    results = list[dict[str, torch.Tensor]]()

    def run() -> None:
        results.append(fedcluster.run(experiment, display=Display()).model.state_dict())

    run()
    threads = [Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    for name, tensor in results[0].items():
        assert all(torch.equal(tensor, other[name]) for other in results)


@pytest.mark.parametrize("options", [{"cohorts": "x"}, {"workers": 0}, {"workers": -1}, {"workers": 1.5}])
def test_impossible_options_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    (name,) = options
    with pytest.raises(BadExperiment, match=rf"{name} = .* is not allowed: use"):
        fedcluster.run(SMALL, tmp_path / "run", display=Display(), **options)
    assert not (tmp_path / "run").exists()
    if name == "workers":
        with pytest.raises(BadExperiment, match=r"workers = .* is not allowed: use"):
            fedcluster.compare(SMALL, **options)


def test_an_interrupt_while_jobs_are_handed_out_ends_their_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGINT is pending when it is let through again: the processes that were started meanwhile end with the rest."""
    started: list[Any] = []
    real = ProcessPoolExecutor.submit

    def submit(self: Any, *arguments: Any) -> Any:
        future = real(self, *arguments)
        started.extend(self._processes.values())
        os.kill(os.getpid(), signal.SIGINT)
        return future

    monkeypatch.setattr(ProcessPoolExecutor, "submit", submit)
    monkeypatch.setattr(many, "GRACE", 0.5)
    with pytest.raises(KeyboardInterrupt):
        run_all([Job("long", LONG)], tmp_path, 2, lambda done, total: None)
    assert started
    assert not any(process.is_alive() for process in started)
