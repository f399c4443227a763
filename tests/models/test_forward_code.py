"""A module whose class has a `forward` of its own is compiled if it is a chain of layers, and only then."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import relu

from fedcluster.models.flat_model import FlatModel
from fedcluster.models.kernels import supports
from fedcluster.models.kernels.forward_code import layers_of
from tests.models.test_network import by_torch, needs_compiler

scale = 2.0


class Net(nn.Module):
    """Layers for the forward methods below, which are tried one by one."""

    def __init__(self, forward: Any = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 7), nn.Linear(7, 3)
        self.number, self.flag = 2, True


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 6, 5, padding=2)
        self.pool, self.relu = nn.MaxPool2d(2), nn.ReLU()
        self.head = nn.Sequential(nn.Linear(6 * 2 * 3, 9), nn.ReLU(), nn.Linear(9, 3))


def with_forward(kind: type[nn.Module], forward: Callable[..., Any]) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = type(kind.__name__, (kind,), {"forward": forward})()
    return made


def flat(self: Any, x: Tensor) -> Any:
    return self.second(F.relu(self.first(torch.flatten(x, 1))))


def steps(self: Any, x: Tensor) -> Any:
    """With a docstring, names for what is between, and methods."""
    x = x.flatten(start_dim=1)
    hidden = self.first(x)
    hidden = hidden.relu()
    return self.second(hidden)


def by_size(self: Any, x: Tensor) -> Any:
    x = x.view(x.size(0), -1)
    return self.second(torch.relu(self.first(x)))


def by_shape(self: Any, x: Tensor) -> Any:
    return self.second(relu(self.first(x.reshape(x.shape[0], -1)), inplace=True))


def by_number(self: Any, x: Tensor) -> Any:
    return self.second(torch.nn.functional.relu(self.first(x.view(-1, 12))))


def pooled(self: Any, x: Tensor) -> Any:
    x = F.max_pool2d(F.relu(self.conv1(x)), 2)
    x = self.pool(self.relu(self.conv2(x)))
    return self.head(torch.flatten(x, 1))


def pooled_by_name(self: Any, x: Tensor) -> Any:
    x = F.relu(F.max_pool2d(self.conv1(x), kernel_size=2, stride=2))
    x = torch.max_pool2d(self.relu(self.conv2(x)), 2, 2)
    return self.head(x.view(x.size()[0], -1))


CHAINS: list[tuple[type[nn.Module], Callable[..., Any]]] = [
    (Net, flat),
    (Net, steps),
    (Net, by_size),
    (Net, by_shape),
    (Net, by_number),
]
CHAINS += [(ConvNet, pooled), (ConvNet, pooled_by_name)]


@needs_compiler
@pytest.mark.parametrize(("kind", "forward"), CHAINS, ids=lambda value: value.__name__)
def test_a_chain_takes_compiled_steps(kind: type[nn.Module], forward: Callable[..., Any]) -> None:
    module = with_forward(kind, forward)
    flat_model, plain = FlatModel(module), by_torch(module)
    assert flat_model.arithmetic == "compiled"
    shape = (1, 3, 4) if kind is Net else (1, 9, 13)
    x, y = torch.randn(6, *shape), torch.randint(3, (6,))
    flat_model.compute_gradient(x, y)
    plain.compute_gradient(x, y)
    torch.testing.assert_close(flat_model.gradient, plain.gradient, rtol=1e-4, atol=1e-6)
    assert plain.gradient.abs().sum() > 0


def test_modules_in_modules_are_opened() -> None:
    parts = (
        with_forward(Net, flat),
        nn.ReLU(),
        nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU()), nn.Linear(4, 2)),
    )
    found = layers_of(nn.Sequential(*parts))
    assert found is not None
    kinds = [nn.Flatten, nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]
    assert [type(layer) for layer in found] == kinds
    assert supports(nn.Sequential(*parts))


def branches(self: Any, x: Tensor) -> Any:
    return self.second(F.relu(self.first(x.flatten(1)))) if self.training else self.first(x)


def depends_on_data(self: Any, x: Tensor) -> Any:
    return flat(self, x) if x.sum() > 0 else -flat(self, x)


def counts(self: Any, x: Tensor) -> Any:
    self.number = self.number + 1
    return self.second(F.relu(self.first(x.flatten(1))))


def picks(self: Any, x: Tensor) -> Any:
    return self.second((F.relu, torch.relu)[self.number - 2](self.first(x.flatten(1))))


def scales(self: Any, x: Tensor) -> Any:
    return self.second(F.relu(self.first(x.flatten(1)))) * 2


def scales_by_a_global(self: Any, x: Tensor) -> Any:
    return self.second(F.relu(self.first(x.flatten(1)))) * scale


def calls_another(self: Any, x: Tensor) -> Any:
    return flat(self, x)


def skips(self: Any, x: Tensor) -> Any:
    hidden = self.first(x.flatten(1))
    return self.second(F.relu(hidden) + hidden)


def drops(self: Any, x: Tensor) -> Any:
    return self.second(F.dropout(F.relu(self.first(x.flatten(1))), 0.5, self.training))


def another_activation(self: Any, x: Tensor) -> Any:
    return self.second(torch.tanh(self.first(x.flatten(1))))


def no_activation(self: Any, x: Tensor) -> Any:
    return self.second(self.first(x.flatten(1)))


def flattens_everything(self: Any, x: Tensor) -> Any:
    return self.second(F.relu(self.first(torch.flatten(x))))


def other_order(self: Any, x: Tensor) -> Any:
    return self.first(F.relu(self.second(x.flatten(1))))


def one_unused(self: Any, x: Tensor) -> Any:
    return self.first(x.flatten(1))


def recurrent(self: Any, x: Tensor) -> Any:
    return self.second(F.relu(self.second(F.relu(self.first(x.flatten(1))))))


def with_an_option(self: Any, x: Tensor, extra: int = 0) -> Any:
    return self.second(F.relu(self.first(x.flatten(1))))


def returns_before_the_end(self: Any, x: Tensor) -> Any:
    x = self.second(F.relu(self.first(x.flatten(1))))
    F.relu(x)
    return x


def in_a_loop(self: Any, x: Tensor) -> Any:
    for layer in (self.first, self.second):
        x = layer(F.relu(x.flatten(1)))
    return x


def larger_windows(self: Any, x: Tensor) -> Any:
    x = F.max_pool2d(F.relu(self.conv1(x)), 2)
    return self.head(torch.flatten(F.max_pool2d(F.relu(self.conv2(x)), 3, 2, 1), 1))


OTHERS = [branches, depends_on_data, counts, picks, scales, scales_by_a_global, calls_another, skips, drops]
OTHERS += [another_activation, no_activation, flattens_everything, other_order, one_unused, recurrent, with_an_option]
OTHERS += [returns_before_the_end, in_a_loop, larger_windows]


@pytest.mark.parametrize("forward", OTHERS, ids=lambda value: value.__name__)
def test_everything_else_is_left_to_autograd(forward: Callable[..., Any]) -> None:
    module = with_forward(ConvNet if forward is larger_windows else Net, forward)
    assert not supports(module)
    assert FlatModel(module).arithmetic == "torch"


def test_modules_that_do_more_than_forward_are_left_to_autograd() -> None:
    hooked, patched, frozen, own_call = (with_forward(Net, flat) for _ in range(4))
    assert supports(hooked)
    hooked.register_forward_hook(lambda *_: None)
    vars(patched)["forward"] = nn.Identity()
    next(frozen.parameters()).requires_grad_(False)
    setattr(type(own_call), "__call__", lambda self, x: x)  # noqa: B010
    for module in (hooked, patched, frozen, own_call, nn.LSTM(4, 3), nn.Sequential(nn.GRU(4, 3))):
        assert not supports(module)


class StatefulAttribute(Net):
    """`first` is another layer every time."""

    calls = 0

    def __getattr__(self, name: str) -> Any:
        if name == "first":
            self.calls += 1
        return super().__getattr__(name)

    forward = flat


class Property(Net):
    """`second` is what the state says."""

    forward = flat


def chosen(self: nn.Module) -> nn.Module | None:
    return self._modules["second" if self.training else "first"]


setattr(Property, "second", property(chosen))  # noqa: B010


@pytest.mark.parametrize("kind", [StatefulAttribute, Property])
def test_attributes_that_run_code_are_left_to_autograd(kind: type[nn.Module]) -> None:
    assert not supports(kind())
