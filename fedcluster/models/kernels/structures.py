"""The structures of csrc/engine.h, as ctypes has them."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MAX_LAYERS = 16  # linear layers, and blocks, as in engine.h


class Block(NamedTuple):
    """A convolution with `padding` zeros around, ReLU and max-pooling with stride 2: in windows of 2x2, or of 3x3 with
    padding "same"; perhaps followed by local response normalisation."""

    out_channels: int
    kernel: int = 3
    padding: int = 1
    window: int = 2
    normalised: bool = False

    def pooled(self, size: int) -> int:
        """The height or width of the output; below 1 if the input is too small."""
        result = size + 2 * self.padding - self.kernel + 1
        return result // 2 if self.window == 2 else -(-result // 2)


class NetworkSpec(ctypes.Structure):
    """Linear layers with these numbers of features, perhaps after blocks that take images of this shape, or their
    middle of crop x crop."""

    _fields_ = (
        ("linear_layers", ctypes.c_int),
        ("sizes", ctypes.c_int * (MAX_LAYERS + 1)),
        ("conv_blocks", ctypes.c_int),
        ("out_channels", ctypes.c_int * MAX_LAYERS),
        ("kernel", ctypes.c_int * MAX_LAYERS),
        ("padding", ctypes.c_int * MAX_LAYERS),
        ("window", ctypes.c_int * MAX_LAYERS),
        ("normalised", ctypes.c_int * MAX_LAYERS),
        ("channels", ctypes.c_int),
        ("height", ctypes.c_int),
        ("width", ctypes.c_int),
        ("crop", ctypes.c_int),
    )

    def __init__(self, sizes: Sequence[int], blocks: Sequence[Block], shape: Sequence[int], crop: int = 0) -> None:
        columns = zip(*blocks, strict=True) if blocks else [()] * len(Block._fields)
        super().__init__(len(sizes) - 1, tuple(sizes), len(blocks), *columns, *((*shape, crop) if blocks else ()))


class Samples(ctypes.Structure):
    """Samples and labels in memory, `dataset` in engine.h. Keeps the tensors that it points to."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("shift", ctypes.c_void_p),
        ("samples", ctypes.c_int64),
        ("is_bytes", ctypes.c_int),
        ("channels", ctypes.c_int),
    )

    def __init__(self, x: Tensor, y: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> None:
        is_bytes = x.dtype == torch.uint8
        if not (is_bytes and scale is not None) and x.dtype != torch.float32:
            raise ValueError(f"samples are float32, or bytes with a scale, not {x.dtype}")
        if y.dtype != torch.int64 or y.shape != x.shape[:1]:
            raise ValueError(f"{len(x)} samples need as many labels of int64, not {list(y.shape)} of {y.dtype}")
        self.tensors = [tensor if tensor is None else tensor.contiguous() for tensor in (x, y, scale, shift)]
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in self.tensors]
        super().__init__(*pointers, len(x), is_bytes, 1 if scale is None else scale.numel())


def layout() -> list[int]:
    """Size and field offsets of both structures; `structure_layout` in engine.c gives those that C has."""
    return [
        number
        for structure in (NetworkSpec, Samples)
        for number in (
            ctypes.sizeof(structure),
            *(getattr(structure, field[0]).offset for field in structure._fields_),
        )
    ]
