"""Pluralistic models: each cluster is served an average of the models after its cycles, and training knows nothing of
it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import fedcluster
from fedcluster.algorithms.pluralistic import models, step
from fedcluster.errors import BadExperiment, BadRun
from fedcluster.runs import checkpoint
from fedcluster.runs.devices import DEVICES
from fedcluster.runs.progress import Display
from fedcluster.training.setup import prepare
from tests.runs.test_resume import essence

KEYS: dict[str, Any] = {
    "rounds": 5,
    "fleet": {"devices": 18, "samples": 30, "rho_device": 0.9, "test_share": 0.3},
    "clusters": {"count": 3, "participation": 0.4},
    "model": {"name": "logistic"},
    "local": {"steps": 4, "batch": 5, "lr": 0.1},
    "eval": {"every": 5},
}
PLAIN = fedcluster.Experiment(**KEYS)
PLURALISTIC = PLAIN.override(pluralistic={})


class Models(fedcluster.Callback):
    """W after every cycle, by cluster, as NumPy sees it."""

    def __init__(self) -> None:
        self.after: list[tuple[int, NDArray[np.float64]]] = []

    def on_cycle_end(self, line: dict[str, Any], state: Any) -> None:
        self.after.append((line["cluster"], state.model.double().numpy()))


class Stop(fedcluster.Callback):
    def on_cycle_end(self, line: dict[str, Any], state: Any) -> None:
        if state.t == 8:
            raise KeyboardInterrupt


def run(experiment: fedcluster.Experiment, out: Path, **options: Any) -> fedcluster.Result:
    return fedcluster.run(experiment, out, display=Display(), **options)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in model.parameters()])


def cluster_files(out: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(out.glob("cluster-*.safetensors"))]


@pytest.mark.parametrize("order", ["reshuffle", "random"])
@pytest.mark.parametrize("average", ["uniform", 0.9])
def test_agrees_with_numpy(average: Any, order: str, tmp_path: Path) -> None:
    """In a random order clusters have different numbers of cycles."""
    models = Models()
    experiment = PLURALISTIC.override(**{"pluralistic.average": average, "clusters.order": order})
    run(experiment, tmp_path / "run", callbacks=[models])
    counts = []
    for K in range(3):
        mine = [w for cluster, w in models.after if cluster == K]
        counts.append(len(mine))
        expected = mine[0]
        for w in mine[1:]:
            expected = 0.9 * expected + 0.1 * w
        if average == "uniform":
            expected = np.mean(mine, axis=0)
        ours = flat(fedcluster.load_model(tmp_path / "run", cluster=K))
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
    assert (counts == [5, 5, 5]) == (order == "reshuffle")


def test_training_is_the_same_to_the_bit(tmp_path: Path) -> None:
    run(PLAIN, tmp_path / "plain")
    run(PLURALISTIC, tmp_path / "pluralistic")
    (model, *lines), (expected, *others) = (essence(tmp_path / name) for name in ("pluralistic", "plain"))
    assert model == expected
    scores = [line.pop("by_device", None) for line in lines[0]], [line.pop("by_device", None) for line in others[0]]
    assert lines == others
    assert scores[0][-1] != scores[1][-1]


def test_devices_are_scored_with_the_model_of_their_cluster(tmp_path: Path) -> None:
    run(PLURALISTIC, tmp_path / "run")
    (line,) = [json.loads(text) for text in (tmp_path / "run" / DEVICES).read_text().splitlines()]
    setup = prepare(PLAIN)
    assert setup.evaluate_devices is not None
    for K in range(3):
        w = flat(fedcluster.load_model(tmp_path / "run", cluster=K))
        expected, _ = setup.evaluate_devices.measure(w, 5)
        for row in np.flatnonzero(np.array(line["cluster"]) == K):
            assert line["loss"][row] == expected["loss"][row]


def test_with_one_cluster_it_is_polyak_averaging(tmp_path: Path) -> None:
    models = Models()
    run(PLURALISTIC.override(**{"clusters.count": 1}), tmp_path / "run", callbacks=[models])
    mean = np.mean([w for _, w in models.after], axis=0)
    np.testing.assert_allclose(flat(fedcluster.load_model(tmp_path / "run", cluster=0)), mean, rtol=1e-5, atol=1e-6)


def test_resumed_and_shared_runs_end_at_the_same_bytes(tmp_path: Path) -> None:
    run(PLURALISTIC, tmp_path / "whole")
    run(PLURALISTIC, tmp_path / "shared", workers=2)
    with pytest.raises(KeyboardInterrupt):
        run(PLURALISTIC, tmp_path / "stopped", callbacks=[Stop()])
    run(PLURALISTIC, tmp_path / "stopped", resume=True)
    for name in ("shared", "stopped"):
        assert essence(tmp_path / name) == essence(tmp_path / "whole")
        assert cluster_files(tmp_path / name) == cluster_files(tmp_path / "whole")
    assert len(cluster_files(tmp_path / "whole")) == 3
    newest = checkpoint.names(tmp_path / "whole" / "checkpoint")[0].with_suffix(".safetensors")
    assert newest.read_bytes().count(b'"server/pluralistic.') == 3 + 1  # each model once, and the numbers of cycles


def test_a_cycle_that_fails_does_not_count() -> None:
    setup = prepare(PLURALISTIC)
    (cycle, *_) = setup.schedule.round(0)
    assert setup.experiment.pluralistic is not None
    assert step(setup.experiment.pluralistic, setup.start, setup.start, cycle) is setup.start
    assert all(model is setup.start.model for model in models(setup.start))


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadExperiment, match=r"pluralistic\.average"):
        PLAIN.override(pluralistic={"average": 1.0})
    with pytest.raises(BadExperiment, match=r'clusters.method = "redrawn" draws clusters anew'):
        prepare(PLURALISTIC.override(**{"clusters.method": "redrawn"}))
    run(PLURALISTIC.override(rounds=1), tmp_path / "run")
    with pytest.raises(BadRun, match=r"has no model of a cluster 3"):
        fedcluster.load_model(tmp_path / "run", cluster=3)
    with pytest.raises(BadRun, match="leave out best, or cluster"):
        fedcluster.load_model(tmp_path / "run", best=True, cluster=0)
    path = tmp_path / "run" / "cluster-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(BadRun, match="altered"):
        fedcluster.load_model(tmp_path / "run", cluster=1)
