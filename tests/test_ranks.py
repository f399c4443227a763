"""torchrun: the same result to the bit, also when a rank is lost and all are started again."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fedcluster
from fedcluster.display import Display
from tests.test_resume import essence

KEYS: dict[str, Any] = {
    "rounds": 60,
    "fleet": {"devices": 30, "samples": 40},
    "clusters": {"count": 3, "participation": 0.7},
    "model": {"name": "mlp"},
    "local": {"steps": 10, "batch": 10, "lr": 0.05},
}
ROOT = Path(__file__).parents[1]


def torchrun(experiment: fedcluster.Experiment, folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    file = folder.with_suffix(".toml")
    file.write_text(experiment.to_toml())
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", *options]
    return subprocess.run(
        [sys.executable, "-m", *launch, "-m", "fedcluster", "run", str(file), "--out", str(folder)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WATCHED": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_two_ranks_find_what_one_finds(algorithm: str, tmp_path: Path) -> None:
    experiment = fedcluster.Experiment(**KEYS | {"rounds": 4, "local": KEYS["local"] | {"algorithm": algorithm}})
    fedcluster.run(experiment, tmp_path / "alone", display=Display())
    done = torchrun(experiment, tmp_path / "together")
    assert done.returncode == 0, done.stderr[-3000:]
    assert essence(tmp_path / "together") == essence(tmp_path / "alone")
    assert done.stdout.count("after 4 rounds") == 1


def test_a_lost_rank_is_started_again_from_the_checkpoint(tmp_path: Path) -> None:
    killer = {"local": KEYS["local"] | {"algorithm": "tests.rank_killer:Killer"}}
    timed = {"fleet": KEYS["fleet"] | {"world": "diurnal"}, "clock": {"dropout": 0.2, "deadline": 9000.0}}
    experiment = fedcluster.Experiment(**KEYS | killer | timed)
    fedcluster.run(experiment, tmp_path / "alone", display=Display())
    done = torchrun(experiment, tmp_path / "together", "--max-restarts=1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert essence(tmp_path / "together") == essence(tmp_path / "alone")
    assert "resuming" in done.stderr


def test_a_bad_experiment_ends_all_ranks(tmp_path: Path) -> None:
    experiment = fedcluster.Experiment(**KEYS | {"clusters": {"count": 31}})
    done = torchrun(experiment, tmp_path / "together")
    assert done.returncode != 0
    assert "clusters.count = 31 is more than the fleet's 30 devices" in done.stderr
