"""Stopping early from the experiment file, keeping the best model, and loading models from a run's folder."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fedcluster
from fedcluster.errors import BadExperiment, BadRun
from fedcluster.runs.progress import Display
from fedcluster.training import checkpoints
from fedcluster.training.best_model import stored_round
from tests.runs.test_resume import EXPERIMENT, Remember, essence

WORSE = EXPERIMENT.override(**{"local.lr": 0.05, "rounds": 8})  # its loss goes up and down


def run(experiment: fedcluster.Experiment, folder: Path, **options: Any) -> fedcluster.Result:
    return fedcluster.run(experiment, folder, display=options.pop("display", Display()), **options)


def test_a_run_stops_at_its_target_and_goes_on_when_it_is_raised(tmp_path: Path) -> None:
    whole = run(EXPERIMENT, tmp_path / "whole")
    losses = [line["train_loss"] for line in whole.history]
    stop = {"metric": "train_loss", "target": losses[2]}
    said = Remember()
    stopped = run(EXPERIMENT.override(stop=stop), tmp_path / "run", display=said)
    assert len(stopped.history) == 3
    assert any(f"stopped after round 3: train_loss has reached {losses[2]:.6g}" in text for text in said.said)
    for rounds in (6, 9):  # more rounds do not change what it stops for
        again = run(EXPERIMENT.override(stop=stop, rounds=rounds), tmp_path / "run", resume=True)
        assert len(again.history) == 3
    run(EXPERIMENT.override(stop=stop | {"target": losses[-1]}, rounds=9), tmp_path / "run", resume=True)
    assert essence(tmp_path / "run") == essence(tmp_path / "whole")


def test_a_run_stops_at_a_number_of_bytes(tmp_path: Path) -> None:
    experiment = EXPERIMENT.override(rounds=4)
    sent = [line["bytes_up"] for line in run(experiment, tmp_path / "whole").history]
    said = Remember()
    stop = {"metric": "bytes_up", "target": sent[1]}
    assert len(run(experiment.override(stop=stop), tmp_path / "run", display=said).history) == 2
    assert any(f"bytes_up has reached {sent[1]:,}" in text for text in said.said)


def test_devices_that_are_never_scored_are_said(tmp_path: Path) -> None:
    said = Remember()
    keys = {"rounds": 2, "fleet.test_share": 0.2, "eval.every": 3}
    run(EXPERIMENT.override(**keys), tmp_path / "run", display=said)
    assert any("devices are scored every 3 rounds (eval.every), and the run has 2" in text for text in said.said)


def test_a_higher_accuracy_is_better(tmp_path: Path) -> None:
    stop = {"metric": "test_accuracy", "target": 0.3}
    history = run(EXPERIMENT.override(stop=stop), tmp_path).history
    assert [line["test_accuracy"] >= 0.3 for line in history] == [False] * (len(history) - 1) + [True]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"stop": {"metric": "test_loss"}}, "stop needs target, a score to reach, or patience"),
        ({"stop": {"patience": 0}}, r"stop\.patience = 0 is not allowed"),
        (
            {"stop": {"metric": "test_acuracy", "patience": 1}},
            r"stop\.metric: 'test_acuracy' is not a score with one value a round; there are",
        ),
        (
            {"eval": {"best": "test_acuracy"}},
            r"eval\.best: 'test_acuracy' is not a score with one value a round; there are",
        ),
        (
            {"metrics": ["accuracy", "per_class_accuracy"], "eval": {"best": "test_per_class_accuracy/0"}},
            r"'test_per_class_accuracy/0' is not a score with one value a round; .* test_loss, test_accuracy$",
        ),
        (
            {"metrics": ["per_class_accuracy"], "stop": {"metric": "test_per_class_accuracy", "patience": 1}},
            r"'test_per_class_accuracy' is not a score with one value a round; there are train_loss, test_loss$",
        ),
        ({"stop": {"metric": "accuracy", "patience": 1}}, r"stop\.metric: 'accuracy' is not a score with one value"),
        ({"eval": {"best": "bytes_up"}}, r"eval\.best: 'bytes_up' is not a score with one value"),
        ({"eval": {"devices": "some"}}, r"eval\.devices = 'some' is not allowed"),
    ],
)
def test_bad_rules_are_refused_before_anything_is_written(keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(BadExperiment, match=said):
        run(EXPERIMENT.override(**keys), tmp_path / "run")
    assert not (tmp_path / "run").exists()


class Watch(fedcluster.Callback):
    """Keeps every round's model, or ends the run in the middle of one."""

    def __init__(self, stop_in: int = -1) -> None:
        self.models: list[torch.Tensor] = []
        self.stop_in = stop_in

    def on_cycle_start(self, cycle: Any, state: Any) -> None:
        if (cycle.round, cycle.cycle) == (self.stop_in, 2):
            raise KeyboardInterrupt

    def on_round_end(self, line: Any, state: Any) -> None:
        self.models.append(state.model.clone())


def test_the_best_model_is_kept_also_when_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, watch = WORSE.override(**{"eval.best": "test_accuracy"}), Watch()
    history = run(experiment, tmp_path / "whole", callbacks=[watch]).history
    scores = [line["test_accuracy"] for line in history]
    best = scores.index(max(scores))
    assert stored_round(tmp_path / "whole" / "best.safetensors") == best + 1
    model = fedcluster.load_model(tmp_path / "whole", best=True)
    assert torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), watch.models[best])
    monkeypatch.setattr(checkpoints, "SAVE_EVERY", 1e9)  # the newest checkpoint may be older than the best model
    for stop_in in (1, 4):
        with pytest.raises(KeyboardInterrupt):
            run(experiment, tmp_path / "run", resume=stop_in > 1, callbacks=[Watch(stop_in)])
    run(experiment, tmp_path / "run", resume=True)
    both = [(tmp_path / name / "best.safetensors").read_bytes() for name in ("run", "whole")]
    assert both[0] == both[1]
    assert essence(tmp_path / "run") == essence(tmp_path / "whole")


def test_a_best_model_that_is_gone_is_said(tmp_path: Path) -> None:
    experiment = EXPERIMENT.override(**{"eval.best": "train_loss", "rounds": 2})
    run(experiment, tmp_path)
    (tmp_path / "best.safetensors").unlink()
    with pytest.raises(BadRun, match=r"best\.safetensors was deleted after the run had finished"):
        run(experiment, tmp_path, resume=True)
    (tmp_path / "model.safetensors").unlink()
    said = Remember()
    run(experiment, tmp_path, resume=True, display=said)
    assert any("the best model so far, of round 2, is lost" in text for text in said.said)


def test_a_loaded_model_is_the_trained_one(tmp_path: Path) -> None:
    result = run(EXPERIMENT.override(rounds=1), tmp_path)
    model = fedcluster.load_model(tmp_path)
    assert not model.training
    for name, tensor in result.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


class Own(torch.nn.Module):
    built = 0

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        type(self).built += 1
        self.linear = torch.nn.Linear(64, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.linear(x.flatten(1))
        return scores


def test_code_of_ones_own_is_imported_only_if_it_is_allowed(tmp_path: Path) -> None:
    name = f"{__name__}:Own"
    run(EXPERIMENT.override(**{"model.name": name, "rounds": 1}), tmp_path)
    built = Own.built
    with pytest.raises(BadRun, match=r"is code of its own: if you trust .*:Own, add allow="):
        fedcluster.load_model(tmp_path)
    assert Own.built == built
    assert isinstance(fedcluster.load_model(tmp_path, allow=(name,)), Own)


def test_a_folder_that_is_not_a_whole_finished_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRun, match="does not hold a finished run"):
        fedcluster.load_model(tmp_path)
    run(EXPERIMENT.override(rounds=1), tmp_path / "run")
    with pytest.raises(BadRun, match=r"has no best\.safetensors: the run did not keep its best model"):
        fedcluster.load_model(tmp_path / "run", best=True)
    path = tmp_path / "run" / "model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, path)
    with pytest.raises(BadRun, match=r"model\.safetensors is missing or altered since the run finished"):
        fedcluster.load_model(tmp_path / "run")
