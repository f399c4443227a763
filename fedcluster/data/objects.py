"""Data given in Python: Hugging Face datasets, torch datasets, Arrow tables, data frames and arrays by column."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from fedcluster.data.tables import Table
from fedcluster.errors import BadData

SPLITS = ("train", "test", "validation", "valid")
Arrays = dict[str, Any]


def is_data(thing: Any) -> bool:
    return isinstance(thing, Mapping | torch.utils.data.Dataset | pa.Table) or is_hugging_face(thing) or is_frame(thing)


def is_hugging_face(thing: Any) -> bool:
    return type(thing).__module__.partition(".")[0] == "datasets"


def is_frame(thing: Any) -> bool:
    return type(thing).__module__.partition(".")[0] == "pandas" and hasattr(thing, "columns")


def splits_of(thing: Any) -> dict[str, Any]:
    """The parts of the data: `train` and, if there is one, `test`. If no part is called `train`, the first one is."""
    if isinstance(thing, Mapping) and thing and (is_hugging_face(thing) or set(thing) <= set(SPLITS)):
        train = thing.get("train", next(iter(thing.values())))
        test = next((thing[name] for name in SPLITS[1:] if name in thing), None)
        return {"train": train} | ({} if test is None else {"test": test})
    return {"train": thing}


def tables_of(parts: dict[str, Any]) -> dict[str, Table] | None:
    """The parts as tables; None if a part has no columns, such as a torch dataset of (x, y)."""
    found = {split: table_of(part, split) for split, part in parts.items()}
    if any(table is None for table in found.values()):
        return None
    return {split: table for split, table in found.items() if table is not None}


def table_of(part: Any, split: str) -> Table | None:
    if isinstance(part, pa.Table):
        return Table(f"the {split} table", part)
    if is_frame(part):
        try:
            return Table(f"the {split} frame", pa.Table.from_pandas(part, preserve_index=False))
        except (
            ValueError,
            TypeError,
            pa.ArrowException,
        ) as error:  # a column of mixed types, a name that is there twice
            why = " ".join(map(str, error.args))[:200]
            raise BadData(f"data.name: the {split} frame cannot be read as a table ({why})") from None
    if is_hugging_face(part):
        if not hasattr(part, "with_format") or not hasattr(part, "__len__"):
            raise BadData(f"data.name: a {type(part).__name__} cannot be read by row: load it without streaming")
        import datasets

        return Table(f"the {split} dataset", datasets.table.embed_table_storage(part.with_format("arrow")[:]))
    if isinstance(part, Mapping) and not set(part) & {"x_train", "y_train"}:
        return Table(f"the {split} columns", pa.table({str(name): column_of(name, part[name]) for name in part}))
    if isinstance(part, torch.utils.data.Dataset):
        items = rows_of(part)
        if items and all(isinstance(item, Mapping) and item.keys() == items[0].keys() for item in items):
            columns = {name: column_of(name, [item[name] for item in items]) for name in items[0]}
            return Table(f"the {split} dataset", pa.table(columns))
    return None


def column_of(name: Any, values: Any) -> Any:
    """A column of numbers, of texts, or of equally long lists of numbers."""
    try:
        array = np.asarray(values)
        if array.ndim > 1:
            return pa.FixedSizeListArray.from_arrays(pa.array(array.ravel()), int(np.prod(array.shape[1:])))
        return pa.array(values if array.dtype == object else array)
    except (ValueError, TypeError, pa.ArrowException) as error:
        raise BadData(f"data.name: column {name} is neither numbers nor texts ({str(error)[:120]})") from None


def rows_of(part: Any) -> list[Any]:
    """The items of a map-style torch dataset."""
    if isinstance(part, torch.utils.data.IterableDataset) or not hasattr(part, "__len__"):
        raise BadData("data.name: a torch dataset needs __len__ and __getitem__, so an iterable one cannot be read")
    return [part[i] for i in range(len(part))]


def arrays_of(parts: dict[str, Any]) -> Arrays:
    """The arrays of torch datasets of (x, y) or (x, y, device), or of a mapping with x_train and y_train."""
    train = parts["train"]
    if isinstance(train, Mapping):
        known = (
            "x_train",
            "y_train",
            "x_test",
            "y_test",
            "device_train",
            "device_test",
            "target",
            "outputs",
            "classes",
            "vocabulary",
        )
        unknown = [str(name) for name in train if name not in known]
        if unknown or "x_train" not in train or "y_train" not in train:
            wrong = f"has {unknown[0]!r}" if unknown else "lacks x_train or y_train"
            raise BadData(f"data.name: a mapping of arrays has any of {', '.join(known)}, but this one {wrong}")
        return dict(train)
    found: Arrays = {}
    for split, part in parts.items():
        items = rows_of(part)
        if not items or not all(isinstance(item, tuple | list) and len(item) in (2, 3) for item in items):
            raise BadData(
                f"data.name: the items of a torch dataset must be (x, y), (x, y, device) or mappings of columns, but "
                f"those of the {split} part are {type(items[0]).__name__ if items else 'none'}"
            )
        try:
            found[f"x_{split}"] = np.stack([np.asarray(item[0]) for item in items])
            found[f"y_{split}"] = np.stack([np.asarray(item[1]) for item in items])
        except ValueError as error:
            raise BadData(f"data.name: the samples of the {split} part are not of one shape ({error})") from None
        if len(items[0]) == 3:
            found[f"device_{split}"] = np.array([item[2] for item in items])
    return found
