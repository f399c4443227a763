"""Mixed precision: gradients in bfloat16, everything else in float32, and as repeatable as float32."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedcluster
from fedcluster.errors import BadExperiment, BadRun
from fedcluster.models import precision as precisions
from fedcluster.models.flat_model import FlatModel
from fedcluster.reporting import silent
from fedcluster.runs.progress import Display
from fedcluster.training import setup as prepare
from fedcluster.training.executors import processes
from fedcluster.training.executors.in_process import InProcess
from tests.conftest import Here
from tests.runs.test_resume import Remember

GRADIENT, LOSS = 0.1, 0.05  # stated in fedcluster/models/precision.py and docs/experiment.md


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.output = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.output(self.block(x[:, 0]).mean(1))
        return scores


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.output = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.output(self.lstm(x[:, 0])[0][:, -1])
        return scores


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8 * 36, 10)
    )


MAKERS: list[Any] = [Attention, Recurrent, convolution]


def experiment(model: Any = "cnn", **keys: Any) -> fedcluster.Experiment:
    plain: dict[str, Any] = {
        "rounds": 3,
        "fleet": {"devices": 12, "samples": 50},
        "clusters": {"count": 3, "participation": 0.5},
        "model": {"name": model},
        "local": {"steps": 5, "batch": 10, "lr": 0.05},
    }
    return fedcluster.Experiment(**plain | keys)


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__.lower())
def test_gradients_are_float32s_within_the_tolerance(make: Any) -> None:
    torch.manual_seed(0)
    module = make()
    exact, mixed = FlatModel(module), FlatModel(module, precision="bf16")
    seen = set[Any]()
    mixed.module.get_submodule("output" if hasattr(module, "output") else "5").register_forward_hook(
        lambda _module, _inputs, output: seen.add(output.dtype)
    )
    x, y = torch.randn(64, 1, 8, 8), torch.randint(10, (64,))
    for flat_model in (exact, mixed):
        torch.manual_seed(1)  # dropout
        flat_model.compute_gradient(x, y)
    assert seen == {torch.bfloat16}
    assert (mixed.w.dtype, mixed.gradient.dtype) == (torch.float32, torch.float32)
    assert 0 < (mixed.gradient - exact.gradient).norm() < GRADIENT * exact.gradient.norm()
    assert mixed.objective(mixed.module, x, y).dtype == torch.float32


@pytest.mark.parametrize(
    ("model", "algorithm"), [("cnn", "fedavg"), (Attention(), "fedavg"), ("mlp", "fedmax"), ("cnn", "mime")]
)
def test_a_run_reaches_the_loss_of_float32(model: Any, algorithm: str) -> None:
    described = experiment(model, algorithm={"name": algorithm}, rounds=6)
    exact, mixed = (fedcluster.run(described, display=Display(), precision=name) for name in ("float32", "bf16"))
    assert mixed.history[-1]["train_loss"] == pytest.approx(exact.history[-1]["train_loss"], rel=LOSS)
    assert mixed.history[-1]["train_loss"] != exact.history[-1]["train_loss"]


def test_workers_and_resume_equal_one_process_to_the_bit(tmp_path: Path) -> None:
    described = experiment(convolution())
    alone = fedcluster.run(described, tmp_path / "alone", display=Display(), precision="bf16").model.state_dict()
    workers = fedcluster.run(described, display=Display(), precision="bf16", workers=2).model.state_dict()
    facts = json.loads((tmp_path / "alone" / "run.json").read_text())
    assert (facts["precision"], facts["arithmetic"]) == ("bf16", "bf16 torch")

    class Interrupt(fedcluster.Callback):
        def on_round_end(self, line: Any, state: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedcluster.run(described, tmp_path / "again", display=Display(), precision="bf16", callbacks=[Interrupt()])
    with pytest.raises(BadRun, match="was started with --precision bf16: resume it with the same"):
        fedcluster.run(described, tmp_path / "again", resume=True, display=Display())
    again = fedcluster.run(described, tmp_path / "again", resume=True, display=Display(), precision="bf16").model
    for name, tensor in alone.items():
        assert torch.equal(tensor, workers[name])
        assert torch.equal(tensor, again.state_dict()[name])


def test_a_spawned_worker_has_the_same_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker with other arithmetic would be refused when it is ready."""
    monkeypatch.setattr(processes, "may_fork", lambda: False)
    described = experiment("logistic")
    setup = prepare.prepare(described, precision="bf16")
    assert isinstance(setup.executor, InProcess)
    workers = processes.Workers(2, 100, setup.executor, described, setup.start, silent)
    try:
        workers.start_all()
        assert [worker.ready for worker in workers.workers] == [True]
    finally:
        workers.close()


def test_stacks_are_within_the_tolerance() -> None:
    display = Remember()
    stacked = fedcluster.run(experiment("mlp"), display=display, precision="bf16", cohorts="stacked")
    alone = fedcluster.run(experiment("mlp"), display=Display(), precision="bf16")
    assert not any("cannot be stacked" in text for text in display.said)
    assert stacked.history[-1]["train_loss"] == pytest.approx(alone.history[-1]["train_loss"], rel=LOSS)


def test_it_says_what_the_hardware_lacks(monkeypatch: pytest.MonkeyPatch, here: Here, write_experiment: Any) -> None:
    for capabilities, emulated in (({"avx512_bf16": False}, True), ({"bf16": True}, False)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found, raising=False)
        assert (precisions.emulated(torch.device("cpu")) is not None) == emulated
        display = Remember()
        fedcluster.run(experiment("logistic", rounds=1), display=display, precision="bf16")
        assert any("--precision bf16 is emulated" in text for text in display.said) == emulated
        assert any("the compiled engine trains this model" in text for text in display.said)
    with pytest.raises(BadExperiment, match="precision = 'fp8' is not allowed: use one of float32, bf16"):
        fedcluster.run(experiment(), display=Display(), precision="fp8")
    code, out, _ = here("run", write_experiment(), "--precision", "bf16")
    assert (code, "training loss" in out) == (0, True)
