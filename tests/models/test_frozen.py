"""Frozen parameters stay where they are: both sides have them from the start, so that nothing of them travels."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fedcluster
from fedcluster.data.dataset import DataSpec
from fedcluster.data.partition import one_device
from fedcluster.errors import BadData, BadRun, NotAlike
from fedcluster.flower._compat import TaskIdentity
from fedcluster.flower.client_app import client_app
from fedcluster.flower.device import Device, Identity
from fedcluster.flower.messages import pack, unpack
from fedcluster.models.flat_model import FlatModel
from fedcluster.reporting import silent
from fedcluster.runs.progress import Display
from fedcluster.training.executors.in_process import InProcess
from fedcluster.training.trainer import build_trainer
from tests.conftest import blobs
from tests.federation import Federation
from tests.flower.test_flower import plan

DATA = fedcluster.Dataset(**blobs())  # 5 features, 3 classes
TRAINED, FROZEN = 6 * 3 + 3, 5 * 6 + 6


def head_only(shape: tuple[int, ...], classes: int) -> nn.Module:
    module = nn.Sequential(nn.Linear(shape[0], 6), nn.ReLU(), nn.Linear(6, classes))
    module[0].requires_grad_(False)
    return module


def flat_head(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The same for pictures."""
    return nn.Sequential(nn.Flatten(), *head_only((int(np.prod(shape)),), classes).children())


def half_precision_body(shape: tuple[int, ...], classes: int) -> nn.Module:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = (
                nn.Linear(shape[0], 6).to(torch.bfloat16).requires_grad_(False),
                nn.Linear(6, classes),
            )

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.body(x.to(torch.bfloat16)).float())
            return out

    return Mixed()


calls = 0


def ever_another(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Frozen weights that do not come from the seed."""
    global calls
    calls += 1
    module = head_only(shape, classes)
    torch.nn.init.constant_(module.get_parameter("0.bias"), calls)
    return module


def experiment(**keys: Any) -> fedcluster.Experiment:
    plain: dict[str, Any] = {
        "rounds": 2,
        "data": {"name": DATA},
        "fleet": {"partition": "natural"},
        "clusters": {"count": 2, "participation": 1.0},
        "model": {"name": head_only},
        "local": {"steps": 4, "batch": 4, "lr": 0.1},
    }
    return fedcluster.Experiment(**plain | keys)


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "mime", "vrl_sgd"])
def test_only_what_is_trained_travels(algorithm: str, tmp_path: Path) -> None:
    described = experiment(algorithm={"name": algorithm})
    result = fedcluster.run(described, tmp_path / "run", display=Display())
    vectors = {"fedavg": (1, 1), "scaffold": (2, 2), "mime": (2, 2), "vrl_sgd": (2, 1)}[algorithm]  # down, up
    line = result.history[-1]
    assert line["bytes_down"] == 2 * 7 * vectors[0] * TRAINED * 4
    assert line["bytes_up"] == 2 * 7 * vectors[1] * TRAINED * 4
    start = FlatModel(build_trainer(described, DataSpec((5,), "class", 3)).flat_model.module)
    assert (start.w.numel(), sum(tensor.numel() for tensor in start.frozen.values())) == (TRAINED, FROZEN)
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert saved.keys() == result.model.state_dict().keys()
    assert torch.equal(saved["0.weight"], start.module.get_parameter("0.weight"))
    assert not torch.equal(saved["2.weight"], start.module.get_parameter("2.weight"))


@pytest.mark.parametrize("model", [head_only, half_precision_body])
def test_workers_and_stacks_have_the_same_frozen_weights(model: Any) -> None:
    described = experiment(model={"name": model})
    alone = fedcluster.run(described, display=Display()).model.state_dict()
    workers = fedcluster.run(described, display=Display(), workers=2).model.state_dict()
    stacked = fedcluster.run(described, display=Display(), cohorts="stacked").model.state_dict()
    for name, tensor in alone.items():
        assert torch.equal(tensor, workers[name])
        torch.testing.assert_close(tensor, stacked[name], rtol=1e-4, atol=1e-5)


def test_a_spawned_worker_with_other_frozen_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedcluster.training import setup as prepare
    from fedcluster.training.executors import processes

    monkeypatch.setattr(processes, "may_fork", lambda: False)
    described = experiment(model={"name": "tests.models.test_frozen:ever_another"})
    ever_another((5,), 3)  # a new process begins to count at 0
    setup = prepare.prepare(described)
    assert isinstance(setup.executor, InProcess)
    workers = processes.Workers(2, 100, setup.executor, described, setup.start, silent)
    try:
        with pytest.raises(NotAlike, match="other frozen weights in a worker"):
            workers.start_all()
    finally:
        workers.close()


def test_a_run_is_not_resumed_with_other_frozen_weights(tmp_path: Path) -> None:
    module = head_only((5,), 3)
    described = experiment(model={"name": module})
    fedcluster.run(described, tmp_path / "run", display=Display())
    (tmp_path / "run" / "model.safetensors").unlink()
    torch.nn.init.ones_(module.get_parameter("0.bias"))
    with pytest.raises(BadRun, match="started with different frozen weights"):
        fedcluster.run(described, tmp_path / "run", resume=True, display=Display())


def test_init_has_the_frozen_weights_too(tmp_path: Path) -> None:
    tensors = {name: torch.randn_like(tensor) for name, tensor in head_only((5,), 3).state_dict().items()}
    save_file(tensors, tmp_path / "init.safetensors")
    described = experiment(model={"name": head_only, "init": str(tmp_path / "init.safetensors")})
    model = fedcluster.run(described, display=Display()).model
    assert torch.equal(model.get_parameter("0.weight"), tensors["0.weight"])
    del tensors["0.bias"]
    save_file(tensors, tmp_path / "init.safetensors")
    with pytest.raises(BadData, match=r"must have the tensors .*0.bias \[6\].*, but 0.bias does not fit"):
        fedcluster.run(described, display=Display())


def test_a_device_of_a_federation_builds_the_frozen_weights_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the seed, or from its copy of model.init. What it sends is what the simulator's device sends, and no more."""
    for name in ("_run_id", "_task_id", "_node_id"):  # as where Flower calls it
        monkeypatch.setattr(TaskIdentity, name, 1)
    model, local = "tests.models.test_frozen:head_only", {"steps": 4, "batch": 4, "lr": 0.1}
    np.savez(tmp_path / "own.npz", **blobs())
    tensors = {name: torch.randn_like(tensor) for name, tensor in head_only((5,), 3).state_dict().items()}
    save_file(tensors, tmp_path / "init.safetensors")
    for init in ("", str(tmp_path / "init.safetensors")):
        described = fedcluster.Experiment(model={"name": model} | ({"init": init} if init else {}), local=local)
        trainer = build_trainer(described, DataSpec((5,), "class", 3))
        digest = trainer.flat_model.frozen_digest()
        text = plan(model=model, frozen=digest, local=local)
        identity = Identity("3", str(tmp_path / "own.npz"), allow=(model,), init=init)
        device = Device(identity)
        here = InProcess(trainer, device.dataset, one_device(np.arange(device.samples), device.dataset))
        received = {"model": trainer.flat_model.w.clone()}
        expected, _ = here.train_device(0, (0, 0, 0), received, None)
        facts = {"round": 0, "cycle": 0, "device": 0, "phase": 0, "run": "r", "plan": text}
        told = facts | {"cycle_start": 0, "last": 0, "number": 1, "version": fedcluster.__version__}
        context = Context(1, 1, identity.config(), RecordDict(), {})
        sent = unpack(client_app(Message(pack(told, received), 1, "train"), context).content)[1]
        assert sent.keys() == {"model"}
        assert sent["model"].shape == (TRAINED,)
        assert torch.equal(sent["model"], expected["model"])
        if init:
            with pytest.raises(BadData, match="join with --init and a copy"):
                Device(Identity("3", str(tmp_path / "own.npz"), allow=(model,))).prepare(text)


def test_a_federation_on_loopback_equals_the_simulation(tmp_path: Path) -> None:
    """Devices that have a copy of model.init; the server's ledger counts what is trained."""
    name = "tests.models.test_frozen:flat_head"
    init = tmp_path / "init.safetensors"
    save_file({key: torch.randn_like(one) for key, one in flat_head((1, 8, 8), 10).state_dict().items()}, init)
    described = fedcluster.Experiment(
        rounds=1,
        fleet={"devices": 2, "samples": 40, "partition": "iid"},
        clusters={"count": 1, "participation": 1.0},
        model={"name": name, "init": str(init)},
        local={"epochs": 2, "batch": 12, "lr": 0.1, "clip_norm": 2.0},
    )
    with Federation(tmp_path, described) as federation:
        for k in range(2):
            federation.join(k, "--allow", name, "--init", init)
        federation.finish(federation.serve("out"), "out")
        line = federation.lines("out", "metrics.jsonl")[-1]
    fedcluster.run(described, tmp_path / "simulated", display=Display())
    assert line["bytes_up"] == line["bytes_down"] == 2 * 4 * (6 * 10 + 10)
    saved = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert saved == (tmp_path / "simulated" / "model.safetensors").read_bytes()


def test_the_digest_is_of_names_types_and_values() -> None:
    assert FlatModel(nn.Linear(5, 3)).frozen_digest() is None
    module = head_only((5,), 3)
    one = FlatModel(module).frozen_digest()
    assert one == FlatModel(module).frozen_digest()
    assert len(one or "") == len(sha256().hexdigest())
    torch.nn.init.ones_(module.get_parameter("0.bias"))
    assert FlatModel(module).frozen_digest() != one
