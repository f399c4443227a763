"""The step by hand on a chain of linear layers is autograd's, as exactly as float32 allows."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedcluster import models
from fedcluster.dense import chain


def three_steps(module: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]], lr: float) -> torch.Tensor:
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(module(x.to(next(module.parameters()).dtype)), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return torch.cat([p.detach().double().flatten() for p in module.parameters()])


CHAINS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: models.MLP((1, 8, 8), 10),
    "logistic": lambda: models.Logistic((1, 8, 8), 10),
    "no flatten, no bias": lambda: nn.Sequential(nn.Linear(64, 9, bias=False), nn.ReLU(), nn.Linear(9, 10)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_as_close_to_the_truth_as_autograd(name: str) -> None:
    torch.manual_seed(0)
    module = CHAINS[name]()
    shape = (64,) if "no" in name else (1, 8, 8)
    batches = [(torch.randn(rows, *shape), torch.randint(10, (rows,))) for rows in (30, 30, 7)]
    truth = three_steps(deepcopy(module).double(), batches, lr=0.1)
    by_autograd = three_steps(deepcopy(module), batches, lr=0.1)
    by_hand = chain(module)
    assert by_hand is not None
    for x, y in batches:
        by_hand.descend(x, y, lr=0.1)
    found = torch.cat([p.detach().double().flatten() for p in module.parameters()])
    assert (found - truth).norm() <= 1.5 * (by_autograd - truth).norm()
    assert (found - truth).abs().max() < 1e-6


@pytest.mark.parametrize("shape", [(784, 200), (200, 200), (200, 10), (9, 10), (101, 100)])
def test_small_steps_are_not_lost(shape: tuple[int, int]) -> None:
    """Thirty terms, each too small to change a weight, together change it."""
    features, outputs = shape
    module = nn.Sequential(nn.Linear(features, outputs))
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(1.0)
    by_hand = chain(module)
    assert by_hand is not None
    y = torch.zeros(30, dtype=torch.int64)
    by_hand.descend(torch.full((30, features), 1e-2), y, lr=1e-4)  # towards class 0: 30 terms of about 3e-8
    expected = 1e-6 * (1 - 1 / outputs)
    first = next(module.parameters()).detach()[0].double()
    assert first.sub(1).mean().item() == pytest.approx(expected, abs=6e-8)


class Own(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[0](x) * 2  # type: ignore[no-any-return]


def tied() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer)


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 3))
    module[0].register_forward_hook(lambda *_: None)
    return module


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 3))
    module[0].bias.requires_grad_(False)
    return module


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "own forward": lambda: Own(nn.Linear(4, 3)),
    "weights used twice": tied,
    "a hook": hooked,
    "a frozen bias": frozen,
    "another activation": lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)),
    "dropout": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 3)),
    "ends with ReLU": lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU()),
    "two layers on end": lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)),
    "convolutions": lambda: models.CNN((1, 8, 8), 10),
    "nothing": lambda: nn.Sequential(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_a_chain_is_left_to_autograd(name: str) -> None:
    assert chain(OTHERS[name]()) is None
