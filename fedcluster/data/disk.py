"""Data sets that Hugging Face's `save_to_disk` wrote: Arrow files that a JSON file names. Read without running code."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from fedcluster.data.objects import SPLITS
from fedcluster.data.tables import Table
from fedcluster.errors import BadData
from fedcluster.inputs import MOST_TEXT, check_size, read_bytes

DICT, STATE = "dataset_dict.json", "state.json"


def is_saved(folder: Path) -> bool:
    return (folder / DICT).exists() or (folder / STATE).exists()


def saved_tables(folder: Path) -> dict[str, Table]:
    """The training part, and the test part where there is one."""
    if not (folder / DICT).exists():
        return {"train": saved_table(folder)}
    names = read_json(folder / DICT).get("splits")
    if not isinstance(names, list) or not names or not all(map(is_name, names)):
        raise BadData(f"{folder / DICT} does not name splits: save the data set again")
    train = "train" if "train" in names else names[0]
    test = next((name for name in SPLITS[1:] if name in names), None)
    parts = {"train": train} | ({} if test is None else {"test": test})
    return {split: saved_table(folder / name) for split, name in parts.items()}


def saved_table(folder: Path) -> Table:
    files = read_json(folder / STATE).get("_data_files")
    entries = [entry for entry in files if isinstance(entry, dict)] if isinstance(files, list) else []
    names: list[Any] = [entry.get("filename") for entry in entries]
    if not names or not all(map(is_name, names)):
        raise BadData(f"{folder / STATE} does not name data files: save the data set again")
    parts = [read_arrow(folder / name) for name in names]
    try:
        return Table(folder, pa.concat_tables(parts))
    except pa.ArrowException as error:
        raise BadData(f"{folder}: its files are not of one table ({str(error)[:120]})") from None


def read_arrow(path: Path) -> Any:
    """A table in Arrow's stream format, every value checked."""
    content = read_bytes(path, "data.name")
    try:
        with pa.ipc.open_stream(pa.BufferReader(content)) as reader:
            table = reader.read_all()
        check_size(path, table.nbytes)
        table.validate(full=True)
        return table
    except (BadData, MemoryError):
        raise
    except Exception as error:  # a damaged or hostile file may fail in any way
        raise BadData(f"{path} cannot be read as a table ({str(error)[:120]})") from None


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_bytes(path, "data.name", MOST_TEXT))
    except (ValueError, RecursionError) as error:
        raise BadData(f"{path} is not JSON ({str(error)[:120]})") from None
    if not isinstance(found, dict):
        raise BadData(f"{path} holds a {type(found).__name__}, not an object")
    return found


def is_name(name: Any) -> bool:
    """A file beside the JSON file, and no path to elsewhere."""
    return isinstance(name, str) and name not in ("", ".", "..") and Path(name).name == name
