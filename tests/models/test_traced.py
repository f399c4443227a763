"""A traced program finds autograd's gradient to the bit, or is not used."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedcluster.models import flat_model as flat_models
from fedcluster.models import zoo as models
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.kernels import traced as programs
from tests.models.test_network import by_torch


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first batch, after a trial of one batch that is always won."""
    monkeypatch.setattr(flat_models, "WORTH_A_PROGRAM", 1)
    monkeypatch.setattr(programs, "BATCHES", 1)
    monkeypatch.setattr(programs, "FASTER", 1e9)
    torch.manual_seed(0)


@pytest.mark.parametrize("name", ["logistic", "mlp", "cnn", "alexnet"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 12, 12)])
def test_gradients_are_the_same_to_the_bit(name: str, shape: tuple[int, ...]) -> None:
    module = models.build(name, shape, 10, seed=0)
    plain, traced = by_torch(module), by_torch(module)
    for step in range(4):
        x, y = torch.randn(6, *shape), torch.randint(10, (6,))
        plain.programs.clear()
        plain.compute_gradient(x, y)
        traced.compute_gradient(x, y)
        assert torch.equal(plain.gradient, traced.gradient)
        assert traced.programs, step
        for flat_model in (plain, traced):
            flat_model.w[: flat_model.size].add_(flat_model.gradient, alpha=-0.1)


class DependsOnData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else -self.linear(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)),
        lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)),
        DependsOnData,
    ],
    ids=["dropout", "running statistics", "depends on data"],
)
def test_what_cannot_be_a_straight_line_is_left_to_autograd(make: Callable[[], nn.Module]) -> None:
    flat_model = FlatModel(make())
    flat_model.module.train()
    for _ in range(3):
        flat_model.compute_gradient(torch.randn(6, 4), torch.randint(3, (6,)))
    assert not flat_model.programs
    assert flat_model.gradient.abs().sum() > 0


def test_a_new_shape_of_batch_gets_its_own_program() -> None:
    flat_model = by_torch(models.build("logistic", (4,), 3, seed=0))
    for rows in (5, 7, 5, 7):
        flat_model.compute_gradient(torch.randn(rows, 4), torch.randint(3, (rows,)))
    assert set(flat_model.programs) == {torch.Size((5, 4)), torch.Size((7, 4))}


class Fickle(nn.Module):
    """Python decides, and not the data: what was traced once is not what comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.linear(x) * (2 if self.calls % 5 == 0 else 1)
        return out


def test_a_program_that_fails_its_trial_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "BATCHES", 10)
    flat_model, plain = FlatModel(Fickle()), FlatModel(Fickle())
    plain.load(flat_model.w)
    for _ in range(12):
        x, y = torch.randn(6, 4), torch.randint(3, (6,))
        flat_model.compute_gradient(x, y)
        plain.gradient.zero_()
        with torch.enable_grad():
            plain.objective(plain.module, x, y).backward()  # type: ignore[no-untyped-call]
        assert torch.equal(flat_model.gradient, plain.gradient)
    assert flat_model.trials
    assert not flat_model.programs


def test_a_program_that_is_not_faster_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "FASTER", 0.0)
    flat_model = by_torch(models.build("logistic", (4,), 3, seed=0))
    for _ in range(3):
        flat_model.compute_gradient(torch.randn(5, 4), torch.randint(3, (5,)))
    assert flat_model.trials
    assert not flat_model.programs
