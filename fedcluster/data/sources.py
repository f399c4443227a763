"""Where a dataset comes from: the name, id, path or code of `data.name` becomes a `Dataset`.

Pictures are decoded once into a cache of plain arrays ($FEDCLUSTER_CACHE, or the user's cache folder).
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from importlib.metadata import version
from logging import CRITICAL
from pathlib import Path
from typing import Any

import numpy as np

from fedcluster.data import columns
from fedcluster.data.dataset import Dataset
from fedcluster.data.images import Folder
from fedcluster.data.npz import read_npz
from fedcluster.data.tables import Table
from fedcluster.errors import BadData, BadRun
from fedcluster.experiment import WITH_DEVICES, import_object, shown, there_is
from fedcluster.files import cache_folder, write_atomically
from fedcluster.inputs import located, read_bytes
from fedcluster.rng import stream

HUB = {"mnist": "ylecun/mnist", "fashion_mnist": "zalando-datasets/fashion_mnist", "cifar10": "uoft-cs/cifar10"}
TABLES = (".csv", ".parquet")
HELD_OUT = 0.2

Arrays = dict[str, Any]  # x_train, y_train, x_test, y_test, perhaps device_train
Say = Callable[[str], None]


def open_dataset(name: Any, say: Say = print) -> Dataset:
    """The data set that `data.name` stands for. `say` receives what a person should know."""
    if isinstance(name, Dataset):
        return name
    if callable(name):
        return checked(name(), getattr(name, "__name__", "data"))
    if not isinstance(name, str):
        raise BadData(f"data.name must be a name, a path, a function or a Dataset, not {type(name).__name__}")
    if name == WITH_DEVICES:
        raise BadData('data.name = "devices" leaves the data with the devices of a federation: use fedcluster serve')
    if name == "digits":
        return Dataset(**cached(f"digits {version('scikit-learn')}", digits, say, needed=False), name="digits")
    path = located(name, "data.name")
    if path.suffix == ".npz":
        return Dataset(**read_npz(path), name=path.name)
    if name in HUB:
        return Dataset(**known(name, say), name=name)
    if there_is(path):
        return Dataset(**local(path, say), name=path.name)
    if ":" in name:
        return checked(import_object(name)(), name)
    if path.suffix or name.startswith(("/", ".", "~")):
        raise BadData(f"data.name: there is no file or folder {name}")
    return Dataset(**cached(name, lambda: from_hub(name, say), say), name=name)


def checked(dataset: Any, name: str) -> Dataset:
    if not isinstance(dataset, Dataset):
        raise BadData(f"data.name: {name} must return a fedcluster.Dataset, not {type(dataset).__name__}")
    return dataset


def digits() -> Arrays:
    """The 1797 8x8 digits of scikit-learn, a fifth of them held out: needs no network."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return hold_out({"x_train": (x / 16).reshape(-1, 1, 8, 8), "y_train": y})


def hold_out(arrays: Arrays) -> Arrays:
    """Where no test split is given, a fixed fifth of the rows, the same for every seed."""
    order = stream(0, "hold_out").permutation(len(arrays["y_train"]))
    cut = max(1, round(HELD_OUT * len(order)))
    test, train = np.sort(order[:cut]), np.sort(order[cut:])
    kept = {key: values[train] for key, values in arrays.items()}
    return kept | {"x_test": arrays["x_train"][test], "y_test": arrays["y_train"][test]}


def known(name: str, say: Say) -> Arrays:
    """$FEDCLUSTER_DATA/<name>/{train,test}.parquet when that is there, else the hub."""
    root = os.environ.get("FEDCLUSTER_DATA")
    files = {split: Path(root, name, f"{split}.parquet") for split in ("train", "test")} if root else {}
    if files and all(file.exists() for file in files.values()):
        return tables(files, say)
    return cached(HUB[name], lambda: from_hub(HUB[name], say), say)


def local(path: Path, say: Say) -> Arrays:
    """A CSV or Parquet file, a folder of {train,test}.csv or .parquet, or a folder with one folder a class."""
    if not path.is_dir():
        if path.suffix not in TABLES:
            raise BadData(f"{path}: a data file is .npz, {' or '.join(TABLES)}")
        return tables({"train": path}, say)
    for suffix in TABLES:
        files = {split: path / f"{split}{suffix}" for split in ("train", "test")}
        if files["train"].exists():
            return tables({split: file for split, file in files.items() if file.exists()}, say)
    pictures = Folder(path)
    return cached(f"folder {pictures.digest()}", lambda: whole(pictures.arrays(say), path, say), say)


def tables(files: dict[str, Path], say: Say) -> Arrays:
    """Tables are cached by their content: neither a file's name nor its date tells what is in it."""
    contents = {split: read_bytes(file, "data.name") for split, file in files.items()}
    key = "\n".join(f"{split} {sha256(content).hexdigest()}" for split, content in contents.items())

    def decode() -> Arrays:
        train, test = (Table(files[s], contents[s]) if s in files else None for s in ("train", "test"))
        assert train is not None
        return whole(columns.arrays(train, test, say), train.path, say)

    return cached(f"tables {key}", decode, say)


def from_hub(name: str, say: Say) -> Arrays:
    """Read with Hugging Face `datasets`, which keeps a copy of what it fetches."""
    with quiet_datasets() as datasets:
        if (
            not re.fullmatch(r"[\w.-]{1,96}(/[\w.-]{1,96})?", name, re.ASCII)
            or name in datasets.packaged_modules._PACKAGED_DATASETS_MODULES
        ):
            raise BadData(f"data.name = {shown(name)} is neither a known name, a file or folder, nor a Hugging Face id")
        say(f"fetching {name} from the Hugging Face hub, once")
        try:
            splits = datasets.load_dataset(name)
            found = {
                split: Table(name, datasets.table.embed_table_storage(rows.with_format("arrow")[:]))
                for split, rows in splits.items()
            }
        except BadData:
            raise
        except Exception as error:  # the library raises its own kind for each way that this can fail
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise BadData(
                f"cannot load {name} ({reason}); check the name and the network, or put "
                "{train,test}.parquet into $FEDCLUSTER_DATA/<name>/ or give a path"
            ) from None
    train = found.get("train", next(iter(found.values())))
    test = next((found[name] for name in ("test", "validation", "valid") if name in found), None)
    return whole(columns.arrays(train, test, say), name, say)


def whole(arrays: Arrays, source: Any, say: Say) -> Arrays:
    """With a test split, held out where there is none."""
    if "y_test" in arrays:
        return arrays
    say(f"{source} has no test split: a fixed fifth of its rows is held out")
    return hold_out(arrays)


def cached(key: str, make: Callable[[], Arrays], say: Say, needed: bool = True) -> Arrays:
    """Arrays from the cache, made under a lock when they are not there yet; a damaged file is made again. Where the
    cache is not `needed`, because making them is quick, they are also made when it cannot be written."""
    from filelock import FileLock

    with ExitStack() as locked:
        try:
            path = cache_folder() / f"{sha256(key.encode()).hexdigest()[:32]}.npz"
            if path.exists():  # then it was written whole, and nothing is to be written
                with suppress(BadData):
                    return read_npz(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            locked.enter_context(FileLock(f"{path}.lock"))
        except OSError as error:
            if needed:
                raise unwritable(error) from None
            return make()
        if path.exists():
            try:
                return read_npz(path)
            except BadData as error:
                say(f"{error}; decoding again")
        arrays = make()
        try:
            write_atomically(path, lambda file: np.savez(file, **arrays))
        except OSError as error:
            if needed:
                raise unwritable(error) from None
        return arrays


def unwritable(error: OSError) -> BadRun:
    where = f"the cache cannot be written ({error.filename or 'no folder'}: {error.strerror or error})"
    return BadRun(f"{where}: set FEDCLUSTER_CACHE to a folder that can, with room for the decoded data")


@contextmanager
def quiet_datasets() -> Iterator[Any]:
    """The library without its progress bars and warnings: what it does is said by us."""
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
