"""The target columns of a table: which kind they are, and their values. Numbers are standardised, as features are."""

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fedcluster.data import targets
from fedcluster.data.encoding import UNSCALED, scale_of, scale_of_lists, some
from fedcluster.data.tables import Table, is_number
from fedcluster.errors import BadData
from fedcluster.experiment import Data

FEW_VALUES = 20  # whole numbers below this are taken for classes
DENSE_VALUES = 1000  # and those below this, if they have few gaps from 0 on

Arrays = dict[str, Any]


def targets_of(
    tables: dict[str, Table], names: Sequence[str], kind: str | None, data: Data, whole_fleet: bool
) -> Arrays:
    """y of both parts, their kind and the number of outputs. Numbers are not standardised yet. `categories` has the
    classes where they are numbered by rank."""
    train, listed = tables["train"], listed_classes(names, data)
    kind = kind_of_targets(train, names, kind, data, whole_fleet)
    if kind == "class":
        if len(names) > 1:
            raise BadData(f"data.target names {len(names)} columns, and a classification has one: give task.name")
        values = {split: labels(table, names[0]) for split, table in tables.items()}
        if listed:
            values = {split: places(y, listed, tables[split], names[0]) for split, y in values.items()}
        elif not whole_fleet:
            check_numbered(values, train, names[0])
        values, ranked = numbered(values, tables, names[0])
        result: Arrays = {f"y_{split}": y for split, y in values.items()}
        known = len(listed) or class_labels(train).get(names[0], 0)
        outputs = max(known, *(int(y.max()) + 1 for y in values.values()))
        if ranked:
            result["categories"] = {names[0]: ranked}
    else:
        result = {f"y_{split}": numbers(table, names, kind) for split, table in tables.items()}
        outputs = result["y_train"].shape[1] if result["y_train"].ndim == 2 else 1
    return result | {"target": kind, "outputs": outputs}


def listed_classes(names: Sequence[str], data: Data) -> tuple[str, ...]:
    return data.categories.get(names[0], ()) if isinstance(data.categories, dict) else ()


def kind_of_targets(table: Table, names: Sequence[str], kind: str | None, data: Data, whole_fleet: bool = True) -> str:
    """The kind that the task takes, if the experiment names a task; else the one that the columns have. A single device
    may have few of the fleet's classes."""
    return kind or ("class" if listed_classes(names, data) else inferred(table, names, whole_fleet))


def standardised(arrays: Arrays, names: Sequence[str], data: Data, owner: NDArray[Any] | None) -> Arrays:
    """Numeric targets, (y - mean) / deviation by column, with means and deviations as `target_scale`, [2, T]."""
    y = arrays["y_train"]
    if y.ndim == 2 and len(names) == 1:
        scales = [scale_of_lists(names[0], y, data, owner)] * y.shape[1]
    else:
        columns = y.reshape(len(y), -1).T
        scales = [scale_of(name, values, data, owner) for name, values in zip(names, columns, strict=True)]
    target_scale: NDArray[Any] = np.array(scales).T
    mean, deviation = target_scale if y.ndim == 2 else target_scale[:, 0]
    result = {f"y_{s}": ((arrays[f"y_{s}"] - mean) / deviation).astype(np.float32) for s in ("train", "test")}
    return result if set(scales) == {UNSCALED} else result | {"target_scale": target_scale}


def describe(names: Sequence[str], arrays: Arrays) -> str:
    """The columns and what they were taken for, for a line of the log."""
    kind = f"{arrays['outputs']} classes" if arrays["target"] == "class" else targets.PLURALS[arrays["target"]]
    scales = arrays["target_scale"].T if "target_scale" in arrays else np.empty((0, 2))
    if len(scales) == 1:
        kind += (
            f", standardised by mean {scales[0, 0]:.4g} and deviation {scales[0, 1]:.4g}; scores are in its own units"
        )
    elif len(scales):
        kind += ", standardised; scores are in their own units"
    return f"{some(names)} ({kind})"


def check_variety(table: Table, names: Sequence[str], y: NDArray[Any]) -> None:
    """Refuse targets that are the same in all training rows."""
    if (y == y[:1]).all():
        raise BadData(
            f"{table.path}: the target {some(names)} is the same in all training rows, so there is nothing to learn"
        )


def inferred(table: Table, names: Sequence[str], whole_fleet: bool = True) -> str:
    """The kind of the targets, if the columns are unambiguous."""
    advice = 'give task.name = "classification" or "regression"'
    if len(names) > 1 or is_list(table.data.field(names[0]).type):
        values = numbers(table, names, "number")
        if ((values == 0) | (values == 1)).all():
            return "multilabel"
        if (values % 1 != 0).any():
            return "number"
        row = int(((values != 0) & (values != 1)).any(axis=1).argmax())
        raise BadData(
            f"{table.where(row)}: the targets {some(names)} are whole numbers, and not only 0 and 1: correct them if "
            'they are labels that apply (1) or not (0), or give task.name = "regression"'
        )
    name = names[0]
    kind = table.data.field(name).type
    if name in class_labels(table) or pa.types.is_boolean(kind):
        return "class"
    if not (table.is_text(name) or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return "class"  # whose check names the type
    floats = table.floats(name)
    if floats is None:
        return "class"  # texts
    table.refuse_empty(name)
    distinct = np.unique(floats[np.isfinite(floats)])
    if len(distinct) == 1 and np.isfinite(floats).all():
        check_variety(table, names, distinct)
    fractions = (distinct % 1 != 0).any()
    if fractions:
        return "number" if len(distinct) > FEW_VALUES else "class"  # whose check then names the fraction
    if not table.is_whole(name) and np.isfinite(floats).all():
        raise BadData(
            f"{table.path}: column {name} has whole numbers written as fractions, which may be classes or numbers: "
            f"{advice}"
        )
    few = len(distinct) <= FEW_VALUES and not whole_fleet
    bound = max(FEW_VALUES, min(DENSE_VALUES, 2 * len(distinct)))
    if len(distinct) == 0 or few or distinct.tolist() == [-1, 1] or (distinct[0] >= 0 and distinct[-1] < bound):
        return "class"  # whose check names a cell that is not a number
    far = distinct[-1] if distinct[0] >= 0 else distinct[0]
    raise BadData(
        f"{table.where(int((floats == far).argmax()))}: {name} {int(far)} is one of {len(distinct):,} different whole "
        f"numbers, which may be classes or numbers: {advice}, or correct it"
    )


def numbers(table: Table, names: Sequence[str], kind: str) -> NDArray[np.float64]:
    """Numeric targets, or labels that are 0 or 1: [rows], or [rows, several]."""
    if is_list(table.data.field(names[0]).type):
        values = table.lists(names[0]).astype(np.float64)
    else:
        columns = [table.numbers(name) for name in names]
        values = columns[0] if len(names) == 1 and kind == "number" else np.stack(columns, axis=1)
    if kind == "multilabel":
        wrong = np.argwhere((values != 0) & (values != 1))
        if len(wrong):
            row, label = wrong[0].tolist()
            table.refuse(row, f"{names[label % len(names)]} is {values[row, label]:g}: a label applies (1) or not (0)")
    return np.asarray(values)


def labels(table: Table, name: str) -> NDArray[Any]:
    """Labels as integers or texts. Fractions are refused."""
    kind, is_text = table.data.field(name).type, table.is_text(name)
    if not (is_text or pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise BadData(f"{table.path}: column {name} must be whole numbers or the names of classes, but is {kind}")
    table.refuse_empty(name)
    if not is_text:
        values = np.asarray(table.data.column(name).combine_chunks().to_numpy(zero_copy_only=False))
        return whole(table, name, values.astype(np.int64) if values.dtype.kind == "b" else values)
    codes, texts = table.words(name)
    numeric = np.array([is_number(each) for each in texts])
    if numeric.all():
        if all(re.fullmatch(r"[+-]?\d{1,18}", each, re.ASCII) for each in texts):
            return np.array([int(each) for each in texts], np.int64)[codes]
        return whole(table, name, np.array([float(each) for each in texts])[codes])
    if numeric.any():
        if 2 * numeric[codes].sum() > len(codes) and any(float(text) % 1 for text in np.array(texts)[numeric]):
            row = int(np.flatnonzero(~numeric[codes])[0])
            table.refuse(row, f"{name} {texts[codes[row]][:80]!r} is not a number")
        odd = numeric if 2 * numeric[codes].sum() <= len(codes) else ~numeric
        row = int(np.flatnonzero(odd[codes])[0])
        table.refuse(
            row,
            f"{name} is {texts[codes[row]]!r}, but other rows have {'texts' if numeric[codes[row]] else 'numbers'}: "
            "number the classes from 0, or name all of them",
        )
    return np.array(texts)[codes]


def whole(table: Table, name: str, values: NDArray[Any]) -> NDArray[Any]:
    if values.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            wrong = np.flatnonzero(~np.isfinite(values) | (values % 1 != 0))
        if len(wrong):
            row = int(wrong[0])
            table.refuse(
                row,
                f"{name} {values[row]:g} is not a class: classes are whole numbers from 0, or names; for numbers, "
                'give task.name = "regression"',
            )
    return values


def places(values: NDArray[Any], listed: Sequence[str], table: Table, name: str) -> NDArray[np.int64]:
    """Classes by their places in the list that `data.categories` has for them."""
    place = {text: k for k, text in enumerate(listed)}
    texts, codes = np.unique(values.astype(str), return_inverse=True)
    unknown = np.array([text not in place for text in texts])[codes]
    if unknown.any():
        row = int(unknown.argmax())
        found = f"{name} {str(values[row])[:80]!r}"
        table.refuse(row, f"{found} is not among the classes that data.categories lists: {some(listed)}")
    return np.array([place[text] for text in texts], np.int64)[codes]


def check_numbered(values: dict[str, NDArray[Any]], table: Table, name: str) -> None:
    """Refuse classes that a device of a federation would number by what it has of them."""
    if any(y.dtype.kind not in "iu" or int(y.min()) < 0 for y in values.values()):
        raise BadData(
            f"{table.path}: the classes in column {name} are not whole numbers from 0, and devices of a federation "
            "must number them in the same way: use whole numbers from 0, or list the classes in the file of --columns, "
            f'as data.categories = {{{name} = ["...", "..."]}}'
        )


def numbered(
    values: dict[str, NDArray[Any]], tables: dict[str, Table], name: str
) -> tuple[dict[str, NDArray[np.int64]], tuple[str, ...]]:
    """Labels as classes from 0: integers as they are, and -1 and 1 or texts by rank, with the classes in that order."""
    most = targets.most_classes(sum(map(len, values.values())))
    known = class_labels(tables["train"]).get(name)
    kinds = {y.dtype.kind in "iu" for y in values.values()}
    if kinds == {True} and (known or all(int(y.min()) >= 0 for y in values.values())):
        for split, y in values.items():
            outside = np.flatnonzero((y < 0) | (y >= (known or most)))
            if len(outside):
                row = int(outside[0])
                why = f"is not one of the {known} classes" if known else "is too large for a class"
                tables[split].refuse(row, f"{name} {y[row]} {why}: number the classes from 0")
        return {split: y.astype(np.int64) for split, y in values.items()}, ()
    if len({y.dtype.kind in "UO" for y in values.values()}) > 1:
        raise BadData(
            f"column {name} holds numbers in one of {tables['train'].path} and {tables['test'].path}, texts in the "
            "other"
        )
    classes = np.unique(np.concatenate(list(values.values())))
    if classes.dtype.kind in "iu" and classes.tolist() != [-1, 1]:
        split = next(split for split, y in values.items() if int(y.min()) < 0)
        row = int((values[split] < 0).argmax())
        tables[split].refuse(
            row,
            f"{name} {values[split][row]} is negative: number the classes from 0, or list them as data.categories = "
            f'{{{name} = ["...", "..."]}}',
        )
    if len(classes) > most:
        raise BadData(f"{tables['train'].path}: column {name} has {len(classes)} distinct values, too many for classes")
    ranks = {split: np.searchsorted(classes, y).astype(np.int64) for split, y in values.items()}
    return ranks, tuple(map(str, classes.tolist()))


def class_labels(table: Table) -> dict[str, int]:
    """The number of classes of every column that the schema of Hugging Face declares as a class label."""
    try:
        features = json.loads((table.data.schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {str(name): len(kind["names"]) for name, kind in features.items() if kind.get("_type") == "ClassLabel"}
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        return {}


def is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
