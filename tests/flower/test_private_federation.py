"""[privacy] in a federation: what a simulation with the same secret finds, to the bit; no release goes uncounted."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import fedcluster
from fedcluster.errors import BadRun
from fedcluster.flower.releases import RELEASES, SECRET, Releases, server_secret
from fedcluster.privacy.mechanism import build
from fedcluster.runs.directory import Folder
from fedcluster.runs.progress import Display
from fedcluster.state import State
from fedcluster.training.callbacks import Budget, StopTraining
from fedcluster.training.setup import prepare
from tests.federation import Federation, kill, until

pytestmark = pytest.mark.xdist_group("federation")

EXPERIMENT = fedcluster.Experiment(
    seed=5,
    rounds=3,
    fleet={"devices": 8, "samples": 30},
    clusters={"count": 2, "participation": 0.5, "order": "cyclic"},
    model={"name": "logistic"},
    local={"steps": 3, "batch": 10, "lr": 0.05},
    privacy={"noise_multiplier": 0.5, "delta": 1e-3, "clip": "adaptive", "mechanism": "banded"},
)


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with Federation(tmp_path_factory.mktemp("eight"), EXPERIMENT) as federation:
        for k in range(8):
            federation.join(k)
        yield federation


def tell(federation: Federation, out: str, secret: int) -> None:
    (federation.folder / out).mkdir()
    (federation.folder / out / SECRET).write_text(f"{secret:064x}\n")


def test_a_federation_equals_its_simulation_with_the_same_secret_also_when_it_is_killed(
    eight: Federation, tmp_path: Path
) -> None:
    fedcluster.run(EXPERIMENT, tmp_path / "simulated", display=Display())
    tell(eight, "killed", EXPERIMENT.seed)
    server = eight.serve("killed")
    until(lambda: len(eight.lines("killed")) >= 3)
    kill(server)
    output = eight.finish(eight.serve("killed", "--resume"), "killed")
    assert "privacy: epsilon" in output
    assert eight.model("killed") == (tmp_path / "simulated" / "model.safetensors").read_bytes()
    simulated = [json.loads(line) for line in (tmp_path / "simulated" / "metrics.jsonl").read_text().splitlines()]
    ours = eight.lines("killed", "metrics.jsonl")
    assert [line["epsilon"] for line in ours] == [line["epsilon"] for line in simulated]
    released = [(line["round"], line["cycle"]) for line in eight.lines("killed", RELEASES)]
    assert released == [(j, K) for j in range(3) for K in range(2)]  # whenever the server was killed


def test_devices_add_noise_of_their_own_that_the_server_cannot_repeat(eight: Federation, tmp_path: Path) -> None:
    local = EXPERIMENT.override(rounds=1, **{"privacy.mechanism": "local", "privacy.clip": 1.0})
    fedcluster.run(local, tmp_path / "simulated", display=Display())
    tell(eight, "local", EXPERIMENT.seed)
    eight.finish(eight.serve("local", experiment=local), "local")
    assert eight.lines("local")[0]["cohort"]
    assert eight.model("local") != (tmp_path / "simulated" / "model.safetensors").read_bytes()
    assert eight.lines("local", "metrics.jsonl")[0]["uploads"] == 4


def folder_of(path: Path) -> Folder:
    return Folder(path, EXPERIMENT, resume=True)


def test_the_secret_is_the_servers_alone_and_stays_the_same(tmp_path: Path) -> None:
    with closing(folder_of(tmp_path / "run")) as folder:
        secret = server_secret(folder)
        assert secret > 2**200
        assert server_secret(folder) == secret
        path = folder.path / SECRET
        assert path.stat().st_mode & 0o777 == 0o600
        path.write_text("17\n")
        with pytest.raises(BadRun, match="not a secret of 64 hexadecimal digits"):
            server_secret(folder)
        path.unlink()
        folder.begun = True
        with pytest.raises(BadRun, match="is missing, from which noise and cohorts are drawn"):
            server_secret(folder)


def release(releases: Releases, *cycles: tuple[int, int, int]) -> None:
    for round, cycle, cluster in cycles:
        line = {"round": round + 1, "cycle": cycle, "cluster": cluster}
        releases.on_cycle_end(line, State(torch.zeros(1), round=round, cycle=cycle + 1))


def test_what_is_released_again_after_a_lost_checkpoint_has_new_noise_and_counts_twice(tmp_path: Path) -> None:
    release(Releases(tmp_path), (0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 1, 1))
    with (tmp_path / RELEASES).open("ab") as file:
        file.write(b'{"round": 2, "cyc')  # the process was killed here
    behind = State(torch.zeros(1), round=1, cycle=0)  # an older checkpoint
    releases = Releases(tmp_path)
    repeats = releases.repeats(behind)
    assert repeats == {(1, 0): 1, (1, 1): 1}
    release(releases, (1, 0, 0), (1, 1, 1), (2, 0, 0))
    again = Releases(tmp_path)
    assert again.repeats(State(torch.zeros(1), round=2, cycle=1)) == repeats
    assert again.repeats(State(torch.zeros(1), round=2, cycle=0)) == repeats | {(2, 0): 1}

    setup = prepare(EXPERIMENT)
    assert setup.privacy is not None
    before, noise = setup.privacy.epsilon(3), noise_of(setup, 1)
    cohorts = [cycle.cohort.tolist() for j in range(2) for cycle in setup.schedule.round(j)]
    assert setup.schedule.sampling is not None
    setup.schedule.sampling.repeats.update(repeats)  # type: ignore[attr-defined]
    assert setup.privacy.epsilon(3) == pytest.approx(prepare(EXPERIMENT).privacy.epsilon(4))  # type: ignore[union-attr]
    assert setup.privacy.epsilon(3) > before
    assert not torch.equal(noise_of(setup, 1), noise)
    redrawn = [cycle.cohort.tolist() for j in range(2) for cycle in setup.schedule.round(j)]
    assert redrawn[:2] == cohorts[:2]
    assert redrawn[2:] != cohorts[2:]


def test_a_release_that_was_not_noted_before_the_server_was_killed_is_noted_when_it_resumes(tmp_path: Path) -> None:
    setup = prepare(EXPERIMENT)
    checkpoint = State(setup.start.model, round=1, cycle=1, cycles=2)
    release(Releases(tmp_path), (0, 0, 0), (0, 1, 1))
    Releases(tmp_path).on_run_start(setup, checkpoint, [])
    releases = Releases(tmp_path)
    assert releases.lines == [(0, 0, 0), (0, 1, 1), (1, 0, 0)]
    releases.on_run_start(setup, checkpoint, [])
    assert releases.lines == Releases(tmp_path).lines
    with pytest.raises(BadRun, match=r"releases.jsonl lacks cycles that were released"):
        releases.on_run_start(setup, State(setup.start.model, round=2, cycle=1, cycles=2), [])


def noise_of(setup: Any, round: int) -> torch.Tensor:
    cycle = setup.schedule.round(round)[0]
    aggregate = setup.privacy.aggregator({"model": setup.start.model}, setup.start, cycle).finish()
    model: torch.Tensor = aggregate.message["model"]
    return model


def test_a_run_stops_before_it_spends_more_than_its_budget() -> None:
    experiment = EXPERIMENT.override(**{"privacy.noise_multiplier": None, "privacy.epsilon": 9.0})
    setup = prepare(experiment)
    assert setup.privacy is not None
    budget = Budget(setup.privacy, 9.0)
    budget.on_run_start(setup, setup.start, [])
    assert build(experiment, setup.schedule) is not None
    setup.privacy.sampling.repeats[0, 0] = 1  # type: ignore[index]
    with pytest.raises(StopTraining, match="would spend more than epsilon = 9"):
        budget.on_round_end({}, State(setup.start.model, round=2))


@pytest.mark.parametrize("line", [b"[]", b'{"round": 1}', b'{"round": -1, "cycle": 0, "cluster": 0}', b"\xff"])
def test_a_damaged_list_of_releases_is_refused(tmp_path: Path, line: bytes) -> None:
    (tmp_path / RELEASES).write_bytes(line + b"\n")
    with pytest.raises(BadRun, match=r"releases.jsonl, line 1, is damaged"):
        Releases(tmp_path)
