from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedcluster.data.dataset import DataSpec
from fedcluster.errors import BadExperiment
from fedcluster.models import zoo as models
from fedcluster.models.flat_model import FlatModel


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [
        ("alexnet", (3, 32, 32), 1_387_786),
        ("alexnet", (1, 28, 28), 1_384_586),
        ("mlp", (1, 28, 28), 199_210),
        ("logistic", (1, 28, 28), 7_850),
        ("cnn", (1, 28, 28), 160 + 4_640 + (32 * 49 + 1) * 128 + 129 * 10),
        ("cnn", (3, 32, 32), 448 + 4_640 + (32 * 64 + 1) * 128 + 129 * 10),
    ],
)
def test_sizes(name: str, shape: tuple[int, ...], parameters: int) -> None:
    module = models.build(name, DataSpec(shape, "class", 10), seed=0)
    assert FlatModel(module).parameters == parameters
    assert module(torch.zeros(2, *shape)).shape == (2, 10)


def test_the_default_model_is_the_papers_for_pictures_like_the_papers() -> None:
    defaults = {(1, 28, 28): "alexnet", (3, 32, 32): "alexnet", (1, 8, 8): "mlp", (3, 64, 16): "mlp", (30,): "mlp"}
    for shape, name in defaults.items():
        assert models.default_name(DataSpec(shape, "class", 10)) == name
    assert models.default_name(DataSpec((80,), "token", 90, vocabulary=90)) == "lstm"


def test_alexnet_against_its_definition() -> None:
    """Cropping, pooling and normalisation written out in NumPy's terms."""
    torch.manual_seed(0)
    net = models.AlexNet((3, 32, 32), 10)
    x = torch.randn(2, 3, 32, 32)

    def block(x: Tensor, conv: torch.nn.Conv2d) -> Tensor:
        y = F.relu(F.conv2d(x, conv.weight, conv.bias, padding=2)).detach().numpy()
        n, c, h, w = y.shape
        pooled = np.empty((n, c, (h + 1) // 2, (w + 1) // 2), np.float32)
        before = h % 2  # "same" padding of 3x3 with stride 2: both sides of an odd size, the far side of an even one
        for i in range(pooled.shape[2]):
            for j in range(pooled.shape[3]):
                rows = slice(max(0, 2 * i - before), 2 * i - before + 3)
                columns = slice(max(0, 2 * j - before), 2 * j - before + 3)
                pooled[:, :, i, j] = y[:, :, rows, columns].max(axis=(2, 3))
        total = np.zeros_like(pooled)
        for k in range(c):
            total[:, k] = (pooled[:, max(0, k - 4) : k + 5] ** 2).sum(axis=1)
        return torch.from_numpy(pooled / (1 + 0.001 / 9 * total) ** 0.75)

    part: dict[str, Any] = dict(net.named_children())
    y = block(block(x[:, :, 2:30, 2:30], part["conv1"]), part["conv2"])
    y = part["output"](F.relu(part["hidden2"](F.relu(part["hidden1"](y.flatten(1))))))
    torch.testing.assert_close(net(x), y, atol=1e-5, rtol=1e-4)


def test_pictures_are_asked_for_by_name() -> None:
    with pytest.raises(BadExperiment, match=r'model.name = "cnn" needs pictures .* a sample is \[20\]'):
        models.build("cnn", DataSpec((20,), "class", 3), seed=0)


def test_the_learner_moves_between_vectors_and_names() -> None:
    flat_model = FlatModel(models.build("cnn", DataSpec((1, 8, 8), "class", 4), seed=1))
    named = flat_model.named(flat_model.w)
    assert named.keys() == dict(flat_model.module.named_parameters()).keys()
    assert torch.equal(flat_model.vector(named), flat_model.w)
    flat_model.load(torch.zeros_like(flat_model.w))
    assert all((p == 0).all() for p in flat_model.module.parameters())


def test_the_start_depends_on_the_seed_alone() -> None:
    spec = DataSpec((5,), "class", 3)
    first = models.build("mlp", spec, seed=4).state_dict()
    torch.rand(7)
    again, other = (models.build("mlp", spec, seed).state_dict() for seed in (4, 5))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["output.weight"], other["output.weight"])
