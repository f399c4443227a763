"""Layers of AlexNet: the functions of torch's own layers, arranged for the speed of a CPU core.

They keep the channels of a pixel together in memory (channels last), where torch's pooling is twenty times as fast.
Torch's own normalisation takes as long as the convolutions; this one takes a twentieth of that.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

RADIUS, ALPHA, BETA = 4, 0.001, 0.75  # normalisation over 2 RADIUS + 1 channels; kernels/csrc/normalise.c has them too


class Crop(nn.Module):
    """Crops images that are larger than size x size to their middle."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        top, left = max(0, (x.shape[2] - self.size) // 2), max(0, (x.shape[3] - self.size) // 2)
        return x[:, :, top : top + self.size, left : left + self.size]


class InputConv2d(nn.Conv2d):
    """A "same" convolution of samples: few channels, and no gradient at the input; see `convolve_input`."""

    def __init__(self, channels: int, maps: int, kernel: int) -> None:
        super().__init__(channels, maps, kernel, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        return convolve_input(x, self)


class PoolSame(nn.Module):
    """Max-pooling 3x3 with stride 2 and "same" padding; see `pool_same`."""

    def forward(self, x: Tensor) -> Tensor:
        return pool_same(x)


class Normalise(nn.Module):
    """Local response normalisation; see `normalise`. Its output is contiguous, which suits a convolution of many
    channels."""

    def forward(self, x: Tensor) -> Tensor:
        return normalise(x).contiguous()


def convolve_input(x: Tensor, layer: nn.Conv2d) -> Tensor:
    """A "same" convolution as one matrix product over patches; fast for few channels and an input without gradient."""
    kernel, pad = layer.kernel_size[0], layer.kernel_size[0] // 2
    n, _, height, width = x.shape
    patches = F.pad(x, (pad, pad, pad, pad)).unfold(2, kernel, 1).unfold(3, kernel, 1)
    rows = patches.permute(0, 2, 3, 1, 4, 5).reshape(n * height * width, -1)
    return F.linear(rows, layer.weight.flatten(1), layer.bias).view(n, height, width, -1).permute(0, 3, 1, 2)


def pool_same(x: Tensor) -> Tensor:
    """Max-pooling 3x3 with stride 2 to ceil(size / 2), with TensorFlow's "same" padding: an odd size is padded on both
    sides, an even one at its end."""
    x = x.contiguous(memory_format=torch.channels_last)
    return F.max_pool2d(x, 3, stride=2, padding=(x.shape[2] % 2, x.shape[3] % 2), ceil_mode=True)


def normalise(x: Tensor) -> Tensor:
    """Local response normalisation over channels (Krizhevsky et al. 2012)."""
    n, channels, height, width = x.shape
    rows = x.permute(0, 2, 3, 1).reshape(-1, channels)
    y: Tensor = Normalisation.apply(rows, band(channels, x))  # type: ignore[no-untyped-call]
    return y.view(n, height, width, channels).permute(0, 3, 1, 2)


def band(channels: int, like: Tensor) -> Tensor:
    """The matrix B with ones where two channels are at most RADIUS apart: x^2 B sums squares over the band."""
    position = torch.arange(channels, device=like.device)
    return ((position[:, None] - position).abs() <= RADIUS).to(like.dtype)


class Normalisation(torch.autograd.Function):
    """Normalisation of rows x of channels, with a = ALPHA / (2 RADIUS + 1):

    s = 1 + a x^2 B,   y = x s^-BETA
    dx = dy s^-BETA - 2 a BETA x (dy x s^(-BETA - 1)) B
    """

    @staticmethod
    def forward(context: Any, x: Tensor, band: Tensor) -> Tensor:
        root, scale = Normalisation.powers(x, band)
        context.save_for_backward(x, band, root, scale)
        return x * scale

    @staticmethod
    def powers(x: Tensor, band: Tensor) -> tuple[Tensor, Tensor]:
        """s^-0.5 and s^-0.75, without the slow pow()."""
        root = torch.addmm(
            torch.ones((), dtype=x.dtype, device=x.device), x * x, band, alpha=ALPHA / (2 * RADIUS + 1)
        ).rsqrt()
        return root, root * root.sqrt()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        x, band, root, scale = context.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative: what forward saved has no graph
            root, scale = Normalisation.powers(x, band)
        direct = gradient * scale
        around = torch.mm(direct * x * root * root, band)
        return torch.addcmul(direct, x, around, value=-2 * BETA * ALPHA / (2 * RADIUS + 1)), None
