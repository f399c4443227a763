"""A comparison of the library with torch, made whenever a process loads it: a compiler may have faults."""

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedcluster.models.kernels.build import BuildFailed
from fedcluster.models.kernels.structures import Block, NetworkSpec, Samples
from fedcluster.models.layers import Crop, Normalise, PoolSame


def compare_with_torch(library: Any) -> None:
    """Raise BuildFailed if two steps on small networks of every kind are not those of autograd."""
    pooled, overlapping = [Block(9), Block(13)], [Block(9, 5, 2, 3, True), Block(13, 5, 2, 3, True)]
    unpadded = [Block(6, 5, 0), Block(9, 3, 0, 3)]
    equal = (
        agrees(library, [21, 19, 9, 5], [], (21,))
        and agrees(library, [26, 9, 5], pooled, (3, 9, 7))
        and agrees(library, [52, 9, 5], overlapping, (3, 9, 7), crop=7)
        and agrees(library, [18, 9, 5], unpadded, (1, 14, 13))
    )
    if not equal:
        raise BuildFailed("the compiled code does not compute what torch computes")


def agrees(
    library: Any, sizes: list[int], blocks: list[Block], shape: tuple[int, ...], crop: int = 0, batch: int = 7
) -> bool:
    """Whether two steps with a step offset are autograd's, up to rounding."""
    lr = 0.1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = as_module(sizes, blocks, shape[0], crop)
        x, y = torch.randn(2 * batch, *shape), torch.randint(sizes[-1], (2 * batch,))
        w = parameters_to_vector(module.parameters()).detach()
        step_offset = torch.randn(len(w)) * 0.1
    if crop:
        x *= 20  # so that normalisation matters
    spec, samples, rows = NetworkSpec(sizes, blocks, shape, crop), Samples(x, y), torch.arange(2 * batch)
    workspace = torch.empty(library.workspace_size(spec, batch, True, True))
    expected = w.clone()
    library.sgd(
        w.data_ptr(), step_offset.data_ptr(), spec, samples, rows.data_ptr(), 2, batch, lr, workspace.data_ptr()
    )
    for inputs, labels in zip(torch.split(x, batch), torch.split(y, batch), strict=True):
        with torch.enable_grad():
            loss = F.cross_entropy(module(inputs), labels)
            gradient = torch.autograd.grad(loss, list(module.parameters()))
        expected += step_offset - lr * torch.cat([part.reshape(-1) for part in gradient])
        vector_to_parameters(expected, module.parameters())
    return bool(torch.allclose(w, expected, rtol=1e-4, atol=1e-5))


def as_module(sizes: list[int], blocks: list[Block], channels: int, crop: int) -> nn.Sequential:
    """The same network as a torch module."""
    parts: list[nn.Module] = [Crop(crop)] if crop else []
    for block in blocks:
        parts += [
            nn.Conv2d(channels, block.out_channels, block.kernel, padding=block.padding),
            nn.MaxPool2d(2) if block.window == 2 else PoolSame(),
            nn.ReLU(),
            Normalise() if block.normalised else nn.Identity(),
        ]
        channels = block.out_channels
    parts.append(nn.Flatten())
    for i, o in pairwise(sizes):
        parts += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*parts[:-1])
