"""The bound on a whole cycle's movement."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedcluster
from fedcluster.runs.progress import Display
from fedcluster.state import NORM_WINDOW, State
from fedcluster.training.cycle_bound import CYCLE, Clipped, bounded
from fedcluster.training.executors.in_process import InProcess

KEYS: dict[str, Any] = {
    "rounds": 4,
    "fleet": {"devices": 12, "samples": 20},
    "clusters": {"count": 3, "participation": 1.0, "order": "cyclic"},
    "model": {"name": "logistic"},
    "local": {"steps": 3, "batch": 5, "lr": 0.1},
}


def state(*numbers: float, past: tuple[float, ...] = ()) -> State:
    return State(torch.tensor(numbers), norms={CYCLE: past, "model": (7.0,)})


def test_a_movement_is_clipped_to_a_multiple_of_the_median() -> None:
    before = state(1.0, 1.0, past=(1.0, 2.0, 900.0))
    after, clipped = bounded(before, replace(before, model=torch.tensor([31.0, 41.0])), 3.0)
    torch.testing.assert_close(after.model, torch.tensor([4.6, 5.8]))
    assert clipped == Clipped(50.0, 6.0)
    assert after.norms == {CYCLE: (1.0, 2.0, 900.0, 6.0), "model": (7.0,)}

    within, nothing = bounded(before, replace(before, model=torch.tensor([4.0, 5.0])), 3.0)
    assert (within.model.tolist(), nothing, within.norms[CYCLE][-1]) == ([4.0, 5.0], None, 5.0)
    for past in ((), (0.0, 0.0)):  # the first cycle, and where nobody has moved
        first, nothing = bounded(state(0.0, 0.0, past=past), state(30.0, 40.0, past=past), 3.0)
        assert (nothing, first.norms[CYCLE]) == (None, (*past, 50.0))
    for same in (before, replace(before, model=torch.tensor([math.nan, 1.0]))):  # it failed, or will be undone
        assert bounded(before, same, 3.0) == (same, None)
    long = state(0.0, past=(1.0,) * NORM_WINDOW)
    assert len(bounded(long, replace(long, model=torch.tensor([0.5])), 3.0)[0].norms[CYCLE]) == NORM_WINDOW


class Remember(Display):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def trained(folder: Path, display: Display | None = None, resume: bool = False, **keys: Any) -> bytes:
    fedcluster.run(fedcluster.Experiment(**KEYS | keys), folder, resume=resume, display=display or Display())
    return (folder / "model.safetensors").read_bytes()


def cycles(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "cycles.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("server", [{}, {"optimizer": "avgm"}])
def test_a_captured_cohort_is_held_and_named(
    server: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All devices of one cluster send a model that is nine times as far in round 3."""
    honest = InProcess.train_device

    def train_device(self: InProcess, phase: int, place: Any, received: Any, kept: Any) -> Any:
        message, kept = honest(self, phase, place, received, kept)
        if place[:2] == (2, 1):
            message = {"model": received["model"] + 9 * (message["model"] - received["model"])}
        return message, kept

    monkeypatch.setattr(InProcess, "train_device", train_device)
    display = Remember()
    keys: dict[str, Any] = {"accept": {"cycle_bound": 2.0}, "server": server}
    whole = trained(tmp_path / "whole", display, **keys)
    (line,) = [line for line in cycles(tmp_path / "whole") if "clipped" in line]
    assert (line["round"], line["cycle"]) == (3, 1)
    assert line["clipped"]["moved"] > 2 * line["clipped"]["allowed"]
    said = "round 3, cluster 1: the cycle moved the model by "
    assert sum(text.startswith(said) and "accept.cycle_bound" in text for text in display.said) == 1
    assert whole != trained(tmp_path / "free", server=server)

    trained(tmp_path / "parts", **keys, rounds=2)
    assert trained(tmp_path / "parts", resume=True, **keys) == whole


def test_a_bound_that_nobody_reaches_changes_nothing(tmp_path: Path) -> None:
    assert trained(tmp_path / "wide", accept={"cycle_bound": 1e9}) == trained(tmp_path / "free")


def test_a_bound_below_one_is_refused() -> None:
    with pytest.raises(fedcluster.FedClusterError, match=r"accept.cycle_bound = 0.5 is not allowed"):
        fedcluster.Experiment(accept={"cycle_bound": 0.5})
