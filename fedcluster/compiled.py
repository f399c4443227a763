"""The compiled part: `chain.c`, built once by the machine's own C compiler and kept in the cache.

Where there is no compiler, or the result does not find what torch finds, there is none, and torch does the work.
"""

import ctypes
import os
import platform
import shutil
import subprocess
from functools import cache
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedcluster.sources import cache_folder

SOURCE = Path(__file__).with_name("chain.c")
FLAGS = ["-O3", "-fno-math-errno", "-shared", "-fPIC"]
MOST_LAYERS = 16  # as in chain.c


@cache
def library() -> Any:
    """The library, or None."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        return None
    try:
        path = built(compiler)
        if not ours(path):
            return None
        loaded = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError):
        return None
    loaded.scratch.restype = ctypes.c_int64
    return loaded if finds_what_torch_finds(loaded) else None


def built(compiler: str) -> Path:
    """The library for this source, compiler and processor; built if it is not in the cache."""
    identity = [SOURCE.read_text(), compiler, *FLAGS, platform.platform(), processor()]
    folder = cache_folder() / "compiled"
    path = folder / f"chain-{sha256(repr(identity).encode()).hexdigest()[:20]}.so"
    if not path.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(beside), "-lm"]
        try:
            if subprocess.run([*command, "-march=native"], capture_output=True, timeout=120).returncode:
                subprocess.run(command, capture_output=True, timeout=120, check=True)
            beside.chmod(0o700)
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    return path


def processor() -> str:
    """What distinguishes machines that may share a cache: `-march=native` code runs only on its like."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor()


def ours(path: Path) -> bool:
    """What is loaded runs as we do: only what we alone can have written."""
    status = path.stat()
    return not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not status.st_mode & 0o022)


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


def descend(
    loaded: Any,
    w: Tensor,
    drift: Tensor | None,
    sizes: list[int],
    samples: Samples,
    rows: Tensor,
    lr: float,
    room: Tensor,
) -> None:
    """A step for every row of `rows`, a batch by its places among the samples; after each, `drift` is added to w."""
    places = [None if one is None else ctypes.c_void_p(one.data_ptr()) for one in (w, drift, rows, room)]
    widths, (steps, batch) = (ctypes.c_int * len(sizes))(*sizes), rows.shape
    rate, data = ctypes.c_float(lr), ctypes.byref(samples)
    loaded.descend(places[0], places[1], widths, len(sizes) - 1, data, places[2], steps, batch, rate, places[3])


def score(
    loaded: Any, w: Tensor, sizes: list[int], samples: Samples, rows: Tensor, batch: int
) -> tuple[list[float], list[int]]:
    """The summed cross-entropy of every batch of the rows, and how many of it are right."""
    losses, right = torch.empty(-(-len(rows) // batch), dtype=torch.float64), torch.empty(-(-len(rows) // batch)).long()
    room = room_for(loaded, sizes, batch, drifting=False)
    w_, rows_, losses_, right_, room_ = (ctypes.c_void_p(one.data_ptr()) for one in (w, rows, losses, right, room))
    widths, count, data = (ctypes.c_int * len(sizes))(*sizes), ctypes.c_int64(len(rows)), ctypes.byref(samples)
    loaded.score(w_, widths, len(sizes) - 1, data, rows_, count, batch, losses_, right_, room_)
    return losses.tolist(), right.tolist()


def applies(vector: Tensor) -> bool:
    """Whether a vector can be handed to the passes below."""
    plain = vector.device.type == "cpu" and vector.dtype == torch.float32 and vector.is_contiguous()
    return plain and library() is not None


def all_finite(vector: Tensor) -> bool:
    return bool(library().all_finite(ctypes.c_void_p(vector.data_ptr()), ctypes.c_int64(vector.numel())))


def accumulate(total: Tensor, vector: Tensor, weight: float, grid: float) -> None:
    """total += weight * vector, each term rounded as (grid + term) - grid."""
    places = ctypes.c_void_p(total.data_ptr()), ctypes.c_void_p(vector.data_ptr())
    library().accumulate(*places, ctypes.c_int64(len(vector)), ctypes.c_double(weight), ctypes.c_double(grid))


def room_for(loaded: Any, sizes: list[int], batch: int, drifting: bool) -> Tensor:
    """Scratch memory for batches of this size."""
    return torch.empty(loaded.scratch((ctypes.c_int * len(sizes))(*sizes), len(sizes) - 1, batch, drifting))


def finds_what_torch_finds(loaded: Any) -> bool:
    """Two steps on a small network, and a drift, against autograd."""
    sizes, batch, lr = [21, 19, 9, 5], 7, 0.5
    source = torch.Generator().manual_seed(0)
    layers = [torch.randn(o, i + 1, generator=source) / i**0.5 for i, o in pairwise(sizes)]
    x = torch.randn(2 * batch, sizes[0], generator=source)
    y = torch.randint(sizes[-1], (2 * batch,), generator=source)
    w = torch.cat([part for layer in layers for part in (layer[:, :-1].reshape(-1), layer[:, -1])])
    drift = torch.randn(len(w), generator=source)
    drifts = torch.split(drift, [n for i, o in pairwise(sizes) for n in (i * o, o)])
    rows = torch.arange(2 * batch).view(2, batch)
    descend(loaded, w, drift, sizes, Samples(x, y, None, None), rows, lr, room_for(loaded, sizes, batch, drifting=True))
    parts = [part.clone().requires_grad_() for layer in layers for part in (layer[:, :-1], layer[:, -1])]
    for rows, labels in zip(torch.split(x, batch), torch.split(y, batch), strict=True):
        with torch.enable_grad():
            h = rows
            for weight, bias in zip(parts[::2], parts[1::2], strict=True):
                h = torch.nn.functional.linear(h if h is rows else h.relu(), weight, bias)
            gradients = torch.autograd.grad(torch.nn.functional.cross_entropy(h, labels), parts)
        with torch.no_grad():
            for part, gradient, more in zip(parts, gradients, drifts, strict=True):
                part.sub_(gradient, alpha=lr).add_(more.view(part.shape))
    expected = torch.cat([part.detach().reshape(-1) for part in parts])
    return bool(torch.allclose(w, expected, rtol=1e-4, atol=1e-5))
