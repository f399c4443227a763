"""The columns of a table as what a model learns from: labels, features, pictures, and whose each row is.

Nothing is guessed. Every column besides `label` and `device` is a feature and holds numbers only; a column that looks
like an identifier, an empty cell or a text among numbers is refused by name and line.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fedcluster.data.images import stacked
from fedcluster.data.tables import Table, is_number
from fedcluster.data.targets import most_classes
from fedcluster.errors import BadData

LABELS = ("label", "labels", "target", "class", "y")
DEVICE = "device"
IDENTIFIER = re.compile(r"(?i:(.*[_\- .])?(id|ids|uuid|guid)|idx|index|key|row|unnamed: ?0|)|.*[a-z0-9](Id|ID)")
MANY = 100  # rows: whole numbers that are all different in so many look like an identifier
LARGEST = 1e6  # of a feature: steps of any usual size diverge beyond
ADVICE = "drop the column, or name it device if it tells whose each row is"

Arrays = dict[str, Any]


def arrays(train: Table, test: Table | None, say: Callable[[str], None] = print) -> Arrays:
    """x and y of the splits there are, and the devices of the training rows if the table names them."""
    label = label_column(train)
    splits = {"train": train} | ({"test": test} if test is not None else {})
    for table in splits.values():
        missing = [name for name in train.data.column_names if name not in table and name != DEVICE]
        if missing:
            raise BadData(f"{table.path} has no column {missing[0]}, which {train.path} has")
    found: Arrays = {}
    values = {split: labels(table, label) for split, table in splits.items()}
    for split, y in numbered(values, splits, label).items():
        found[f"y_{split}"] = y
    picture = next((name for name in train.data.column_names if is_picture(train.data.field(name).type)), None)
    names = [] if picture else feature_columns(train, label)
    for split, table in splits.items():
        found[f"x_{split}"] = (
            stacked(picture_bytes(table, picture), table.path, say) if picture else features(table, names)
        )
    if DEVICE in train:
        found["device_train"] = devices(train)
    return found


def label_column(table: Table) -> str:
    """`label` or one of its synonyms, else the column that Hugging Face's schema calls a class label."""
    try:
        told = json.loads((table.data.schema.metadata or {})[b"huggingface"])["info"]["features"]
        classes = [name for name, kind in told.items() if kind.get("_type") == "ClassLabel"]
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        classes = []
    for name in (*LABELS, *classes):
        if name in table:
            return str(name)
    raise BadData(f"{table.path} has no label column among {', '.join(table.data.column_names)}; name it 'label'")


def labels(table: Table, name: str) -> NDArray[Any]:
    """Whole numbers, or texts. Fractions are no classes."""
    kind, text = table.data.field(name).type, table.is_text(name)
    if not (text or pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise BadData(f"{table.path}: column {name} must be whole numbers or the names of classes, but is {kind}")
    table.refuse_empty(name)
    if not text:
        values = table.data.column(name).combine_chunks().to_numpy(zero_copy_only=False)
        return whole(table, name, np.asarray(values))
    codes, texts = table.words(name)
    numeric = np.array([is_number(each) for each in texts])
    if numeric.all():
        if all(re.fullmatch(r"[+-]?\d{1,18}", each, re.ASCII) for each in texts):
            return np.array([int(each) for each in texts], np.int64)[codes]
        return whole(table, name, np.array([float(each) for each in texts])[codes])
    if numeric.any():
        odd = numeric if 2 * numeric[codes].sum() <= len(codes) else ~numeric
        row = int(np.flatnonzero(odd[codes])[0])
        table.refuse(
            row,
            f"{name} is {texts[codes[row]]!r}, but {'texts' if numeric[codes[row]] else 'numbers'} elsewhere: "
            "number the classes from 0, or name all of them",
        )
    return np.array(texts)[codes]


def whole(table: Table, name: str, values: NDArray[Any]) -> NDArray[Any]:
    if values.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            wrong = np.flatnonzero(~np.isfinite(values) | (values % 1 != 0))
        if len(wrong):
            row = int(wrong[0])
            table.refuse(row, f"{name} {values[row]:g} is not a class: classes are whole numbers from 0, or names")
    return values


def numbered(values: dict[str, NDArray[Any]], tables: dict[str, Table], name: str) -> dict[str, NDArray[np.int64]]:
    """Labels as classes from 0: whole numbers as they are if none is negative, everything else in its order."""
    most = most_classes(sum(map(len, values.values())))
    kinds = {y.dtype.kind in "iu" for y in values.values()}
    if kinds == {True} and all(int(y.min()) >= 0 for y in values.values()):
        for split, y in values.items():
            if int(y.max()) >= most:
                row = int(y.argmax())
                tables[split].refuse(row, f"{name} {y[row]} is too large for a class: number the classes from 0")
        return {split: y.astype(np.int64) for split, y in values.items()}
    if len({y.dtype.kind in "UO" for y in values.values()}) > 1:
        raise BadData(
            f"column {name} holds numbers in {tables['train'].path} or {tables['test'].path}, texts in the other"
        )
    classes = np.unique(np.concatenate(list(values.values())))
    if len(classes) > most:
        raise BadData(
            f"{tables['train'].path}: column {name} has {len(classes)} different values, too many for classes"
        )
    return {split: np.searchsorted(classes, y).astype(np.int64) for split, y in values.items()}


def feature_columns(table: Table, label: str) -> list[str]:
    names = [name for name in table.data.column_names if name not in (label, DEVICE)]
    if not names:
        raise BadData(f"{table.path} has no picture column and no numeric column beside {label}")
    for name in names:
        if IDENTIFIER.fullmatch(name):
            raise BadData(f"{table.path}: column {name!r} looks like an identifier, not a feature: {ADVICE}")
        if len(table) >= MANY and table.is_whole(name):
            values = table.numbers(name)
            if len(np.unique(values)) == len(values):
                raise BadData(
                    f"{table.path}: column {name!r} has another whole number in each of {len(values)} rows, like an "
                    f"identifier: {ADVICE}; write it with a decimal point if it is a feature"
                )
    return names


def features(table: Table, names: list[str]) -> NDArray[Any]:
    """Rows of numbers; all of them bytes if the columns are."""
    columns = []
    for name in names:
        kind = table.data.field(name).type
        if not (
            table.is_text(name) or pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)
        ):
            raise BadData(f"{table.path}: column {name} is {kind}: a feature is one number; {ADVICE}")
        values = table.numbers(name)
        large = np.flatnonzero(np.abs(values) > LARGEST)
        if len(large):
            row = int(large[0])
            table.refuse(row, f"{name} {values[row]:g} is too large to train on: scale the column")
        columns.append(values)
    bytes_only = all(pa.types.is_uint8(table.data.field(name).type) for name in names)
    return np.stack(columns, axis=1).astype(np.uint8 if bytes_only else np.float64)


def devices(table: Table) -> NDArray[Any]:
    """Whose each row is: whole numbers, so that 2 comes before 10, or names."""
    table.refuse_empty(DEVICE)
    if pa.types.is_integer(table.data.field(DEVICE).type):
        return np.asarray(table.data.column(DEVICE).combine_chunks().to_numpy(zero_copy_only=False))
    codes, texts = table.words(DEVICE)
    if all(re.fullmatch(r"0|-?[1-9]\d{0,17}", text, re.ASCII) for text in texts):
        return np.array([int(text) for text in texts], np.int64)[codes]
    return np.array(texts)[codes]


def is_picture(kind: Any) -> bool:
    """As Hugging Face stores them: a struct with the bytes of the file."""
    return bool(pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0)


def picture_bytes(table: Table, name: str) -> list[bytes | None]:
    """Never by path: a table must not name other files to be read."""
    chunks = [chunk.field("bytes") for chunk in table.data.column(name).chunks]
    return [None if one is None else bytes(one) for chunk in chunks for one in chunk.to_pylist()]
