"""Whole runs with [privacy]: exact where there is no noise, resumable, and the same however cohorts are trained."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedcluster
from fedcluster.errors import BadRun
from fedcluster.privacy.mechanism import sampling
from fedcluster.runs.progress import Display
from fedcluster.training.setup import prepare
from tests.runs.test_resume import essence
from tests.training.test_ranks import torchrun

KEYS: dict[str, Any] = {
    "rounds": 4,
    "fleet": {"devices": 24, "samples": 20},
    "clusters": {"count": 3, "participation": 0.5, "order": "cyclic"},
    "model": {"name": "mlp"},
    "local": {"steps": 3, "batch": 5, "lr": 0.1},
}
PRIVACY: dict[str, Any] = {"noise_multiplier": 1.0, "delta": 1e-3, "clip": "adaptive", "mechanism": "banded"}
EXPERIMENT = fedcluster.Experiment(**KEYS, privacy=PRIVACY)


def run(experiment: fedcluster.Experiment, folder: Path, **options: Any) -> Path:
    fedcluster.run(experiment, folder, display=Display(), **options)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(EXPERIMENT, tmp_path_factory.mktemp("whole") / "run")


THIRTEEN: dict[str, Any] = {  # whose weights 1/39 do not add up to 1/3 in floating point
    "fleet": {"devices": 39, "samples": 20},
    "clusters": {"count": 3, "participation": 1.0, "order": "cyclic"},
}


@pytest.mark.parametrize("keys", [{}, THIRTEEN, {"server": {"optimizer": "avgm"}}, {"algorithm": {"name": "fedhbm"}}])
def test_without_noise_and_clip_it_is_the_mean_of_equal_weights_to_the_bit(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    plain = run(fedcluster.Experiment(**KEYS | keys), tmp_path / "plain")
    nothing = {"noise_multiplier": 0.0, "clip": math.inf, "delta": 1e-3, "sampling": "fixed"}
    private = run(fedcluster.Experiment(**KEYS | keys, privacy=nothing), tmp_path / "private")
    assert (plain / "model.safetensors").read_bytes() == (private / "model.safetensors").read_bytes()
    assert json.loads((private / "metrics.jsonl").read_text().splitlines()[-1])["epsilon"] is None


class Killed(KeyboardInterrupt):
    pass


class KillAfter(fedcluster.Callback):
    def __init__(self, cycles: int) -> None:
        self.left = cycles

    def on_cycle_end(self, line: dict[str, Any], state: Any) -> None:
        self.left -= 1
        if not self.left:
            raise Killed


@pytest.mark.parametrize("cycles", [1, 5])
def test_a_killed_run_is_resumed_with_the_same_noise_and_spends_nothing_twice(
    whole: Path, tmp_path: Path, cycles: int
) -> None:
    with pytest.raises(Killed):
        run(EXPERIMENT, tmp_path / "run", callbacks=[KillAfter(cycles)])
    assert essence(run(EXPERIMENT, tmp_path / "run", resume=True)) == essence(whole)


def test_workers_and_ranks_find_what_one_process_finds(whole: Path, tmp_path: Path) -> None:
    assert essence(run(EXPERIMENT, tmp_path / "four", workers=4)) == essence(whole)
    done = torchrun(EXPERIMENT, tmp_path / "ranks")
    assert done.returncode == 0, done.stderr
    assert essence(tmp_path / "ranks") == essence(whole)


def test_stacked_cohorts_are_clipped_and_noised_alike(whole: Path, tmp_path: Path) -> None:
    ours = essence(run(EXPERIMENT, tmp_path / "stacked", cohorts="stacked"))[1]
    for line, expected in zip(ours, essence(whole)[1], strict=True):
        assert line["epsilon"] == expected["epsilon"]
        assert line["test_loss"] == pytest.approx(expected["test_loss"], rel=0.01)


def test_lines_have_epsilon_and_say_what_it_does_not_cover(whole: Path, tmp_path: Path) -> None:
    epsilons = [line["epsilon"] for line in essence(whole)[1]]
    assert epsilons == sorted(epsilons)
    assert epsilons[0] > 0
    assert "leaky_clusters" not in essence(whole)[1][0]
    leaky = EXPERIMENT.override(**{"clusters.method": "major_class", "privacy.allow_leaky_clusters": True})
    assert essence(run(leaky, tmp_path / "leaky"))[1][0]["leaky_clusters"] == "labels"


def test_a_budget_is_spent_by_the_last_round_and_the_run_cannot_be_extended(tmp_path: Path) -> None:
    given = {"epsilon": 6.0, "noise_multiplier": None, "clip": 1.0}
    experiment = EXPERIMENT.override(**{f"privacy.{key}": value for key, value in given.items()})
    folder = run(experiment, tmp_path / "run")
    assert 5.9 < essence(folder)[1][-1]["epsilon"] <= 6.0
    with pytest.raises(BadRun, match="noise was chosen to spend epsilon = 6 in 4 rounds"):
        run(experiment.override(rounds=5), folder, resume=True)
    local = experiment.override(**{"privacy.mechanism": "local"})
    assert 5.9 < essence(run(local, tmp_path / "local"))[1][-1]["epsilon"] <= 6.0


def test_poisson_cohorts_have_independent_devices_at_the_given_rate() -> None:
    schedule = prepare(EXPERIMENT).schedule
    cycles = [cycle for j in range(400) for cycle in schedule.round(j)]
    taken = np.zeros((400, 24))
    for cycle in cycles:
        taken[cycle.round, cycle.cohort] = 1
    assert {cycle.expected for cycle in cycles} == {4.0}
    assert np.abs(taken.mean(axis=0) - 0.5).max() < 0.1
    sizes = np.array([len(cycle.cohort) for cycle in cycles])
    assert sizes.var() == pytest.approx(8 * 0.25, rel=0.2)
    correlations = np.asarray(np.corrcoef(taken.T)) - np.eye(24)
    assert np.abs(correlations).max() < 0.25
    assert sampling(fedcluster.Experiment(), 0) is None
