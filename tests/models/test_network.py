"""The compiled engine on linear layers: its steps are those of autograd, as exactly as float32 allows."""

from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedcluster
from fedcluster.data.dataset import DataSpec
from fedcluster.fleet import fleet as fleets
from fedcluster.models import zoo as models
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.kernels import library, supports
from fedcluster.training.evaluation import SAMPLE, Evaluator

needs_compiler = pytest.mark.skipif(library.load() is None, reason="there is no C compiler here")


def by_autograd(module: nn.Module, x: Tensor, y: Tensor, batch: int, lr: float) -> Tensor:
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    for rows, labels in zip(torch.split(x, batch), torch.split(y, batch), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(module(rows.to(next(module.parameters()).dtype)), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return torch.cat([p.detach().double().flatten() for p in module.parameters()])


def by_torch(module: nn.Module) -> FlatModel:
    flat_model = FlatModel(module)
    flat_model.network = None
    return flat_model


def local_sgd(
    flat_model: FlatModel, x: Tensor, y: Tensor, batch: int, lr: float, step_offset: Tensor | None = None
) -> None:
    """Over the batches of x in their order, out of a data set in another order."""
    assert flat_model.network is not None
    order = torch.randperm(len(y))
    shuffled = fedcluster.Dataset(x[order], y[order], x, y)
    flat_model.network.sgd(shuffled, torch.argsort(order).view(-1, batch), lr, step_offset)


def network(*sizes: int) -> nn.Module:
    parts: list[nn.Module] = [nn.Flatten()]
    for i, o in pairwise(sizes):
        parts += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def trains_on_bytes(module: nn.Module, shape: tuple[int, ...]) -> None:
    """Steps on bytes are those on the standardised numbers."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(256, (40, *shape), generator=rng).to(torch.uint8)
    dataset = fedcluster.Dataset(x, torch.arange(40) % 4, x, torch.arange(40) % 4)
    flat_model, plain = FlatModel(module), by_torch(module)
    assert flat_model.network is not None
    rows = torch.randint(40, (3, 6), generator=rng)
    flat_model.network.sgd(dataset, rows, lr=0.1)
    for batch in rows:
        plain.compute_gradient(dataset.inputs(dataset.x_train[batch]), dataset.y_train[batch])
        plain.w.sub_(plain.gradient, alpha=0.1)
    torch.testing.assert_close(flat_model.w, plain.w, rtol=1e-5, atol=1e-6)


def adds_step_offset(module: nn.Module, shape: tuple[int, ...], classes: int) -> None:
    """After every step, as torch does."""
    flat_model, plain = FlatModel(module), by_torch(module)
    x, y, offset = torch.randn(20, *shape), torch.randint(classes, (20,)), torch.randn(plain.size) * 0.01
    local_sgd(flat_model, x, y, 5, 0.1, offset)
    for rows, labels in zip(torch.split(x, 5), torch.split(y, 5), strict=True):
        plain.compute_gradient(rows, labels)
        plain.w.sub_(plain.gradient, alpha=0.1).add_(offset)
    torch.testing.assert_close(flat_model.w, plain.w, rtol=1e-5, atol=1e-6)


def evaluates_like_torch(module: nn.Module, shape: tuple[int, ...], rows: int, threads: int) -> None:
    x = torch.randint(256, (rows, *shape)).to(torch.uint8)
    dataset = fedcluster.Dataset(x, torch.arange(rows) % 5, x, torch.arange(rows) % 5, classes=5)
    options = fedcluster.Experiment(fleet={"devices": 1, "samples": 1, "partition": "iid"}).fleet
    flat_model = FlatModel(module)
    evaluate = Evaluator(flat_model, dataset, fleets.build(options, dataset, 0)[1].pooled(SAMPLE, 0))
    evaluate.threads = threads
    fast = evaluate(flat_model.w.clone())
    flat_model.network = None
    slow = evaluate(flat_model.w.clone())
    assert fast == pytest.approx(slow, rel=1e-5)
    assert fast["test_accuracy"] == slow["test_accuracy"]


@needs_compiler
@pytest.mark.parametrize("sizes", [(64, 10), (784, 200, 200, 10), (7, 5, 3), (33, 17, 9, 8, 2), (16, 16, 1)])
@pytest.mark.parametrize("batch", [30, 1, 7, 13])
def test_as_close_to_the_truth_as_autograd(sizes: tuple[int, ...], batch: int) -> None:
    torch.manual_seed(0)
    module = network(*sizes)
    x, y = torch.randn(3 * batch, sizes[0]), torch.randint(sizes[-1], (3 * batch,))
    truth = by_autograd(deepcopy(module).double(), x, y, batch, lr=0.1)
    theirs = by_autograd(deepcopy(module), x, y, batch, lr=0.1)
    flat_model = FlatModel(module)
    local_sgd(flat_model, x, y, batch, lr=0.1)
    found = flat_model.w.double()
    assert (found - truth).norm() <= 2 * (theirs - truth).norm() + 1e-7
    assert (found - truth).abs().max() < 1e-6


@needs_compiler
@pytest.mark.parametrize("shape", [(784, 200), (200, 10), (9, 10), (101, 100)])
def test_sums_are_formed_before_they_are_added(shape: tuple[int, int]) -> None:
    """Thirty terms, each too small to change a weight, together change it."""
    flat_model = FlatModel(network(*shape))
    flat_model.w.fill_(1.0)
    y = torch.zeros(30, dtype=torch.int64)
    local_sgd(flat_model, torch.full((30, shape[0]), 1e-2), y, 30, lr=1e-4)  # towards class 0: 30 terms of about 3e-8
    expected = 1e-6 * (1 - 1 / shape[1])
    assert flat_model.w[: shape[0]].double().sub(1).mean().item() == pytest.approx(expected, abs=6e-8)


@needs_compiler
@pytest.mark.parametrize("sizes", [(64, 10), (33, 17, 9, 2)])
def test_the_step_offset_is_added_after_every_step(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    adds_step_offset(network(*sizes), sizes[:1], sizes[-1])


@needs_compiler
@pytest.mark.parametrize("model", ["logistic", "mlp", "cnn", "alexnet"])
def test_gradients_are_as_close_to_the_truth_as_those_of_autograd(model: str) -> None:
    torch.manual_seed(0)
    module = models.build(model, DataSpec((3, 9, 7), "class", 10), seed=0)
    flat_model, plain, truth = FlatModel(module), by_torch(module), deepcopy(module).double()
    for batch in (7, 1, 30, 7):
        x, y = torch.randn(batch, 3, 9, 7), torch.randint(10, (batch,))
        before = flat_model.w.clone()
        flat_model.compute_gradient(x, y)
        plain.compute_gradient(x, y)
        assert torch.equal(flat_model.w, before)
        slopes = torch.autograd.grad(F.cross_entropy(truth(x.double()), y), list(truth.parameters()))
        exact = torch.cat([slope.flatten() for slope in slopes])
        assert (flat_model.gradient - exact).norm() <= 2 * (plain.gradient - exact).norm() + 1e-7


@needs_compiler
def test_nan_goes_through_every_layer() -> None:
    """A run that diverges must be noticed."""
    flat_model = FlatModel(network(8, 6, 3))
    flat_model.w[0] = float("nan")
    local_sgd(flat_model, torch.ones(4, 8), torch.zeros(4, dtype=torch.int64), 4, lr=0.1)
    assert not torch.isfinite(flat_model.w[-3:]).any(), "NaN did not reach the last layer"


@needs_compiler
@pytest.mark.parametrize("channels", [1, 3])
def test_bytes_are_standardised(channels: int) -> None:
    trains_on_bytes(network(25 * channels, 7, 4), (channels, 5, 5))


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 60, 61, 250])
def test_evaluation_finds_what_torch_finds(threads: int, rows: int) -> None:
    torch.manual_seed(0)
    evaluates_like_torch(network(48, 11, 5), (3, 4, 4), rows, threads)


@needs_compiler
def test_the_models_of_the_zoo_are_compiled() -> None:
    for model in (models.MLP, models.Logistic):
        assert FlatModel(model((1, 8, 8), 10)).network is not None


class Own(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[0](x) * 2  # type: ignore[no-any-return]


def tied() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer)


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 3))
    module[0].register_forward_hook(lambda *_: None)
    return module


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3))
    module[0].bias.requires_grad_(False)
    return module


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "own forward": lambda: Own(nn.Linear(4, 3)),
    "weights used twice": tied,
    "a hook": hooked,
    "a frozen bias": frozen,
    "no bias": lambda: nn.Sequential(nn.Linear(4, 3, bias=False)),
    "another activation": lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)),
    "dropout": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 3)),
    "ends with ReLU": lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU()),
    "two layers on end": lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)),
    "too many layers": lambda: network(*[3] * 18),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_left_to_autograd(name: str) -> None:
    assert FlatModel(OTHERS[name]()).network is None


@pytest.mark.parametrize(("inputs", "compiles"), [(2048, True), (2049, False)])
def test_very_wide_layers_are_left_to_torch(inputs: int, compiles: bool) -> None:
    module = nn.Sequential(nn.Linear(inputs, 2048, device="meta"), nn.ReLU(), nn.Linear(2048, 10, device="meta"))
    assert supports(module) == compiles


@needs_compiler
@pytest.mark.parametrize("batch", [5, 300])
def test_wide_layers_find_what_torch_finds(batch: int) -> None:
    """Rows that would be a power of two apart, and a batch for which tiles are grouped."""
    torch.manual_seed(0)
    sizes = nn.Linear(30, 512), nn.ReLU(), nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 5)
    flat_model = FlatModel(nn.Sequential(*sizes))
    assert flat_model.network is not None
    plain = by_torch(nn.Sequential(*sizes))
    x, y = torch.randn(batch, 30), torch.randint(5, (batch,))
    flat_model.compute_gradient(x, y)
    plain.compute_gradient(x, y)
    torch.testing.assert_close(flat_model.gradient, plain.gradient, rtol=1e-4, atol=1e-6)
