"""torchrun: the same result to the bit, also when a rank is lost and all are started again."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fedcluster
from fedcluster.runs import checkpoint
from fedcluster.runs.progress import Display
from fedcluster.training.setup import prepare
from tests.runs.test_resume import essence

KEYS: dict[str, Any] = {
    "rounds": 8,
    "fleet": {"devices": 30, "samples": 40},
    "clusters": {"count": 3, "participation": 0.7},
    "model": {"name": "mlp"},
    "local": {"steps": 10, "batch": 10, "lr": 0.05},
}
ROOT = Path(__file__).parents[2]


def torchrun(experiment: fedcluster.Experiment, folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    file = folder.with_suffix(".toml")
    file.write_text(experiment.to_toml())
    return launch(folder, [*options, "-m", "fedcluster", "run", str(file), "--out", str(folder)])


def launch(folder: Path, words: list[str]) -> "subprocess.CompletedProcess[str]":
    """Two ranks."""
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *words],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WATCHED": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("algorithm", "steps", "cycling", "server"),
    [
        ("ghbm", 10, {"order": "balanced"}, {"optimizer": "round_momentum", "memory": "sliding"}),
        ("scaffold", 10, {"order": "balanced"}, {"optimizer": "round_momentum"}),
        ("vrl_sgd", [3, 6], {"order": "balanced"}, {"optimizer": "amplified"}),
        ("fedhbm", 10, {"overlap": 2, "weighting": "sample"}, {"optimizer": "round_momentum", "memory": "sliding"}),
        ("tests.rank_faults:Astray", 10, {"order": "balanced"}, {}),
    ],
)
def test_two_ranks_find_what_one_finds(
    algorithm: str, steps: Any, cycling: dict[str, Any], server: dict[str, Any], tmp_path: Path
) -> None:
    local = KEYS["local"] | {"algorithm": algorithm, "steps": steps}
    sections: dict[str, Any] = {
        "fleet": KEYS["fleet"] | {"test_share": 0.2},
        "eval": {"every": 2},
        "clusters": KEYS["clusters"] | cycling,
        "server": server,
        "pluralistic": {},
    }
    if algorithm == "scaffold":
        sections |= {"aggregation": {"name": "norm_clip", "times": 0.9, "bucketing": 2}, "accept": {"cycle_bound": 1.0}}
        sections |= {"attack": {"name": "little_is_enough", "share": 0.3}}
    if "overlap" in cycling:  # and unequal clusters, and another rate in every cycle
        sections["clock"] = {"dropout": 0.2}
        sections["fleet"] |= {"devices": 31}
        local |= {"schedule": {"name": "cosine", "cycle_decay": 0.8}}
    experiment = fedcluster.Experiment(**KEYS | sections | {"rounds": 4, "local": local})
    fedcluster.run(experiment, tmp_path / "alone", display=Display())
    done = torchrun(experiment, tmp_path / "together")
    assert done.returncode == 0, done.stderr[-3000:]
    assert essence(tmp_path / "together") == essence(tmp_path / "alone")
    assert norms(tmp_path / "together") == norms(tmp_path / "alone")
    for name in ("devices.parquet", "cluster-0.safetensors", "cluster-2.safetensors"):
        assert (tmp_path / "together" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
    assert done.stdout.count("after 4 rounds") == 1


def norms(folder: Path) -> dict[str, list[float]]:
    """What the bound on the next cycle's updates rests on: the medians of all cohorts, to the bit."""
    found: dict[str, list[float]] = json.loads(checkpoint.names(folder / "checkpoint")[0].read_bytes())["norms"]
    assert all(len(medians) == 4 * 3 for medians in found.values())
    return found


def test_one_script_trains_twice(tmp_path: Path) -> None:
    experiment = fedcluster.Experiment(**KEYS | {"rounds": 2})
    (tmp_path / "experiment.toml").write_text(experiment.to_toml())
    done = launch(tmp_path, ["-m", "tests.rank_twice", str(tmp_path / "experiment.toml"), str(tmp_path)])
    assert done.returncode == 0, done.stderr[-3000:]
    for seed in (0, 1):
        fedcluster.run(experiment.override(seed=seed), tmp_path / "alone" / str(seed), display=Display())
        assert essence(tmp_path / str(seed)) == essence(tmp_path / "alone" / str(seed))


def test_a_lost_rank_is_started_again_from_the_checkpoint(tmp_path: Path) -> None:
    killer = {"local": KEYS["local"] | {"algorithm": "tests.rank_killer:Killer"}}
    timed = {"fleet": KEYS["fleet"] | {"world": "diurnal"}, "clock": {"dropout": 0.2, "deadline": 9000.0}}
    experiment = fedcluster.Experiment(**KEYS | killer | timed)
    fedcluster.run(experiment, tmp_path / "alone", display=Display())
    done = torchrun(experiment, tmp_path / "together", "--max-restarts=1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert essence(tmp_path / "together") == essence(tmp_path / "alone")
    assert re.search(r"resuming .* after [2-7] of 8 rounds", done.stderr), done.stderr[-3000:]


def test_a_bad_experiment_ends_all_ranks(tmp_path: Path) -> None:
    experiment = fedcluster.Experiment(**KEYS | {"clusters": {"count": 31}})
    done = torchrun(experiment, tmp_path / "together")
    assert done.returncode != 0
    assert "clusters.count = 31 is more than the fleet's 30 devices" in done.stderr


def test_ranks_that_compute_differently_are_not_mixed(tmp_path: Path) -> None:
    experiment = fedcluster.Experiment(**KEYS | {"model": {"name": "tests.rank_faults:without_a_compiler"}})
    assert prepare(experiment.override(**{"model.name": "logistic"})).flat_model.arithmetic == "compiled"
    done = torchrun(experiment, tmp_path / "together")
    assert done.returncode != 0
    assert "fedcluster: rank 1 has arithmetic torch, and rank 0 has arithmetic compiled" in done.stderr
    assert "exitcode  : 9" in done.stderr
    assert not list((tmp_path / "together").glob("model.safetensors"))
