"""Callbacks see a run, may stop it, and lose nothing when they fail."""

from pathlib import Path
from typing import Any

import pytest

import fedcluster
from fedcluster.errors import CallbackFailed
from fedcluster.runs.progress import Display
from tests.runs.test_resume import EXPERIMENT, essence


class Broken(fedcluster.Callback):
    def __init__(self, method: str, at: int) -> None:
        self.left = at
        setattr(self, method, self.fail)

    def fail(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise ValueError("no tracker")


@pytest.mark.parametrize(
    ("method", "at"), [("on_cycle_start", 7), ("on_cycle_end", 7), ("on_round_end", 3), ("on_run_end", 1)]
)
def test_a_callback_that_raises_is_named_and_nothing_is_lost(method: str, at: int, tmp_path: Path) -> None:
    fedcluster.run(EXPERIMENT, tmp_path / "whole", display=Display())
    with pytest.raises(CallbackFailed, match=rf"Broken failed in {method} \(ValueError: no tracker\); progress"):
        fedcluster.run(EXPERIMENT, tmp_path / "run", display=Display(), callbacks=[Broken(method, at)])
    fedcluster.run(EXPERIMENT, tmp_path / "run", resume=True, display=Display())
    assert essence(tmp_path / "run") == essence(tmp_path / "whole")


class Stop(fedcluster.Callback):
    def on_cycle_start(self, cycle: Any, state: Any) -> None:
        if (cycle.round, cycle.cycle) == (1, 2):
            raise KeyboardInterrupt


def test_early_stopping_ends_the_same_when_resumed(tmp_path: Path) -> None:
    stop = fedcluster.EarlyStopping("train_loss", target=100.0)
    assert len(fedcluster.run(EXPERIMENT, display=Display(), callbacks=[stop]).history) == 1
    patient = fedcluster.EarlyStopping("train_loss", patience=2, higher=True)  # the loss falls, so it never improves
    whole = fedcluster.run(EXPERIMENT, tmp_path / "whole", display=Display(), callbacks=[patient])
    assert len(whole.history) == 3
    with pytest.raises(KeyboardInterrupt):
        fedcluster.run(EXPERIMENT, tmp_path / "run", display=Display(), callbacks=[patient, Stop()])
    for _ in range(2):  # the second time it is finished
        fedcluster.run(EXPERIMENT, tmp_path / "run", resume=True, display=Display(), callbacks=[patient])
        assert essence(tmp_path / "run") == essence(tmp_path / "whole")
