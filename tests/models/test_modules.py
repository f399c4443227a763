"""Modules of all kinds: trained through many batches of one shape, and saved whole; with or without a trace."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import fedcluster
from fedcluster import allocator
from fedcluster.errors import BadData, BadExperiment
from fedcluster.experiment import Local
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.local_sgd import Batches, local_sgd
from fedcluster.rng import torch_seed
from fedcluster.runs.progress import Display
from tests.conftest import blobs

DATA = fedcluster.Dataset(**blobs())  # 5 features, 3 classes


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.lstm(x[:, :, None])[0][:, -1])
        return out


class Shifted(nn.Module):
    """A float buffer that forward uses, and one that is not persistent."""

    mean: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("mean", torch.linspace(-1, 1, 5))
        self.register_buffer("scale", torch.full((5,), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear((x - self.mean) * self.scale)
        return out


class Ordered(Shifted):
    """With an integer buffer, too."""

    order: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.tensor([4, 2, 0, 1, 3]))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, self.order])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(5, 5), nn.Linear(5, 5, bias=False), nn.Linear(5, 3)
        self.again.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.again(torch.tanh(self.first(x))))
        return out


class Shared(nn.Module):
    """A submodule under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
        self.also, self.last = self.body, nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.also(F.relu(self.body(x))))
        return out


class SharedSteady(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 5)
        self.also, self.last = self.body, nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.also(F.relu(self.body(x))))
        return out


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    module[2].requires_grad_(False)
    return module


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def dropped() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3))


MAKERS: list[Callable[[], nn.Module]] = [
    Recurrent,
    Shifted,
    Ordered,
    Tied,
    Shared,
    SharedSteady,
    frozen,
    normed,
    dropped,
]


class InterruptAfterOneRound(fedcluster.Callback):
    def on_round_end(self, line: Any, state: Any) -> None:
        raise KeyboardInterrupt


def experiment(module: nn.Module, **keys: Any) -> fedcluster.Experiment:
    return fedcluster.Experiment(
        rounds=2,
        data={"name": DATA},
        fleet={"partition": "natural"},
        clusters={"count": 2, "participation": 1.0},
        model={"name": module} | keys,
        local={"steps": 5, "batch": 4, "lr": 0.05},
    )


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__.lower())
def test_five_hundred_batches_of_one_shape(make: Callable[[], nn.Module]) -> None:
    """Nothing that is prepared after some batches, such as a trace, may break or change a module: all 500 steps are
    those of torch's own loop."""
    torch.manual_seed(0)
    module = make()
    flat_model, theirs = FlatModel(module), deepcopy(module).train()
    batches = Batches(DATA, np.arange(60), Local(steps=500, batch=4, lr=0.02), 0, (0, 0, 0))
    w = local_sgd(flat_model, flat_model.w.clone(), batches)
    torch.manual_seed(torch_seed(0, "dropout", 0, 0, 0))
    optimizer = torch.optim.SGD([p for p in theirs.parameters() if p.requires_grad], 0.02)
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(theirs(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for name, tensor in theirs.state_dict().items():
        if tensor.is_floating_point():
            torch.testing.assert_close(flat_model.state_dict(w)[name], tensor, rtol=1e-3, atol=1e-4)
    start, last = module.state_dict(), flat_model.state_dict(w)
    assert any(not torch.allclose(start[name], last[name], atol=0.05) for name in start), "the module is trained"


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__.lower())
def test_an_interrupted_run_writes_the_same_state_dict(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    """Resuming changes no bit, and the file has the whole state dict of the module."""
    torch.manual_seed(0)
    module = make()
    result = fedcluster.run(experiment(module), tmp_path / "run", display=Display())
    assert result.history[-1]["device_updates"] == 2 * 7
    with pytest.raises(KeyboardInterrupt):
        fedcluster.run(
            experiment(module), tmp_path / "interrupted", display=Display(), callbacks=[InterruptAfterOneRound()]
        )
    fedcluster.run(experiment(module), tmp_path / "interrupted", resume=True, display=Display())
    saved = tmp_path / "run" / "model.safetensors"
    assert saved.read_bytes() == (tmp_path / "interrupted" / "model.safetensors").read_bytes()

    fresh = make()
    fresh.load_state_dict(load_file(saved), strict=True)
    assert load_file(saved).keys() == fresh.state_dict().keys()
    x = DATA.inputs(DATA.x_test)
    assert torch.equal(fresh.eval()(x), result.model.eval()(x))
    again = fedcluster.run(experiment(module), tmp_path / "run", resume=True, display=Display())
    assert torch.equal(again.model.eval()(x), fresh(x))
    fedcluster.run(experiment(module, init=str(saved)), display=Display())


def test_tied_weights_in_a_file_are_equal_or_refused(tmp_path: Path) -> None:
    tensors = {key: tensor.clone() for key, tensor in Tied().state_dict().items()}
    without = {key: tensor for key, tensor in tensors.items() if key != "again.weight"}
    save_file(without, tmp_path / "one.safetensors")
    fedcluster.run(experiment(Tied(), init=str(tmp_path / "one.safetensors")), display=Display())
    tensors["again.weight"] += 1
    save_file(tensors, tmp_path / "two.safetensors")
    with pytest.raises(BadData, match=r"must have the tensors .*, but \S+\.weight does not fit"):
        fedcluster.run(experiment(Tied(), init=str(tmp_path / "two.safetensors")), display=Display())


class Wordy(nn.Module):
    def __init__(self, answer: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.answer = nn.Linear(5, 3), answer

    def forward(self, x: Tensor) -> Any:
        return self.answer(self.linear(x))


class Output:
    """As Hugging Face's models return them."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


@pytest.mark.parametrize(
    "answer",
    [lambda scores: {"logits": scores}, lambda scores: (scores, None), Output],
    ids=["dict", "tuple", "output"],
)
def test_the_outputs_are_found_in_what_a_model_returns(answer: Callable[[Tensor], Any]) -> None:
    torch.manual_seed(0)
    wordy = Wordy(answer)
    result = fedcluster.run(experiment(wordy), display=Display())
    wordy.answer = lambda scores: scores
    assert (
        result.history[-1]["train_loss"]
        == fedcluster.run(experiment(wordy), display=Display()).history[-1]["train_loss"]
    )


@pytest.mark.parametrize("answer", [lambda _: None, lambda _: {}, lambda scores: (None, scores)])
def test_a_model_without_outputs_is_named(answer: Callable[[Tensor], Any]) -> None:
    with pytest.raises(BadExperiment, match=r"the model returns a .* without outputs: it must return a tensor"):
        fedcluster.run(experiment(Wordy(answer)), display=Display())


def test_a_model_that_fails_is_named() -> None:
    def answer(scores: Tensor) -> Any:
        return dict[str, Tensor]()["logits"]

    with pytest.raises(BadExperiment, match=r"model.name: the model does not take samples \[5\]"):
        fedcluster.run(experiment(Wordy(answer)), display=Display())


def test_a_run_from_python_keeps_memory_as_the_command_does(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    class Library:
        def mallopt(self, what: int, value: int) -> None:
            calls.append((what, value))

    monkeypatch.setattr("fedcluster.allocator.sys.platform", "linux")
    monkeypatch.setattr("fedcluster.allocator.ctypes.CDLL", lambda name: Library())
    fedcluster.run(experiment(dropped()).override(rounds=1), display=Display())
    assert calls == [(allocator.MMAP_THRESHOLD, allocator.LARGE), (allocator.TRIM_THRESHOLD, allocator.LARGE)]
