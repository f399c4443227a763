"""Several processes find what one finds, to the bit, whatever happens to them."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import fedcluster
from fedcluster.runs.directory import Folder
from fedcluster.runs.progress import Display
from fedcluster.training.executors import processes as workers
from tests.conftest import until
from tests.runs.test_resume import essence
from tests.training.test_processes import command

EXPERIMENT = fedcluster.Experiment(
    rounds=40,
    fleet={"devices": 30, "samples": 40},
    clusters={"count": 2, "participation": 0.7},
    model={"name": "mlp"},
    local={"steps": 8, "batch": 10, "lr": 0.05},
)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "WORTH_STARTING", 0.0)
    monkeypatch.setattr(workers, "may_fork", lambda: False)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    fedcluster.run(EXPERIMENT, folder, display=Display())
    return folder


class Watch(Display):
    """Waits for the workers before the second round, and can kill one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kill: tuple[int, ...] = ()) -> None:
        self.said: list[str] = []
        self.kill = kill
        self.crew: list[workers.Workers] = []
        self.trained_together = 0
        watch = self
        real_init, real_together = workers.Workers.__init__, workers.Workers.train_together

        def init(self: workers.Workers, *arguments: Any) -> None:
            real_init(self, *arguments)
            watch.crew.append(self)

        def together(self: workers.Workers, *arguments: Any) -> Any:
            watch.trained_together += 1
            return real_together(self, *arguments)

        monkeypatch.setattr(workers.Workers, "__init__", init)
        monkeypatch.setattr(workers.Workers, "train_together", together)

    def say(self, text: str) -> None:
        self.said.append(text)

    def round(self, line: dict[str, Any]) -> None:
        (crew,) = self.crew
        crew.start_all()
        if line["round"] in self.kill:
            os.kill(crew.workers[0].process.pid, signal.SIGKILL)


@pytest.mark.parametrize("count", [2, 4])
def test_bit_identical_for_any_number(count: int, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    display = Watch(monkeypatch)
    fedcluster.run(EXPERIMENT, tmp_path / "run", display=display, workers=count)
    assert essence(tmp_path / "run") == essence(alone)
    assert display.trained_together == 2 * 39  # all rounds but the first, in which the workers start


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
def test_forked_workers_train_from_the_first_cycle_on(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "may_fork", lambda: True)
    display = Watch(monkeypatch, kill=(3,))
    fedcluster.run(EXPERIMENT, tmp_path / "run", display=display, workers=3)
    assert essence(tmp_path / "run") == essence(alone)
    assert display.trained_together == 2 * 40
    assert len([said for said in display.said if "a worker died (exit code -9)" in said]) == 1


def test_a_process_with_another_thread_does_not_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    assert not workers.may_fork()
    over.set()
    thread.join()


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
def test_forked_workers_end_with_their_run_and_leave_its_folder_free(tmp_path: Path) -> None:
    file, out = tmp_path / "experiment.toml", tmp_path / "run"
    file.write_text(EXPERIMENT.override(rounds=100_000).to_toml())
    words = [sys.executable, "-m", "fedcluster", "run", str(file), "--out", str(out), "--workers", "3"]
    process = subprocess.Popen(
        words, cwd=Path(__file__).parents[2], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        until(lambda: list(out.glob("checkpoint/*.json")))
        forked = children.read_text().split()
    finally:
        process.kill()
        process.wait()
    assert len(forked) >= 2
    until(lambda: not any(command(int(one)) for one in forked))
    with closing(Folder(out, fedcluster.load(file), resume=True)) as folder:
        assert folder.begun


def test_a_killed_worker_is_replaced_and_changes_nothing(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    display = Watch(monkeypatch, kill=(3, 20))
    fedcluster.run(EXPERIMENT, tmp_path / "run", display=display, workers=2)
    assert essence(tmp_path / "run") == essence(alone)
    assert len([said for said in display.said if "a worker died (exit code -9)" in said]) == 2


def test_when_all_workers_are_gone_it_goes_on_alone(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "REPLACEMENTS", 0)
    display = Watch(monkeypatch, kill=(5, 6))
    fedcluster.run(EXPERIMENT, tmp_path / "run", display=display, workers=3)
    assert essence(tmp_path / "run") == essence(alone)
    assert "this process continues alone" in display.said[-1]


def fails(gradient: object, w: object, received: object) -> None:
    if os.getpid() != PARENT:
        raise ValueError("a defect of one's own")


PARENT = os.getppid() if os.environ.get("FEDCLUSTER_TEST_PARENT") else os.getpid()


def test_a_failure_inside_a_worker_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCLUSTER_TEST_PARENT", "1")
    experiment = EXPERIMENT.override(**{"local.algorithm": fails})
    with pytest.raises(RuntimeError, match="a defect of one's own"):
        fedcluster.run(experiment, display=Watch(monkeypatch), workers=2)


def test_what_cannot_be_sent_is_trained_here() -> None:
    experiment = EXPERIMENT.override(**{"rounds": 1, "local.algorithm": lambda gradient, w, received: None})

    class Remember(Display):
        said = ""

        def say(self, text: str) -> None:
            self.said += text

    display = Remember()
    fedcluster.run(experiment, display=display, workers=2)
    assert "training in one process" in display.said
