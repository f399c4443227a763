"""The dataset: samples and labels, and the one place where raw values become what a model sees."""

from copy import copy
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcluster.errors import BadData


@dataclass(frozen=True, eq=False)
class Dataset:
    """Classification data: `x` as images [N, channels, height, width] or rows [N, features], `y` in 0..classes-1.

    Images may be given without a channel axis or with it last. Bytes (uint8) are stored as they are and
    standardised when they are used, (x / 255 - mean) / std per channel of the training set; every other
    type is taken as float32, unchanged. `device_train` says, for `partition = "natural"`, whose each row is.
    """

    x_train: Any
    y_train: Any
    x_test: Any
    y_test: Any
    device_train: NDArray[Any] | None = None
    name: str = "data"
    classes: int = 0
    scale: Tensor | None = field(default=None, init=False)
    shift: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        for split in ("train", "test"):
            x = samples(getattr(self, f"x_{split}"), f"x_{split} of {self.name}")
            y = labels(getattr(self, f"y_{split}"), f"y_{split} of {self.name}", len(x), self.classes)
            put(self, f"x_{split}", x)
            put(self, f"y_{split}", y)
        if self.x_train.shape[1:] != self.x_test.shape[1:] or self.x_train.dtype != self.x_test.dtype:
            raise BadData(
                f"{self.name}: training samples are {describe(self.x_train)} but test samples are "
                f"{describe(self.x_test)}; they must be alike"
            )
        seen = 1 + max(int(self.y_train.max()), int(self.y_test.max()))
        put(self, "classes", max(self.classes, seen))
        if self.device_train is not None and np.shape(self.device_train) != (len(self.x_train),):
            raise BadData(f"{self.name}: device_train must name one device for each of the {len(self.x_train)} rows")
        if self.x_train.dtype == torch.uint8:
            mean, std = moments(self.x_train)
            put(self, "scale", 1 / (255 * std))
            put(self, "shift", -mean / std)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.x_train.shape[1:])

    def inputs(self, x: Tensor) -> Tensor:
        """What the model sees of stored samples."""
        if self.scale is None or self.shift is None:
            return x
        return x.to(torch.float32).mul_(self.scale).add_(self.shift)

    def standardised(self, scale: list[float], shift: list[float]) -> "Dataset":
        """The same data, standardised by other numbers, one per channel. Data that are not bytes are not standardised,
        so they stay as they are."""
        if self.scale is None or self.shift is None:
            return self
        other = copy(self)
        for name, values, shape in (("scale", scale, self.scale.shape), ("shift", shift, self.shift.shape)):
            object.__setattr__(other, name, torch.tensor(values).reshape(shape))
        return other

    def digest(self) -> str:
        """A fingerprint of every value, so that a resumed run can tell that its data are the same."""
        total = sha256()
        for tensor in (self.x_train, self.y_train, self.x_test, self.y_test):
            total.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
            total.update(tensor.numpy().data)
        if self.device_train is not None:
            total.update("\n".join(map(str, self.device_train)).encode())
        return total.hexdigest()


def samples(x: Any, what: str) -> Tensor:
    array = np.asarray(x)
    if array.dtype.kind not in "fiub" or array.ndim < 2 or array.ndim > 4 or array.size == 0:
        raise BadData(f"{what} must be numbers [rows, features] or images, but is {array.dtype} {list(array.shape)}")
    if array.ndim == 3:
        array = array[:, None]
    elif array.ndim == 4 and array.shape[3] in (1, 3, 4) and array.shape[1] not in (1, 3, 4):
        array = np.moveaxis(array, 3, 1)
    if array.dtype != np.uint8:
        array = array.astype(np.float32)
        if not np.isfinite(array).all():
            raise BadData(f"{what} has values that are not finite; remove or fill them")
    return torch.from_numpy(np.ascontiguousarray(array))


def labels(y: Any, what: str, rows: int, classes: int) -> Tensor:
    array = np.asarray(y)
    if array.shape != (rows,):
        raise BadData(f"{what} must be one label for each of the {rows} samples, but has shape {list(array.shape)}")
    if array.dtype.kind not in "iub" or (array < 0).any():
        raise BadData(f"{what} must be whole numbers from 0, but is {array.dtype}")
    if int(array.max()) >= max(classes, most_classes(rows)):  # before the cast: a large unsigned number wraps
        raise BadData(f"{what} has the label {array.max()}: number the classes from 0")
    return torch.from_numpy(array.astype(np.int64))


def most_classes(rows: int) -> int:
    """How many classes this many rows may have, so that one absurd label does not make an absurd model."""
    return max(10_000, rows)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of byte samples by channel, as fractions of 255, shaped to broadcast over one sample."""
    channels = x.shape[1] if x.ndim == 4 else 1
    levels = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for channel in range(channels):
        values = x[:, channel] if x.ndim == 4 else x
        share = torch.bincount(values.reshape(-1), minlength=256).double() / values.numel()
        mean = (share * levels).sum()
        means.append(mean)
        deviations.append((share * (levels - mean) ** 2).sum().sqrt().clamp(min=1e-3))
    shape = (channels, 1, 1) if channels > 1 else ()  # one number for all is much faster to apply
    return torch.stack(means).float().reshape(shape), torch.stack(deviations).float().reshape(shape)


def describe(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape[1:])}"
