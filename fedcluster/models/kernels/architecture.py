"""Whether a module is of the form that the compiled engine has, and its layers if it is."""

from itertools import pairwise
from typing import NamedTuple, TypeGuard

from torch import Tensor, nn

from fedcluster.models.kernels.forward_code import layers_of
from fedcluster.models.kernels.structures import MAX_LAYERS, Block
from fedcluster.models.layers import Crop, InputConv2d, Normalise, PoolSame

UNPADDED = ((0, 1), ((0, 0), (1, 1)))  # padding and dilation
MAX_WEIGHTS = 2**22  # of a linear layer; beyond it, torch is faster (benchmarks/wide.py) unless there are convolutions


class Architecture(NamedTuple):
    """Convolutions, the blocks that they belong to, and linear layers, in the order of the forward pass."""

    crop: int
    convolutions: list[nn.Conv2d]
    blocks: list[Block]
    linear: list[nn.Linear]

    @property
    def parameters(self) -> list[Tensor | None]:
        layers: list[nn.Conv2d | nn.Linear] = [*self.convolutions, *self.linear]
        return [part for layer in layers for part in (layer.weight, layer.bias)]

    @property
    def sizes(self) -> list[int]:
        """Features before the first linear layer and after each."""
        return [self.linear[0].in_features, *(layer.out_features for layer in self.linear)]


def architecture_of(module: nn.Module) -> Architecture | None:
    """The architecture of a module; None if the engine cannot train it.

    It has linear layers with bias and ReLU between them. Before them there may be Flatten, and before that blocks: a
    convolution 3x3 or 5x5 with bias, with or without zeros around, ReLU and max-pooling with stride 2 in either order
    (MaxPool2d(2) or PoolSame), perhaps Normalise; and a Crop before the first block. All parameters are trained, each
    is used once, and they are registered in the order of the forward pass.
    """
    layers = layers_of(module)
    architecture = None if layers is None else parse(layers)
    if architecture is None or next(module.buffers(), None) is not None:
        return None
    registered = list(module.parameters())
    if list(map(id, registered)) != list(map(id, architecture.parameters)):
        return None
    if not all(parameter.requires_grad for parameter in registered):
        return None
    if not architecture.blocks and any(layer.weight.numel() > MAX_WEIGHTS for layer in architecture.linear):
        return None
    return architecture


def parse(layers: list[nn.Module]) -> Architecture | None:
    crop = 0
    if layers and type(layers[0]) is Crop and layers[0].size > 0:
        crop, layers = layers[0].size, layers[1:]
    convolutions: list[nn.Conv2d] = []
    blocks: list[Block] = []
    while len(layers) > 3 and is_convolution(layers[0], first=not blocks) and (window := pooling_window(layers[1:3])):
        normalised = type(layers[3]) is Normalise
        convolutions.append(layers[0])
        size = layers[0].kernel_size[0]
        blocks.append(Block(layers[0].out_channels, size, paddings(size)[layers[0].padding], window, normalised))
        layers = layers[3 + normalised :]
    flat = bool(layers) and type(layers[0]) is nn.Flatten and (layers[0].start_dim, layers[0].end_dim) == (1, -1)
    layers = layers[flat:]
    linear = [layer for layer in layers[::2] if type(layer) is nn.Linear and layer.bias is not None]
    if len(layers) != 2 * len(linear) - 1 or not all(type(layer) is nn.ReLU for layer in layers[1::2]):
        return None
    if any(before.out_features != after.in_features for before, after in pairwise(linear)):
        return None
    if max(len(linear), len(blocks)) > MAX_LAYERS or (blocks and not flat) or (crop and not blocks):
        return None
    return Architecture(crop, convolutions, blocks, linear)


def is_convolution(layer: nn.Module, first: bool) -> TypeGuard[nn.Conv2d]:
    if not (type(layer) is nn.Conv2d or (first and type(layer) is InputConv2d)) or layer.bias is None:
        return False
    size = layer.kernel_size[0]
    form = layer.kernel_size, layer.stride, layer.dilation, layer.groups, layer.padding_mode
    if size not in (3, 5) or form != ((size, size), (1, 1), (1, 1), 1, "zeros"):
        return False
    return layer.padding in paddings(size) and (type(layer) is nn.Conv2d or layer.padding == (size // 2, size // 2))


def paddings(size: int) -> dict[tuple[int, ...] | str, int]:
    """The paddings that a convolution may have, as torch writes them: at most that of "same"."""
    return {"valid": 0, "same": size // 2, **{(number, number): number for number in range(size // 2 + 1)}}


def pooling_window(layers: list[nn.Module]) -> int:
    """The window of ReLU and max-pooling with stride 2, in either order; 0 if the two layers are something else."""
    others = [layer for layer in layers if type(layer) is not nn.ReLU]
    if len(others) != 1:
        return 0
    layer, two = others[0], (2, (2, 2))
    if type(layer) is PoolSame:
        return 3
    if type(layer) is not nn.MaxPool2d or layer.return_indices or layer.ceil_mode:
        return 0
    unpadded = (layer.padding, layer.dilation) in UNPADDED
    return 2 if layer.kernel_size in two and layer.stride in two and unpadded else 0
