"""Targets: the four kinds, how the kind is inferred, and the checks of their values.

class        int64 [N]                   the number of the class, from 0
number       float32 [N] or [N, T]       T numbers to predict
multilabel   float32 [N, L], 0 or 1      which of L labels apply
token        int64 [N, S]                the next token at every position; IGNORED positions do not count
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcluster.errors import BadData

TARGETS = ("class", "number", "multilabel", "token")
IGNORED = -100  # PyTorch's own value for targets that do not count
MOST_TOKENS = 1_000_000  # in a vocabulary

PLURALS = {"class": "classes", "number": "numbers", "multilabel": "labels (0 or 1)", "token": "next tokens"}


def infer_kind(y_train: Any, y_test: Any, x_train: Any, name: str) -> str:
    """Infer the kind of the targets from their type, shape and values. Ambiguous targets are refused."""
    arrays = [np.asarray(y_train), np.asarray(y_test)]
    first, say = arrays[0], 'say which with target = "..." in the Dataset'
    floats = any(array.dtype.kind == "f" for array in arrays)
    if floats and any(array.dtype.kind != "f" for array in arrays):
        raise BadData(f"{name}: y_train is {first.dtype} but y_test is {arrays[1].dtype}; they must match")
    whole = all(is_whole(array) for array in arrays)
    if first.ndim == 1:
        if not floats:
            return "class"
        if whole:
            raise BadData(
                f"{name}: the targets are whole numbers written as {first.dtype}, which may be classes or numbers: "
                'store classes as integers, or say target = "number" in the Dataset'
            )
        return "number"
    if first.ndim != 2:
        raise BadData(
            f"{name}: the targets must be [rows] or [rows, several], but y_train has the shape {list(first.shape)}"
        )
    if not whole:
        return "number"
    x = np.asarray(x_train)
    if is_token_ids(x) and x.shape[1:] == first.shape[1:] and not floats:
        return "token"
    if first.shape[1] == 1:
        raise BadData(f"{name}: a single column of whole numbers may be classes or numbers: {say}, or give y as [rows]")
    if all(((array == 0) | (array == 1)).all() for array in arrays):
        return "multilabel"
    if floats:
        return "number"
    raise BadData(f"{name}: whole numbers {list(first.shape[1:])} for every sample may be numbers or tokens: {say}")


def is_token_ids(x: NDArray[Any]) -> bool:
    """Whether samples are token ids: whole numbers [N, S] that are not bytes."""
    return x.ndim == 2 and x.dtype.kind in "iu" and x.dtype != np.uint8


def is_whole(array: NDArray[Any]) -> bool:
    with np.errstate(invalid="ignore"):
        return array.dtype.kind != "f" or bool((array % 1 == 0).all())


def check_targets(y: Any, kind: str, what: str, rows: int, outputs: int) -> Tensor:
    """Check targets of this kind and return them as a tensor. `outputs` is the number of classes, numbers, labels or
    tokens, or 0 if it is not known."""
    array = np.asarray(y)
    if array.dtype.kind not in "fiub":
        raise BadData(f"{what} must be {PLURALS[kind]}, but is {array.dtype}")
    if kind == "class":
        return class_targets(array, what, rows, outputs)
    dimensions = (1, 2) if kind == "number" else (2,)
    if array.ndim not in dimensions or len(array) != rows or array.shape[-1] == 0:
        raise BadData(f"{what} must be {PLURALS[kind]} for each of the {rows} samples, but has {list(array.shape)}")
    if kind == "token":
        return token_targets(array, what, outputs)
    if outputs and (array.shape[1] if array.ndim == 2 else 1) != outputs:
        raise BadData(f"{what} must have {outputs} {PLURALS[kind]} for each sample, but has {list(array.shape)}")
    if kind == "multilabel" and not ((array == 0) | (array == 1)).all():
        raise BadData(f"{what} must be 0 or 1, for each label of each sample")
    with np.errstate(over="ignore"):
        array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise BadData(f"{what} has values that are not finite; remove or fill them")
    return torch.from_numpy(np.ascontiguousarray(array))


def class_targets(array: NDArray[Any], what: str, rows: int, classes: int) -> Tensor:
    if array.shape != (rows,):
        raise BadData(f"{what} must be one label for each of the {rows} samples, but has shape {list(array.shape)}")
    if not is_whole(array):
        raise BadData(f"{what} must be whole numbers from 0, but is {array.dtype}")
    if (array < 0).any():
        raise BadData(f"{what} has the label {array.min()}: number the classes from 0")
    if int(array.max()) >= max(classes, most_classes(rows)):  # before the cast: a large unsigned number wraps
        raise BadData(f"{what} has the label {array.max()}: number the classes from 0")
    return torch.from_numpy(array.astype(np.int64))


def token_targets(array: NDArray[Any], what: str, vocabulary: int) -> Tensor:
    if array.dtype.kind not in "iu":
        raise BadData(f"{what} must be token ids, whole numbers, but is {array.dtype}")
    counts = array != IGNORED if array.dtype.kind == "i" else np.ones(array.shape, bool)
    if not counts.any(axis=1).all():
        row = int((~counts.any(axis=1)).argmax())
        raise BadData(f"{what} has no target in row {row}: every position is {IGNORED}, which is ignored; remove it")
    check_ids(array[counts], what, vocabulary)
    return torch.from_numpy(np.ascontiguousarray(array.astype(np.int64)))


def check_ids(ids: NDArray[Any], what: str, vocabulary: int) -> None:
    """Refuse token ids outside the vocabulary: an embedding is read at these places."""
    if int(ids.min()) < 0 or int(ids.max()) >= MOST_TOKENS:
        wrong = ids.min() if int(ids.min()) < 0 else ids.max()
        raise BadData(
            f"{what} has whole numbers, which are taken as token ids, but {wrong} is not one: token ids go from 0 to "
            f"{MOST_TOKENS - 1:,}; store features as float32"
        )
    if vocabulary and int(ids.max()) >= vocabulary:
        raise BadData(f"{what} has the token {ids.max()}, but the vocabulary has {vocabulary:,} tokens")


def most_classes(rows: int) -> int:
    """The most classes for this many rows, so that one wrong label does not make a huge model."""
    return max(10_000, rows)
