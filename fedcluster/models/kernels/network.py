"""A chain of linear layers with ReLU, perhaps after blocks of convolution: steps of plain SGD in one compiled loop.

In a small network the products are too thin for a library made for large ones, and calling it costs as much as they
do. `chain.c` has the whole loop. Its steps are autograd's up to rounding, and it is used from the first batch on or
never: whether it applies depends on the module and the machine alone.
"""

from math import prod
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from fedcluster.data.dataset import Dataset
from fedcluster.models.kernels import library as compiled
from fedcluster.models.kernels.library import Block
from fedcluster.models.layers import Crop, InputConv2d, Normalise, PoolSame

PLAIN = ((0, 1), ((0, 0), (1, 1)))  # padding and dilation
WIDEST = 2**22  # weights of a layer; beyond, torch is faster (benchmarks/wide.py), but for what convolutions gain
EVALUATION_BATCH = 60  # rows; what they need stays in the cache of a core


class Architecture(NamedTuple):
    """What a module is made of, in order: convolutions, the blocks that they belong to, and linear layers."""

    crop: int
    convolutions: list[nn.Conv2d]
    blocks: list[Block]
    layers: list[nn.Linear]

    @property
    def parameters(self) -> list[Tensor | None]:
        layers: list[nn.Conv2d | nn.Linear] = [*self.convolutions, *self.layers]
        return [part for layer in layers for part in (layer.weight, layer.bias)]


class Network:
    """A model whose weights and biases lie in memory one after the other, as the vector w, and its compiled steps."""

    def __init__(self, library: Any, w: Tensor, architecture: Architecture) -> None:
        self.library, self.w, self.architecture = library, w, architecture
        self.sizes = [architecture.layers[0].in_features, *(layer.out_features for layer in architecture.layers)]
        self.room = w
        self.checked: dict[int, Tensor] = {}  # labels by id; held, so that an id is not used again

    def check_labels(self, y: Tensor) -> None:
        """Raise ValueError if a label is not an index of a score, so that nothing outside is read or written. A tensor
        is checked once."""
        if id(y) in self.checked:
            return
        if len(y) and not (int(y.min()) >= 0 and int(y.max()) < self.sizes[-1]):
            raise ValueError(f"labels from {y.min()} to {y.max()}, but the network scores {self.sizes[-1]} classes")
        self.checked[id(y)] = y

    def form(self, x: Tensor) -> compiled.Form:
        """The network for such samples."""
        crop, convolutions, blocks, _ = self.architecture
        shape = made = tuple(x.shape[1:])
        if crop and len(made) == 3:
            made = (made[0], min(made[1], crop), min(made[2], crop))
        for layer, block in zip(convolutions, blocks, strict=True):
            fits = len(made) == 3 and made[0] == layer.in_channels
            made = (block.maps, block.makes(made[1]), block.makes(made[2])) if fits else ()
        if prod(made) != self.sizes[0]:  # what is read would not be a sample
            raise ValueError(f"the network does not take samples {list(shape)}")
        return compiled.Form(self.sizes, blocks, shape, crop)

    def sgd(self, dataset: Dataset, rows: Tensor, lr: float, step_offset: Tensor | None = None) -> None:
        """SGD on the mean cross-entropy: w <- w - lr grad f(w; batch) + step_offset, for every batch in `rows`
        (steps x batch), which are indices into the training set."""
        self.check_labels(dataset.y_train)
        form = self.form(dataset.x_train)
        self.make_room(form, rows.shape[1], drifting=step_offset is not None)
        # asked for anew: sharing a tensor with another process moves it
        samples = compiled.Samples(dataset.x_train, dataset.y_train, dataset.scale, dataset.shift)
        compiled.descend(self.library, self.w, step_offset, form, samples, rows, lr, self.room)

    def compute_gradient(self, x: Tensor, y: Tensor, g: Tensor) -> None:
        """Write the gradient at w of the mean cross-entropy of a batch to g. Its labels have been checked."""
        form, rows = self.form(x), torch.arange(len(y))
        self.make_room(form, len(y), drifting=False)
        samples = compiled.Samples(x.contiguous(), y, None, None)
        compiled.gradient(self.library, self.w, g, form, samples, rows, self.room)

    def make_room(self, form: compiled.Form, batch: int, drifting: bool) -> None:
        """Scratch memory, kept for the next batch."""
        needed = compiled.scratch(self.library, form, batch, learning=True, drifting=drifting)
        if self.room is self.w or self.room.numel() < needed:
            self.room = torch.empty(needed)

    def evaluate(self, x: Tensor, y: Tensor, dataset: Dataset, rows: Tensor) -> list[tuple[float, int]]:
        """The summed cross-entropy and the number of correct predictions at w, for every EVALUATION_BATCH rows."""
        self.check_labels(y)
        samples = compiled.Samples(x, y, dataset.scale, dataset.shift)
        return list(
            zip(*compiled.score(self.library, self.w, self.form(x), samples, rows, EVALUATION_BATCH), strict=True)
        )


def network_for(module: nn.Module) -> Network | None:
    """The compiled network that works on the parameters of a module in place, or None.

    None if the module has another architecture, its parameters are not one block of memory on the CPU, or there is no
    compiled library on this machine.
    """
    architecture = architecture_of(module)
    library = None if architecture is None else compiled.library()
    if architecture is None or library is None:
        return None
    address = next(module.parameters()).data_ptr()
    for part in architecture.parameters:
        if part is None or part.device.type != "cpu" or part.dtype != torch.float32 or part.data_ptr() != address:
            return None
        address += part.numel() * part.element_size()
    first = next(module.parameters()).detach()
    w = first.as_strided((sum(part.numel() for part in module.parameters()),), (1,))
    return Network(library, w, architecture)


def supports(module: nn.Module) -> bool:
    """Whether the compiled engine has all layers of a module."""
    return architecture_of(module) is not None


def architecture_of(module: nn.Module) -> Architecture | None:
    """What an nn.Sequential is made of: Linear (with bias) and ReLU in turn, perhaps after a Flatten, before which
    there may be a Crop and blocks of Conv2d (3x3 or 5x5, zeros around, with bias), ReLU, MaxPool2d(2) or PoolSame, and
    perhaps Normalise."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return None
    parts, crop = list(module), 0
    if parts and isinstance(parts[0], Crop) and type(parts[0]) is Crop and parts[0].size > 0:
        crop, parts = parts[0].size, parts[1:]
    convolutions: list[nn.Conv2d] = []
    blocks: list[Block] = []
    while len(parts) > 3 and convolves(parts[0], first=not blocks) and (window := pools(parts[1:3])):
        normalised = type(parts[3]) is Normalise
        convolutions.append(parts[0])
        blocks.append(Block(parts[0].out_channels, parts[0].kernel_size[0], window, normalised))
        parts = parts[3 + normalised :]
    flat = parts and type(parts[0]) is nn.Flatten and (parts[0].start_dim, parts[0].end_dim) == (1, -1)
    if flat:
        parts = parts[1:]
    layers = [part for part in parts[::2] if type(part) is nn.Linear and part.bias is not None]
    if len(parts) != 2 * len(layers) - 1 or not all(type(part) is nn.ReLU for part in parts[1::2]):
        return None
    if max(len(layers), len(blocks)) > compiled.MOST or (blocks and not flat) or (crop and not blocks):
        return None
    parameters = list(module.parameters())
    if next(module.buffers(), None) is not None:
        return None
    if len(parameters) != 2 * len(convolutions + layers) or not all(p.requires_grad for p in parameters):
        return None  # fewer: a weight is used twice
    if any(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks for part in [module, *module]):
        return None
    if not blocks and any(layer.weight.numel() > WIDEST for layer in layers):
        return None
    return Architecture(crop, convolutions, blocks, layers)


def convolves(part: nn.Module, first: bool) -> TypeGuard[nn.Conv2d]:
    if not (type(part) is nn.Conv2d or (first and type(part) is InputConv2d)) or part.bias is None:
        return False
    size = part.kernel_size[0]
    how = part.kernel_size, part.stride, part.padding, part.dilation, part.groups, part.padding_mode
    return size in (3, 5) and how == ((size, size), (1, 1), (size // 2, size // 2), (1, 1), 1, "zeros")


def pools(parts: list[nn.Module]) -> int:
    """The window of ReLU and max-pooling, which may change places; 0 if they are not that."""
    others = [part for part in parts if type(part) is not nn.ReLU]
    if len(others) != 1:
        return 0
    part, twos = others[0], (2, (2, 2))
    if type(part) is PoolSame:
        return 3
    if type(part) is not nn.MaxPool2d or part.return_indices or part.ceil_mode:
        return 0
    how = part.kernel_size in twos and part.stride in twos and (part.padding, part.dilation) in PLAIN
    return 2 if how else 0
