"""Where a dataset comes from: the name, id, path or code of `data.name` becomes a `Dataset`.

Pictures are decoded once into a cache of plain arrays ($FEDCLUSTER_CACHE, or the user's cache folder).
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from importlib.metadata import version
from logging import CRITICAL
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcluster.dataset import Dataset
from fedcluster.errors import BadData
from fedcluster.experiment import WITH_DEVICES, found
from fedcluster.files import write_atomically
from fedcluster.rng import stream

HUB = {"mnist": "ylecun/mnist", "fashion_mnist": "zalando-datasets/fashion_mnist", "cifar10": "uoft-cs/cifar10"}
LABELS = ("label", "labels", "target", "class", "y")
TABLES = {".csv": "csv", ".parquet": "parquet"}
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
        return Dataset(**cached(f"digits {version('scikit-learn')}", digits, say), name="digits")
    path = Path(name).expanduser()
    if path.suffix == ".npz":
        return Dataset(**read_npz(path), name=path.name)
    if name in HUB:
        return Dataset(**known(name, say), name=name)
    if path.exists():
        return Dataset(**local(path, say), name=path.name)
    if ":" in name:
        return checked(found(name)(), name)
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


def read_npz(path: Path) -> Arrays:
    """Plain arrays only: nothing in the file is ever executed."""
    names = ("x_train", "y_train", "x_test", "y_test")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as content:
            arrays = {name: content[name] for name in (*names, "device_train") if name in content.files}
    except FileNotFoundError:
        raise BadData(f"data.name: there is no file {path}") from None
    except Exception as error:  # zip, header and dtype errors of a damaged or hostile file
        raise BadData(f"{path} cannot be read as an .npz of plain arrays ({error})") from None
    missing = [name for name in names if name not in arrays]
    if missing:
        raise BadData(f"{path} lacks {', '.join(missing)}; an .npz needs {', '.join(names)}")
    return arrays


def known(name: str, say: Say) -> Arrays:
    """$FEDCLUSTER_DATA/<name>/{train,test}.parquet when that is there, else the hub."""
    root = os.environ.get("FEDCLUSTER_DATA")
    files = {split: Path(root, name, f"{split}.parquet") for split in ("train", "test")} if root else {}
    if files and all(file.exists() for file in files.values()):
        return tables("parquet", files, say)
    return cached(HUB[name], lambda: from_hub(HUB[name], say), say)


def local(path: Path, say: Say) -> Arrays:
    """A CSV or Parquet file, a folder of {train,test}.csv or .parquet, or a folder with one folder a class."""
    if path.is_file():
        if path.suffix not in TABLES:
            raise BadData(f"{path}: a data file is .npz, {' or '.join(TABLES)}")
        return tables(TABLES[path.suffix], {"train": path}, say)
    for suffix, kind in TABLES.items():
        files = {split: path / f"{split}{suffix}" for split in ("train", "test")}
        if files["train"].exists():
            return tables(kind, {split: file for split, file in files.items() if file.exists()}, say)
    key = "\n".join(f"{file} {file.stat().st_mtime_ns}" for file in sorted(path.rglob("*")))
    return cached(key, lambda: load("imagefolder", say, data_dir=str(path)), say)


def tables(kind: str, files: dict[str, Path], say: Say) -> Arrays:
    key = "\n".join(f"{file.resolve()} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files.values())
    return cached(key, lambda: load(kind, say, data_files={s: str(f) for s, f in files.items()}), say)


def from_hub(name: str, say: Say) -> Arrays:
    say(f"fetching {name} from the Hugging Face hub, once")
    return load(name, say)


def load(what: str, say: Say, **options: Any) -> Arrays:
    """Read with Hugging Face `datasets` and decode into arrays."""
    with quiet_datasets() as datasets:
        source = next(iter(options.values()), what)
        try:
            splits = datasets.load_dataset(what, **options)
        except Exception as error:  # the library raises its own kind for each way that this can fail
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise BadData(
                f"cannot load {source} ({reason}); check the name and the network, or put "
                "{train,test}.parquet into $FEDCLUSTER_DATA/<name>/ or give a path"
            ) from None
        train = splits["train"] if "train" in splits else splits[next(iter(splits))]
        test = next((splits[name] for name in ("test", "validation", "valid") if name in splits), None)
        label = label_column(train, source)
        names = label_names(train, test, label)
        arrays = dict(zip(("x_train", "y_train"), decode(train, label, names, source), strict=True))
        if "device" in train.column_names:
            arrays["device_train"] = np.asarray(train["device"])
        if test is None:
            say(f"{source} has no test split: a fixed fifth of its rows is held out")
            return hold_out(arrays)
        arrays |= dict(zip(("x_test", "y_test"), decode(test, label, names, source), strict=True))
        return arrays


def label_column(rows: Any, source: Any) -> str:
    import datasets

    classes = [name for name, kind in rows.features.items() if isinstance(kind, datasets.ClassLabel)]
    for name in (*LABELS, *classes):
        if name in rows.column_names:
            return str(name)
    raise BadData(f"{source} has no label column among {', '.join(rows.column_names)}; name it 'label'")


def label_names(train: Any, test: Any, label: str) -> list[Any] | None:
    """The sorted values of labels that are not numbered from 0 already."""
    values = set(train.unique(label)) | (set(test.unique(label)) if test is not None else set())
    if all(isinstance(value, int) and value >= 0 for value in values):
        return None
    return sorted(values, key=lambda value: (str(type(value)), value))


def decode(rows: Any, label: str, names: list[Any] | None, source: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Pictures as bytes [N, channels, height, width]; a table's other numeric columns as features."""
    import datasets

    y = rows[label][:]
    targets = np.asarray(y if names is None else [names.index(value) for value in y])
    pictures = [name for name, kind in rows.features.items() if isinstance(kind, datasets.Image)]
    if not pictures:
        numbers = [
            name
            for name, kind in rows.features.items()
            if name not in (label, "device") and str(getattr(kind, "dtype", "")).startswith(("int", "uint", "float"))
        ]
        if not numbers:
            raise BadData(f"{source} has no picture column and no numeric column beside {label}")
        return np.stack([np.asarray(rows[name]) for name in numbers], axis=1), targets
    first = np.asarray(rows[0][pictures[0]])
    mode = "RGB" if first.ndim == 3 else "L"
    x = np.empty((len(rows), *first.shape), np.uint8)
    from fedcluster.display import tracked

    for i, row in enumerate(tracked(rows.select_columns(pictures[0]), "decoding", "pictures")):
        picture = np.asarray(row[pictures[0]].convert(mode))
        if picture.shape != first.shape:
            raise BadData(
                f"{source}: picture {i} is {picture.shape} and the first is {first.shape}; bring them to one size"
            )
        x[i] = picture
    return (np.moveaxis(x, 3, 1) if x.ndim == 4 else x[:, None]), targets


def cached(key: str, make: Callable[[], Arrays], say: Say) -> Arrays:
    """Arrays from the cache, made under a lock when they are not there yet; a damaged file is made again."""
    from filelock import FileLock

    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{sha256(key.encode()).hexdigest()[:32]}.npz"
    with FileLock(f"{path}.lock"):
        if path.exists():
            try:
                return read_npz(path)
            except BadData as error:
                say(f"{error}; decoding again")
        arrays = make()
        write_atomically(path, lambda file: np.savez(file, **arrays))
        return arrays


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


def cache_folder() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fedcluster"
    return Path(os.environ.get("FEDCLUSTER_CACHE", default))
