"""Data sources: open what `data.name` names as a `Dataset`.

Tables and pictures are decoded once into a cache of plain arrays ($FEDCLUSTER_CACHE, or the user's cache folder).
"""

import inspect
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from logging import CRITICAL
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedcluster.data import columns, disk, known, objects, text
from fedcluster.data.dataset import Dataset
from fedcluster.data.images import Folder
from fedcluster.data.known import KNOWN
from fedcluster.data.npz import read_npz
from fedcluster.data.split import test_rows
from fedcluster.data.tables import Table
from fedcluster.data.targets import PLURALS
from fedcluster.errors import BadData, BadRun
from fedcluster.experiment import WITH_DEVICES, Data, format_value, import_object, path_exists
from fedcluster.files import cache_folder, write_atomically
from fedcluster.inputs import located, read_bytes
from fedcluster.reporting import Say

TABLES = (".csv", ".parquet")
FOR_TABLES = ("features", "target", "device", "categories", "encoding", "tokenizer", "length")  # keys of [data]

Arrays = dict[str, Any]  # what `Dataset` is made from, by name


def open_device(data: Data, target: str | None, say: Say = print) -> Dataset:
    """The data of one device of a federation, whose classes are numbered as those of the other devices."""
    path = located(str(data.name), "data.name")
    files = files_in(path) if path.is_dir() else {"train": path} if path.suffix in TABLES else {}
    if files:
        read = {split: Table(file, read_bytes(file, "data.name")) for split, file in files.items()}
    elif path.is_dir() and disk.is_saved(path):
        read = disk.saved_tables(path)
    else:
        if path.is_dir() and data.name not in KNOWN:
            Folder(path).check_numbered()
        return open_dataset(data, say, target)
    arrays = columns.arrays(read, data, target, say, whole_fleet=False)
    return Dataset(**arrays, name=path.name)


def open_for_scores(data: Data, say: Say, target: str | None) -> Dataset:
    """Data that a trained model is scored on: every row of a lone table, else the test part."""
    path = located(str(data.name), "data.name")
    if path.suffix not in TABLES or not path_exists(path):
        try:
            return open_dataset(data, say, target)
        except NotATable as error:
            raise BadData(f"{error.source} gives arrays, but the columns of a table are needed: name a table") from None
    table = Table(path, read_bytes(path, "data.name"))
    if data.device is not None and data.device not in table:
        data = data.model_copy(update={"device": None})  # whose a row is does not matter
    said = set[str]()

    def say_once(text: str) -> None:
        """What is said of the training part is said of the test part, too."""
        if text not in said:
            said.add(text)
            say(text)

    arrays = columns.arrays({"train": table, "test": table}, data, target, say_once, whole_fleet=False)
    return Dataset(**arrays, name=path.name)


def open_dataset(data: Any, say: Say = print, target: str | None = None) -> Dataset:
    """Open the data set of a [data] section, or of a `data.name`. `say` prints a line. `target` is the kind of targets
    that the task takes, if the experiment names a task."""
    if not isinstance(data, Data):
        data = Data(name=data)
    name = data.name
    if isinstance(name, str):
        return named(name, data, target, say)
    if isinstance(name, Dataset):
        refuse_columns(data, name.name)
        return name
    if objects.is_data(name):
        return given(name, data, target, say)
    if callable(name):
        refuse_columns(data, getattr(name, "__name__", "data"))
        function = getattr(name, "__name__", "data")
        return checked(called(name, function), function)
    raise BadData(
        "data.name must be a name, a path, a function, a Dataset, a datasets.Dataset, a torch Dataset, a table, a data "
        f"frame or arrays by name, not {type(name).__name__}"
    )


def named(name: str, data: Data, target: str | None, say: Say) -> Dataset:
    if name == WITH_DEVICES:
        raise BadData('data.name = "devices" leaves the data with the devices of a federation: use fedcluster serve')
    if name == "digits":
        refuse_columns(data, name)
        return Dataset(**digits(), name="digits")
    found = next((each for key, each in KNOWN.items() if name in (key, each.hub)), None)
    path = located(name, "data.name")
    if found is not None:
        return Dataset(**from_known(name, found, known.completed(data, found), target, say), name=name)
    if path.suffix == ".npz":
        refuse_columns(data, path.name)
        return described_arrays(Dataset(**read_npz(path), name=path.name), say)
    if path_exists(path):
        return Dataset(**local(path, data, target, say), name=path.name)
    if ":" in name:
        refuse_columns(data, name)
        return checked(called(import_object(name), name), name)
    if path.suffix or name.startswith(("/", ".", "~")):
        raise BadData(f"data.name: there is no file or folder {name}")
    if files := data_folder(name):
        return Dataset(**tables(files, data, target, say), name=name)
    if not re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", name, re.ASCII):
        names = list(dict.fromkeys(("digits", *KNOWN, *folders())))
        raise BadData(
            f"data.name = {format_value(name)} is neither a known name ({', '.join(names)}), a file or folder, nor "
            f"a Hugging Face id (owner/name){known.meant(name, names)}"
        )
    arrays = cached(described(f"hub {name}", data, target), lambda heard: from_hub(name, data, target, heard), say)
    return Dataset(**arrays, name=name)


class NotATable(BadData):
    """Keys of [data] that only tables have are given for arrays."""

    def __init__(self, key: str, source: str) -> None:
        super().__init__(f"data.{key} is for tables, and {source} gives arrays: leave it out")
        self.source = source


def refuse_columns(data: Data, source: str) -> None:
    """Refuse the keys of [data] that only tables have."""
    for key in (*FOR_TABLES, "split", "standardise"):
        if getattr(data, key) not in (None, False):
            raise NotATable(key, source)


def called(function: Any, name: str) -> Any:
    """What a function of the user's returns."""
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        needed = "a function without arguments that returns a fedcluster.Dataset"
        raise BadData(f"data.name: {name} must be {needed}") from None
    return function()


def checked(dataset: Any, name: str) -> Dataset:
    if not isinstance(dataset, Dataset):
        raise BadData(f"data.name: {name} must return a fedcluster.Dataset, not {type(dataset).__name__}")
    return dataset


def digits() -> Arrays:
    """1797 handwritten digits of 8x8 pixels, of which a fixed fifth is held out: the test part of UCI's "Optical
    Recognition of Handwritten Digits" (Alpaydin, Kaynak 1998; CC BY 4.0), as scikit-learn's load_digits has it."""
    with np.load(Path(__file__).parent / "digits.npz") as file:
        x, y = file["x"], file["y"]
    return hold_out({"x_train": x[:, None] / 16, "y_train": y.astype(np.int64)}, None)


def hold_out(arrays: Arrays, share: float | None) -> Arrays:
    """Hold out a fixed share of the rows as the test part, by default a fifth."""
    chosen = test_rows(len(arrays["y_train"]), 0.2 if share is None else share)
    by_row = {key: values for key, values in arrays.items() if np.ndim(values) and len(values) == len(chosen)}
    kept = {key: values[~chosen] for key, values in by_row.items()}
    return arrays | kept | {"x_test": arrays["x_train"][chosen], "y_test": arrays["y_train"][chosen]}


def given(thing: Any, data: Data, target: str | None, say: Say) -> Dataset:
    """Open data that are given as a Python object."""
    parts = objects.splits_of(thing)
    found = objects.tables_of(parts)
    if found is not None:
        return Dataset(**columns.arrays(found, data, target, say), name=type(thing).__name__)
    refuse_columns(data.model_copy(update={"split": None}), "data.name")
    arrays = objects.arrays_of(parts)
    if "x_test" not in arrays:
        if isinstance(data.split, str):
            raise BadData(
                f"data.split = {data.split!r}, but data.name gives arrays, which have no columns: give a share"
            )
        arrays = with_test_part(arrays, "data.name", say, data.split)
    return described_arrays(Dataset(**arrays, name=type(thing).__name__), say)


def described_arrays(dataset: Dataset, say: Say) -> Dataset:
    """Say what arrays were taken for."""
    values = {torch.uint8: "bytes", torch.int64: f"token ids, of {dataset.vocabulary:,}"}
    what = values.get(dataset.x_train.dtype, "numbers, as they are")
    outputs = f"{dataset.outputs} {PLURALS[dataset.target]}" if dataset.target != "token" else PLURALS["token"]
    devices = "" if dataset.device_train is None else f"; {len(np.unique(dataset.device_train)):,} devices"
    say(f"{dataset.name}: samples {list(dataset.shape)} of {what}; target: {outputs}{devices}")
    return dataset


def from_known(name: str, found: known.Known, data: Data, target: str | None, say: Say) -> Arrays:
    """$FEDCLUSTER_DATA/<name>/{train,test}.parquet when that is there, else the hub."""
    if files := data_folder(name):
        return tables(files, data, target, say, found.prepare)
    key = described(f"hub {found.hub}", data, target)
    return cached(key, lambda heard: from_hub(found.hub, data, target, heard, found.prepare), say)


def data_folder(name: str) -> dict[str, Path]:
    """The files of $FEDCLUSTER_DATA/<name>, if there are such."""
    root = os.environ.get("FEDCLUSTER_DATA")
    files = files_in(Path(root, name)) if root else {}
    return files if "train" in files else {}


def folders() -> list[str]:
    """The names of the folders in $FEDCLUSTER_DATA."""
    root = os.environ.get("FEDCLUSTER_DATA")
    with suppress(OSError):
        return [path.name for path in Path(root).iterdir() if files_in(path)] if root else []
    return []


def files_in(folder: Path) -> dict[str, Path]:
    """{train,test}.csv or .parquet in a folder."""
    for suffix in TABLES:
        files = {split: folder / f"{split}{suffix}" for split in ("train", "test")}
        if path_exists(files["train"]):
            return {split: file for split, file in files.items() if path_exists(file)}
    return {}


def local(path: Path, data: Data, target: str | None, say: Say) -> Arrays:
    """A CSV or Parquet file, a folder of {train,test}.csv or .parquet, a folder that datasets.save_to_disk wrote, or a
    folder with one folder of pictures a class."""
    if not path.is_dir():
        if path.suffix not in TABLES:
            raise BadData(f"{path}: a data file is .npz, {' or '.join(TABLES)}")
        return tables({"train": path}, data, target, say)
    if files := files_in(path):
        return tables(files, data, target, say)
    if disk.is_saved(path):
        return columns.arrays(disk.saved_tables(path), data, target, say)
    refuse_columns(data.model_copy(update={"split": None}), f"the folder of pictures {path}")
    pictures, share = Folder(path), data.split
    if isinstance(share, str):
        raise BadData(f"data.split = {share!r}, but {path} is a folder of pictures, without columns: give a share")
    key = f"folder {path} {pictures.digest()} {share}"
    return cached(key, lambda heard: with_test_part(pictures.arrays(heard), path, heard, share), say)


def with_test_part(arrays: Arrays, source: Any, say: Say, share: float | None) -> Arrays:
    """Hold out a test part if there is none."""
    if "y_test" in arrays:
        if share is not None:
            raise BadData(f"data.split = {share}, but {source} has a test part: leave it out")
        return arrays
    part = "fifth" if share is None else format(share, ".0%")
    say(f"{source} has no test split: a fixed {part} of its rows is held out")
    return hold_out(arrays, share)


def tables(
    files: dict[str, Path],
    data: Data,
    target: str | None,
    say: Say,
    prepare: Callable[[Table], Table] = lambda table: table,
) -> Arrays:
    """Read tables. They are cached by content, because the name and the date of a file do not identify it. The name is
    in the key because it is in the lines that are printed again."""
    contents = {split: read_bytes(file, "data.name") for split, file in files.items()}
    key = "\n".join(f"{split} {files[split]} {sha256(content).hexdigest()}" for split, content in contents.items())

    def decode(heard: Say) -> Arrays:
        read = {split: prepare(Table(files[split], content)) for split, content in contents.items()}
        return columns.arrays(read, data, target, heard)

    return cached(described(f"tables {key}", data, target), decode, say)


def moments(data: Data, target: str | None) -> dict[str, tuple[float, float, float]]:
    """The moments of the columns of numbers in a device's table, by name; BadData if devices could encode the columns
    differently."""
    path = located(str(data.name), "data.name")
    files = files_in(path) if path.is_dir() else {"train": path}
    if not files or files["train"].suffix not in TABLES:
        raise BadData(f"{path} is not a table, so it has no columns to describe")
    read = {split: Table(file, read_bytes(file, "data.name")) for split, file in files.items()}
    columns.check_shared(read["train"], data, target)
    return columns.moments(read, data, target)


def described(source: str, data: Data, target: str | None) -> str:
    """The key in the cache: the source and the keys of [data] that change the arrays."""
    keys = {key: value for key, value in data if key != "name" and value is not None}
    if data.tokenizer not in (None, "characters", "bytes"):
        path = located(str(data.tokenizer), "data.tokenizer")
        file = path / "tokenizer.json" if path.is_dir() else path
        files = [one for one in (file, file.with_name(text.CONFIG)) if path_exists(one)]
        keys["tokenizer"] = [sha256(read_bytes(one, "data.tokenizer")).hexdigest() for one in files]
    return json.dumps([source, keys, target], sort_keys=True)


def from_hub(
    name: str, data: Data, target: str | None, say: Say, prepare: Callable[[Table], Table] = lambda table: table
) -> Arrays:
    """Read with Hugging Face `datasets`, which caches what it downloads."""
    with quiet_datasets() as datasets:
        say(f"fetching {name} from the Hugging Face hub, once{known.meant(name, [], least=0.9)}")
        try:
            parts = objects.splits_of(datasets.load_dataset(name))
            read = {
                split: Table(name, datasets.table.embed_table_storage(rows.with_format("arrow")[:]))
                for split, rows in parts.items()
            }
        except BadData:
            raise
        except Exception as error:  # the library raises its own kind for each way that this can fail
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise BadData(
                f"cannot load {name} ({reason}); check the name and the network, or put "
                "{train,test}.parquet into $FEDCLUSTER_DATA/<name>/ or give a path" + known.meant(name, folders())
            ) from None
    return columns.arrays({split: prepare(table) for split, table in read.items()}, data, target, say)


def cached(key: str, make: Callable[[Say], Arrays], say: Say) -> Arrays:
    """Arrays from the cache. If they are not there, or their file is damaged, they are made under a lock. The lines
    that are printed meanwhile are stored with them and printed again."""
    from filelock import FileLock

    with ExitStack() as locked:
        try:
            digest = sha256(f"{readers_version()}\n{key}".encode()).hexdigest()
            path = cache_folder() / f"{digest[:32]}.npz"
            if path.exists():  # then it was written whole, and nothing is to be written
                with suppress(BadData):
                    return said_again(read_npz(path), say)
            path.parent.mkdir(parents=True, exist_ok=True)
            locked.enter_context(FileLock(f"{path}.lock"))
        except OSError as error:
            raise unwritable(error) from None
        if path.exists():
            try:
                return said_again(read_npz(path), say)
            except BadData as error:
                say(f"{error}; decoding again")
        lines: list[str] = []

        def heard(line: str) -> None:
            lines.append(line)
            say(line)

        arrays = make(heard)
        kept = arrays | {"said": np.array([line for line in lines if not line.startswith(PASSING)], str)}
        try:
            write_atomically(path, lambda file: np.savez(file, **kept))
        except OSError as error:
            raise unwritable(error) from None
        return arrays


@cache
def readers_version() -> str:
    """A fingerprint of the code that reads data: arrays that other code has made are not used."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return sha256(b"".join([version("fedcluster").encode(), *(file.read_bytes() for file in sources)])).hexdigest()


PASSING = ("decoding: ", "fetching ")  # beginnings of progress lines, which are not stored


def said_again(arrays: Arrays, say: Say) -> Arrays:
    for line in arrays.pop("said", np.array([], str)).tolist():
        say(line)
    return arrays


def unwritable(error: OSError) -> BadRun:
    where = f"the cache cannot be written ({error.filename or 'no folder'}: {error.strerror or error})"
    return BadRun(f"{where}: set FEDCLUSTER_CACHE to a folder that can, with room for the decoded data")


@contextmanager
def quiet_datasets() -> Iterator[Any]:
    """Import `datasets` without its progress bars and warnings; we print our own lines."""
    import datasets
    from huggingface_hub.utils import logging as hub_logging

    loggers = (datasets.logging, hub_logging)
    before = [logger.get_verbosity() for logger in loggers]
    datasets.disable_progress_bars()
    for logger in loggers:
        logger.set_verbosity(CRITICAL)
    try:
        yield datasets
    finally:
        for logger, verbosity in zip(loggers, before, strict=True):
            logger.set_verbosity(verbosity)
        datasets.enable_progress_bars()
