"""A chain of linear layers with ReLU, perhaps after blocks of convolution: steps of plain SGD in one compiled loop.

In a small network the products are too thin for a library made for large ones, and calling it costs as much as they
do. `chain.c` has the whole loop. Its steps are autograd's up to rounding, and it is used from the first batch on or
never: whether it applies depends on the module and the machine alone.
"""

from math import prod
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from fedcluster import compiled
from fedcluster.dataset import Dataset

SCORED = 60  # rows at a time, so that what they need stays in a core's cache


class Chain:
    """Layers, perhaps after convolutions, whose weights and biases, first to last, are the vector w."""

    def __init__(self, library: Any, w: Tensor, layers: list[nn.Conv2d | nn.Linear]) -> None:
        self.library, self.w = library, w
        self.convolutions = [layer for layer in layers if isinstance(layer, nn.Conv2d)]
        linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
        self.sizes = [linear[0].in_features, *(layer.out_features for layer in linear)]
        self.room = w

    def form(self, x: Tensor) -> compiled.Form:
        """The network for such samples."""
        shape, maps = tuple(x.shape[1:]), [layer.out_channels for layer in self.convolutions]
        made = shape
        for layer in self.convolutions:
            fits = len(made) == 3 and made[0] == layer.in_channels
            made = (layer.out_channels, made[1] // 2, made[2] // 2) if fits else ()
        if prod(made) != self.sizes[0]:  # what is read would not be a sample
            raise ValueError(f"the network does not take samples {list(shape)}")
        return compiled.Form(self.sizes, maps, shape)

    def descend(self, dataset: Dataset, rows: Tensor, lr: float, drift: Tensor | None = None) -> None:
        """A step on the mean cross-entropy of each batch, a row of places in the training set; `drift` is added
        after each."""
        form = self.form(dataset.x_train)
        self.make_room(form, rows.shape[1], drifting=drift is not None)
        # asked for anew: sharing a tensor with another process moves it
        samples = compiled.Samples(dataset.x_train, dataset.y_train, dataset.scale, dataset.shift)
        compiled.descend(self.library, self.w, drift, form, samples, rows, lr, self.room)

    def differentiate(self, x: Tensor, y: Tensor, g: Tensor) -> None:
        """The gradient at w of the mean cross-entropy of these samples, into g."""
        form, rows = self.form(x), torch.arange(len(y))
        self.make_room(form, len(y), drifting=False)
        samples = compiled.Samples(x.contiguous(), y, None, None)
        compiled.gradient(self.library, self.w, g, form, samples, rows, self.room)

    def make_room(self, form: compiled.Form, batch: int, drifting: bool) -> None:
        """Scratch memory, kept for the next batch."""
        needed = compiled.scratch(self.library, form, batch, learning=True, drifting=drifting)
        if self.room is self.w or self.room.numel() < needed:
            self.room = torch.empty(needed)

    def score(self, x: Tensor, y: Tensor, dataset: Dataset, rows: Tensor) -> list[tuple[float, int]]:
        """The summed cross-entropy and the number of right answers at w, of SCORED of the rows at a time."""
        samples = compiled.Samples(x, y, dataset.scale, dataset.shift)
        return list(zip(*compiled.score(self.library, self.w, self.form(x), samples, rows, SCORED), strict=True))


def chain(module: nn.Module, w: Tensor) -> Chain | None:
    """The chain that a module is whose parameters are views of w, if it is one and can be compiled here."""
    layers = layers_of(module)
    if not layers or w.device.type != "cpu":
        return None
    parts = [part for layer in layers for part in (layer.weight, layer.bias)]
    place = w.data_ptr()
    for part in parts:
        if part is None or part.data_ptr() != place:
            return None
        place += part.numel() * part.element_size()
    library = compiled.library()
    if library is None or place != w.data_ptr() + w.numel() * w.element_size():
        return None
    return Chain(library, w, layers)


def layers_of(module: nn.Module) -> list[nn.Conv2d | nn.Linear] | None:
    """The layers of an nn.Sequential of Linear (with bias) and ReLU in turn, perhaps after a Flatten, before which
    there may be blocks of Conv2d (3x3, zeros around, with bias), ReLU and MaxPool2d(2)."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return None
    parts = list(module)
    convolutions: list[nn.Conv2d | nn.Linear] = []
    while len(parts) > 3 and convolves(parts[0]) and type(parts[1]) is nn.ReLU and pools(parts[2]):
        convolutions.append(parts[0])
        parts = parts[3:]
    flat = parts and type(parts[0]) is nn.Flatten and (parts[0].start_dim, parts[0].end_dim) == (1, -1)
    if flat:
        parts = parts[1:]
    layers = [part for part in parts[::2] if type(part) is nn.Linear and part.bias is not None]
    if len(parts) != 2 * len(layers) - 1 or not all(type(part) is nn.ReLU for part in parts[1::2]):
        return None
    if max(len(layers), len(convolutions)) > compiled.MOST or (convolutions and not flat):
        return None
    parameters = list(module.parameters())
    if len(parameters) != 2 * len(convolutions + layers) or not all(p.requires_grad for p in parameters):
        return None  # fewer: a weight is used twice
    if any(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks for part in [module, *module]):
        return None
    return convolutions + layers


def convolves(part: nn.Module) -> TypeGuard[nn.Conv2d]:
    if type(part) is not nn.Conv2d or part.bias is None:
        return False
    how = part.kernel_size, part.stride, part.padding, part.dilation, part.groups, part.padding_mode
    return how == ((3, 3), (1, 1), (1, 1), (1, 1), 1, "zeros")


def pools(part: nn.Module) -> bool:
    if type(part) is not nn.MaxPool2d or part.return_indices or part.ceil_mode:
        return False
    twos, how = (2, (2, 2)), (part.padding, part.dilation)
    return part.kernel_size in twos and part.stride in twos and how in ((0, 1), ((0, 0), (1, 1)))
