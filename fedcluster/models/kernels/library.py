"""The compiled part: `chain.c` and what it includes, which `build` builds and keeps.

Where there is no compiler, or the result does not find what torch finds, there is none, and torch does the work.
"""

import ctypes
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedcluster.data.sources import cache_folder
from fedcluster.models.kernels.build import Unavailable, library_file
from fedcluster.models.layers import Crop, Normalise, PoolSame

SOURCE = Path(__file__).parent / "csrc" / "chain.c"
MOST = 16  # layers, and blocks before them, as in chain.c


why_torch = ""  # does the work, where there is no library


@cache
def library() -> Any:
    """The library, or None; then `why_torch` says why."""
    global why_torch
    why_torch = ""
    try:
        loaded = ctypes.CDLL(str(library_file(SOURCE, cache_folder())))
        loaded.scratch.restype = ctypes.c_int64
        loaded.squares.restype = ctypes.c_double
    except (Unavailable, OSError, AttributeError) as error:
        why_torch = str(error)
        return None
    if not finds_what_torch_finds(loaded):
        why_torch = "the compiled code does not find what torch finds"
        return None
    return loaded


def unavailable_reason() -> str:
    """Why there is no compiled library on this machine; empty if there is one."""
    return "" if library() is not None else why_torch


class Samples(ctypes.Structure):
    """A data set's training samples, as chain.c wants them. Keeps hold of what it points to."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("shift", ctypes.c_void_p),
        ("bytes", ctypes.c_int),
        ("channels", ctypes.c_int),
    )

    def __init__(self, x: Tensor, y: Tensor, scale: Tensor | None, shift: Tensor | None) -> None:
        self.held = (x, y, scale, shift)
        places = [None if one is None else one.data_ptr() for one in self.held]
        super().__init__(*places, x.dtype == torch.uint8, 1 if scale is None else scale.numel())


class Block(NamedTuple):
    """A convolution, ReLU and max-pooling with stride 2, of windows 2x2 or, "same", 3x3; perhaps normalised."""

    maps: int
    kernel: int = 3
    window: int = 2
    normalised: bool = False

    def makes(self, size: int) -> int:
        """Of a height or width."""
        return size // 2 if self.window == 2 else -(-size // 2)


class Form(ctypes.Structure):
    """Layers of these sizes, perhaps after blocks that take pictures of this shape, or their middle."""

    _fields_ = (
        ("layers", ctypes.c_int),
        ("sizes", ctypes.c_int * (MOST + 1)),
        ("blocks", ctypes.c_int),
        ("maps", ctypes.c_int * MOST),
        ("kernels", ctypes.c_int * MOST),
        ("windows", ctypes.c_int * MOST),
        ("normalised", ctypes.c_int * MOST),
        ("channels", ctypes.c_int),
        ("height", ctypes.c_int),
        ("width", ctypes.c_int),
        ("crop", ctypes.c_int),
    )

    def __init__(self, sizes: list[int], blocks: list[Block], shape: tuple[int, ...], crop: int = 0) -> None:
        columns = zip(*blocks, strict=True) if blocks else [()] * len(Block._fields)
        super().__init__(len(sizes) - 1, tuple(sizes), len(blocks), *columns, *((*shape, crop) if blocks else ()))


def descend(
    loaded: Any,
    w: Tensor,
    drift: Tensor | None,
    form: Form,
    samples: Samples,
    rows: Tensor,
    lr: float,
    room: Tensor,
) -> None:
    """A step for every row of `rows`, a batch by its places among the samples; after each, `drift` is added to w."""
    places = [None if one is None else ctypes.c_void_p(one.data_ptr()) for one in (w, drift, rows, room)]
    rate, network, data = ctypes.c_float(lr), ctypes.byref(form), ctypes.byref(samples)
    loaded.descend(places[0], places[1], network, data, places[2], *rows.shape, rate, places[3])


def gradient(loaded: Any, w: Tensor, g: Tensor, form: Form, samples: Samples, rows: Tensor, room: Tensor) -> None:
    """That of the mean cross-entropy of the rows at w, into g."""
    places = [ctypes.c_void_p(one.data_ptr()) for one in (w, g, rows, room)]
    network, data = ctypes.byref(form), ctypes.byref(samples)
    loaded.gradient(places[0], places[1], network, data, places[2], len(rows), places[3])


def score(
    loaded: Any, w: Tensor, form: Form, samples: Samples, rows: Tensor, batch: int
) -> tuple[list[float], list[int]]:
    """The summed cross-entropy of every batch of the rows, and how many of it are right."""
    losses, right = torch.empty(-(-len(rows) // batch), dtype=torch.float64), torch.empty(-(-len(rows) // batch)).long()
    room = torch.empty(scratch(loaded, form, batch, learning=False, drifting=False))
    w_, rows_, losses_, right_, room_ = (ctypes.c_void_p(one.data_ptr()) for one in (w, rows, losses, right, room))
    network, data, count = ctypes.byref(form), ctypes.byref(samples), ctypes.c_int64(len(rows))
    loaded.score(w_, network, data, rows_, count, batch, losses_, right_, room_)
    return losses.tolist(), right.tolist()


def applies(vector: Tensor) -> bool:
    """Whether a vector can be handed to the passes below."""
    plain = vector.device.type == "cpu" and vector.dtype == torch.float32 and vector.is_contiguous()
    return plain and library() is not None


def all_finite(vector: Tensor) -> bool:
    return bool(library().all_finite(ctypes.c_void_p(vector.data_ptr()), ctypes.c_int64(vector.numel())))


def squares(vector: Tensor, origin: Tensor | None) -> float:
    """The sum of (v - origin)^2, each square in float32."""
    places = ctypes.c_void_p(vector.data_ptr()), ctypes.c_void_p(None if origin is None else origin.data_ptr())
    return float(library().squares(*places, ctypes.c_int64(vector.numel())))


def accumulate(total: Tensor, vector: Tensor, weight: float, grid: float) -> None:
    """total += weight * vector, each term rounded as (grid + term) - grid."""
    places = ctypes.c_void_p(total.data_ptr()), ctypes.c_void_p(vector.data_ptr())
    library().accumulate(*places, ctypes.c_int64(len(vector)), ctypes.c_double(weight), ctypes.c_double(grid))


def scratch(loaded: Any, form: Form, batch: int, learning: bool, drifting: bool) -> int:
    """Floats of scratch memory for batches of this size."""
    return int(loaded.scratch(ctypes.byref(form), batch, learning, drifting))


def finds_what_torch_finds(loaded: Any) -> bool:
    """Two steps on small networks, and a drift, against autograd."""
    pooled, overlapping = [Block(9), Block(13)], [Block(9, 5, 3, True), Block(13, 5, 3, True)]
    return (
        agrees(loaded, [21, 19, 9, 5], [], (21,))
        and agrees(loaded, [26, 9, 5], pooled, (3, 9, 7))
        and agrees(loaded, [52, 9, 5], overlapping, (3, 9, 7), crop=7)
    )


def agrees(loaded: Any, sizes: list[int], blocks: list[Block], shape: tuple[int, ...], crop: int = 0) -> bool:
    batch, lr = 7, 0.1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = network(sizes, blocks, shape[0], crop)
        x, y = torch.randn(2 * batch, *shape), torch.randint(sizes[-1], (2 * batch,))
        w = parameters_to_vector(module.parameters()).detach()
        drift = torch.randn(len(w)) * 0.1
    if crop:
        x *= 20  # for normalisation to matter
    form, rows = Form(sizes, blocks, shape, crop), torch.arange(2 * batch).view(2, batch)
    room = torch.empty(scratch(loaded, form, batch, learning=True, drifting=True))
    expected = w.clone()
    descend(loaded, w, drift, form, Samples(x, y, None, None), rows, lr, room)
    for inputs, labels in zip(torch.split(x, batch), torch.split(y, batch), strict=True):
        with torch.enable_grad():
            loss = F.cross_entropy(module(inputs), labels)
            gradient = torch.autograd.grad(loss, list(module.parameters()))
        expected += drift - lr * torch.cat([part.reshape(-1) for part in gradient])
        vector_to_parameters(expected, module.parameters())
    return bool(torch.allclose(w, expected, rtol=1e-4, atol=1e-5))


def network(sizes: list[int], blocks: list[Block], channels: int, crop: int) -> nn.Sequential:
    """The same as a module."""
    parts: list[nn.Module] = [Crop(crop)] if crop else []
    for block in blocks:
        parts += [
            nn.Conv2d(channels, block.maps, block.kernel, padding=block.kernel // 2),
            nn.MaxPool2d(2) if block.window == 2 else PoolSame(),
            nn.ReLU(),
            Normalise() if block.normalised else nn.Identity(),
        ]
        channels = block.maps
    parts.append(nn.Flatten())
    for i, o in pairwise(sizes):
        parts += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*parts[:-1])
