"""A network that the compiled engine trains: SGD, gradients and evaluation, on the parameters of a module in place.

In a small network the products are too thin for a library made for large ones, and calling it costs as much as they do.
The engine has the whole loop in C; csrc/README.md describes it. Its results are autograd's up to rounding, and a module
is trained by it from the first batch on or never: that depends on the module and the machine alone.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from fedcluster.data.dataset import Dataset
from fedcluster.models.kernels import library
from fedcluster.models.kernels.architecture import Architecture, architecture_of
from fedcluster.models.kernels.structures import NetworkSpec, Samples

EVALUATION_BATCH = 60  # rows; what they need stays in the cache of a core


class Network:
    """A model whose weights and biases lie in memory one after the other, as the vector w."""

    def __init__(self, engine: Any, w: Tensor, architecture: Architecture) -> None:
        self.engine, self.w, self.architecture = engine, w, architecture
        self.sizes, self.workspace = architecture.sizes, torch.empty(0)
        self.specs: dict[torch.Size, NetworkSpec] = {}  # by the shape of a sample

    def sgd(self, dataset: Dataset, rows: Tensor, lr: float, step_offset: Tensor | None = None) -> None:
        """SGD on the mean cross-entropy: w <- w - lr grad f(w; batch) + step_offset, for every batch in `rows`
        (steps x batch), which are indices into the training set."""
        spec = self.spec(dataset.x_train)
        steps, batch = rows.shape
        workspace = self.workspace_for(spec, batch, with_offset=step_offset is not None)
        # addresses are asked for anew: sharing a tensor with another process moves it
        samples = Samples(dataset.x_train, dataset.y_train, dataset.scale, dataset.shift)
        rows = rows.contiguous()
        offset = None if step_offset is None else step_offset.data_ptr()
        self.check(
            self.engine.sgd(
                self.w.data_ptr(), offset, spec, samples, rows.data_ptr(), steps, batch, lr, workspace.data_ptr()
            ),
            dataset.y_train,
        )

    def compute_gradient(self, x: Tensor, y: Tensor, gradient: Tensor) -> None:
        """Write the gradient at w of the mean cross-entropy of a batch to `gradient`."""
        spec, rows = self.spec(x), torch.arange(len(y))
        workspace = self.workspace_for(spec, len(y), with_offset=False)
        samples, addresses = Samples(x, y), (self.w.data_ptr(), gradient.data_ptr())
        status = self.engine.compute_gradient(*addresses, spec, samples, rows.data_ptr(), len(y), workspace.data_ptr())
        self.check(status, y)

    def evaluate(self, x: Tensor, y: Tensor, dataset: Dataset, rows: Tensor) -> list[tuple[float, int]]:
        """The summed cross-entropy and the number of correct predictions at w, for every EVALUATION_BATCH rows.

        Several threads may evaluate at a time.
        """
        spec, samples, batch = self.spec(x), Samples(x, y, dataset.scale, dataset.shift), EVALUATION_BATCH
        workspace = torch.empty(self.engine.workspace_size(spec, batch, False, False))
        losses, correct = (torch.empty(-(-len(rows) // batch), dtype=kind) for kind in (torch.float64, torch.int64))
        results = losses.data_ptr(), correct.data_ptr(), workspace.data_ptr()
        status = self.engine.evaluate(self.w.data_ptr(), spec, samples, rows.data_ptr(), len(rows), batch, *results)
        self.check(status, y)
        return list(zip(losses.tolist(), correct.tolist(), strict=True))

    def spec(self, x: Tensor) -> NetworkSpec:
        """The network for samples of this shape; ValueError if it does not take them."""
        shape = x.shape[1:]
        if shape not in self.specs:
            self.specs[shape] = self.build_spec(shape)
        return self.specs[shape]

    def build_spec(self, shape: torch.Size) -> NetworkSpec:
        crop, _, blocks, _ = self.architecture
        if self.features(shape) != self.sizes[0]:
            raise ValueError(f"the network does not take samples {list(shape)}")
        return NetworkSpec(self.sizes, blocks, shape, crop)

    def features(self, shape: torch.Size) -> int | None:
        """How many features of a sample reach the first linear layer; None if a block does not take it."""
        crop, convolutions, blocks, _ = self.architecture
        if not blocks:
            return prod(shape)
        if len(shape) != 3:
            return None
        channels, *sides = shape
        if crop:
            sides = [min(side, crop) for side in sides]
        for layer, block in zip(convolutions, blocks, strict=True):
            sides = [block.pooled(side) for side in sides]
            if channels != layer.in_channels or min(sides) < 1:
                return None
            channels = block.out_channels
        return channels * prod(sides)

    def workspace_for(self, spec: NetworkSpec, batch: int, with_offset: bool) -> Tensor:
        """Memory for training on batches of this size, kept for the next call."""
        needed = self.engine.workspace_size(spec, batch, True, with_offset)
        if self.workspace.numel() < needed:
            self.workspace = torch.empty(needed)
        return self.workspace

    def check(self, status: int, y: Tensor) -> None:
        """Raise ValueError for what the engine refused; it checks every index and label before it uses them."""
        if status == 1:
            raise ValueError(f"a row is not one of the {len(y)} samples")
        if status == 2:
            classes = self.sizes[-1]
            raise ValueError(f"labels from {y.min()} to {y.max()}, but the network scores {classes} classes")


def network_for(module: nn.Module) -> Network | None:
    """The compiled network that works on the parameters of a module in place, or None.

    None if the module has another architecture, its parameters are not one block of memory on the CPU, or there is no
    compiled library on this machine.
    """
    architecture = architecture_of(module)
    engine = None if architecture is None else library.load()
    if architecture is None or engine is None:
        return None
    parameters = list(module.parameters())
    address = parameters[0].data_ptr()
    for parameter in parameters:
        plain = parameter.device.type == "cpu" and parameter.dtype == torch.float32 and parameter.is_contiguous()
        if not plain or parameter.data_ptr() != address:
            return None
        address += parameter.numel() * parameter.element_size()
    size = sum(parameter.numel() for parameter in parameters)
    return Network(engine, parameters[0].detach().as_strided((size,), (1,)), architecture)


def supports(module: nn.Module) -> bool:
    """Whether the compiled engine has all layers of a module."""
    return architecture_of(module) is not None
