"""The dataset: samples and targets, and the one place where stored values become what a model sees."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcluster.data.targets import MOST_TOKENS, PLURALS, TARGETS, check_ids, check_targets, infer_kind, is_token_ids
from fedcluster.errors import BadData


class DataSpec(NamedTuple):
    """What a model and a task have to know of the data.

    `shape` is that of one sample. `outputs` is what the model gives for a sample: a score for each class, number or
    label; for token targets, a score for each token of the vocabulary at every position. `vocabulary` is the number of
    token ids where samples are such, else 0.
    """

    shape: tuple[int, ...]
    target: str
    outputs: int
    vocabulary: int = 0

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> "DataSpec":
        """The reverse of `_asdict`, checked, because it comes from a file or from the network: ValueError, TypeError or
        KeyError where it is none."""
        shape, target, outputs, vocabulary = (given[name] for name in cls._fields)
        spec = cls(tuple(map(int, shape)), str(target), int(outputs), int(vocabulary))
        if target not in TARGETS or not 0 <= spec.vocabulary <= MOST_TOKENS or not 1 <= spec.outputs <= MOST_TOKENS:
            raise ValueError("no such data")
        return spec


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples `x` and targets `y` of the training and the test set.

    `x` are images [N, channels, height, width], rows of numbers [N, features], or token ids [N, S]. Images may be given
    without a channel axis or with it last. Bytes (uint8) are stored as they are and standardised when they are used,
    (x / 255 - mean) / std per channel of the training set. Other whole numbers [N, S] are token ids and stay int64; all
    else becomes float32, unchanged.

    `y` are of the kind `target`: "class" (int64 [N]), "number" (float32 [N] or [N, T]), "multilabel" (0 or 1, [N, L])
    or "token" (int64 [N, S], the next token at each position, -100 where it does not count). Left out, the kind is
    inferred. `outputs` is the number of classes, numbers, labels or tokens; give it where the data do not have all of
    them. `classes` is the same for class targets, else 0.

    `device_train` names, for `partition = "natural"`, the device of each training row. `device_test` names that of each
    test row, where it is known: the model is then scored by device.

    `target_scale` is given where number targets are standardised, (y - mean) / deviation: [2, T], means and deviations.
    Metrics are then computed in the targets' own units. `preparation` has, as JSON, the keys of [data] that prepare
    other rows in the same way as these.
    """

    x_train: Any
    y_train: Any
    x_test: Any
    y_test: Any
    device_train: NDArray[Any] | None = None
    name: str = "data"
    classes: int = 0
    target: str = ""
    outputs: int = 0
    vocabulary: int = 0
    device_test: NDArray[Any] | None = None
    target_scale: NDArray[np.float64] | None = None
    preparation: str = "{}"
    scale: Tensor | None = field(default=None, init=False)
    shift: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        if self.target not in ("", *TARGETS):
            raise BadData(f"{self.name}: target = {self.target!r} is not allowed: use one of {', '.join(TARGETS)}")
        put("target", self.target or infer_kind(self.y_train, self.y_test, self.x_train, self.name))
        outputs = max(self.outputs, self.classes, self.vocabulary if self.target == "token" else 0)
        for split in ("train", "test"):
            x = samples(getattr(self, f"x_{split}"), f"x_{split} of {self.name}", self.vocabulary)
            y = check_targets(getattr(self, f"y_{split}"), self.target, f"y_{split} of {self.name}", len(x), outputs)
            put(f"x_{split}", x)
            put(f"y_{split}", y)
        for part, what in (("x", "samples"), ("y", "targets")):
            train, test = getattr(self, f"{part}_train"), getattr(self, f"{part}_test")
            if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
                raise BadData(
                    f"{self.name}: training {what} are {describe(train)} but test {what} are {describe(test)}; "
                    "they must match"
                )
        self.count_outputs(outputs)
        if self.target_scale is not None:
            put("target_scale", check_scale(self.target_scale, self.target, self.outputs, self.name))
        for split in ("train", "test"):
            devices, rows = getattr(self, f"device_{split}"), len(getattr(self, f"x_{split}"))
            if devices is not None and np.shape(devices) != (rows,):
                raise BadData(f"{self.name}: device_{split} must name one device for each of the {rows} rows")
        if self.x_train.dtype == torch.uint8:
            mean, std = moments(self.x_train)
            put("scale", 1 / (255 * std))
            put("shift", -mean / std)

    def count_outputs(self, outputs: int) -> None:
        """Set `outputs`, `classes` and `vocabulary` to the larger of what was given and what the data have."""
        put = partial(object.__setattr__, self)
        if self.x_train.dtype == torch.int64:
            put("vocabulary", max(self.vocabulary, 1 + max(int(self.x_train.max()), int(self.x_test.max()))))
        seen = 1 + max(int(self.y_train.max()), int(self.y_test.max()))
        match self.target:
            case "class":
                outputs = max(outputs, seen)
            case "token":
                outputs = max(outputs, seen, self.vocabulary)
                if self.vocabulary:  # inputs and targets are tokens of the same vocabulary
                    put("vocabulary", outputs)
            case _:
                outputs = self.y_train.shape[1] if self.y_train.ndim == 2 else 1
        put("outputs", outputs)
        put("classes", outputs if self.target == "class" else 0)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.x_train.shape[1:])

    @property
    def spec(self) -> DataSpec:
        return DataSpec(self.shape, self.target, self.outputs, self.vocabulary)

    def labels(self, needed_by: str) -> NDArray[np.int64]:
        """The class of every training row, for what cannot do without; BadData where targets are not classes."""
        if self.target != "class":
            raise BadData(f"{needed_by} needs class labels, but the targets of {self.name} are {PLURALS[self.target]}")
        found: NDArray[np.int64] = self.y_train.numpy()
        return found

    def with_target(self, kind: str, needed_by: str) -> "Dataset":
        """The same data with targets of another kind: classes as numbers, or whole numbers as classes."""
        if kind == self.target:
            return self
        if {kind, self.target} != {"class", "number"} or (kind == "class" and self.y_train.ndim == 2):
            raise BadData(
                f"{needed_by} needs targets that are {PLURALS[kind]}, but those of {self.name} are "
                f"{PLURALS[self.target]}"
            )
        targets = {}
        for split in ("train", "test"):
            y = getattr(self, f"y_{split}").numpy()
            targets[f"y_{split}"] = check_targets(y, kind, f"y_{split} of {self.name}", len(y), 0)
        other = self.with_fields(target=kind, **targets)
        other.count_outputs(0)
        return other

    def inputs(self, x: Tensor) -> Tensor:
        """What the model sees of stored samples."""
        if self.scale is None or self.shift is None:
            return x
        return x.to(torch.float32).mul_(self.scale).add_(self.shift)

    def in_units(self, y: Tensor) -> Tensor:
        """Targets or predictions of them in the targets' own units: y deviation + mean."""
        if self.target_scale is None:
            return y
        mean, deviation = torch.from_numpy(self.target_scale if y.ndim == 2 else self.target_scale[:, 0]).to(y.device)
        units: Tensor = y.double() * deviation + mean
        return units

    def standardised(self, scale: list[float], shift: list[float]) -> "Dataset":
        """The same data, standardised by other numbers, one per channel. Data that are not bytes are not standardised,
        so they stay as they are."""
        if self.scale is None or self.shift is None:
            return self
        return self.with_fields(
            scale=torch.tensor(scale).reshape(self.scale.shape), shift=torch.tensor(shift).reshape(self.shift.shape)
        )

    def with_fields(self, **fields: Any) -> "Dataset":
        """A copy with other values of these fields, which the caller has checked."""
        other = copy(self)
        vars(other).update(fields)
        return other

    def digest(self) -> str:
        """A fingerprint of every value, so that a resumed run can tell that its data are the same."""
        total = sha256(repr(self.spec[1:]).encode())
        for tensor in (self.x_train, self.y_train, self.x_test, self.y_test):
            total.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
            total.update(tensor.numpy().data)
        for tensor in (self.scale, self.shift):
            total.update(b"" if tensor is None else tensor.numpy().tobytes())
        total.update(b"" if self.target_scale is None else self.target_scale.tobytes())
        for devices in (self.device_train, self.device_test):
            total.update(b"" if devices is None else "\n".join(map(str, devices)).encode())
        return total.hexdigest()


def check_scale(scale: Any, target: str, outputs: int, name: str) -> NDArray[np.float64]:
    """A `target_scale` as an array of its own; BadData where it is none."""
    array = np.array(scale)
    if target != "number" or array.dtype.kind not in "fiu" or array.shape != (2, outputs):
        raise BadData(f"{name}: target_scale has the mean and the deviation of each number target, [2, T]")
    array = array.astype(np.float64)
    if not np.isfinite(array).all() or (array[1] <= 0).any():
        raise BadData(f"{name}: target_scale must be finite, with deviations above 0")
    return array


def samples(x: Any, what: str, vocabulary: int = 0) -> Tensor:
    array = np.asarray(x)
    if array.dtype.kind not in "fiub" or array.ndim < 2 or array.ndim > 4 or array.size == 0:
        raise BadData(f"{what} must be numbers [rows, features] or images, but is {array.dtype} {list(array.shape)}")
    if is_token_ids(array):
        check_ids(array, what, vocabulary)
        return torch.from_numpy(np.ascontiguousarray(array.astype(np.int64)))
    if array.ndim == 3:
        array = array[:, None]
    elif array.ndim == 4 and array.shape[3] in (1, 3, 4) and array.shape[1] not in (1, 3, 4):
        array = np.moveaxis(array, 3, 1)
    if array.dtype != np.uint8:
        array = array.astype(np.float32)
        if not np.isfinite(array).all():
            raise BadData(f"{what} has values that are not finite; remove or fill them")
    return torch.from_numpy(np.ascontiguousarray(array))


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
