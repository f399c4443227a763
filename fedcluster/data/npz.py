"""Data sets as .npz files: plain arrays only, and no more of them than the file can hold."""

import math
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from fedcluster.errors import BadData
from fedcluster.inputs import check_size

NAMES = ("x_train", "y_train", "x_test", "y_test")
ONE_VALUE = ("target", "outputs", "vocabulary", "preparation")
OPTIONAL = ("device_train", "device_test", "target_scale", "said", *ONE_VALUE)
EXPANSION = 100  # times the size of the file, beyond
UNSUSPICIOUS = 2**30  # bytes


def read_npz(path: Path) -> dict[str, Any]:
    """The arrays of the file. Nothing in it is executed, and all sizes are checked before anything is allocated."""
    try:
        if path.exists() and not path.is_file():
            raise BadData(f"data.name: {path} is not a regular file")
        with path.open("rb") as file, zipfile.ZipFile(file) as entries:
            check_entries(path, entries)
            file.seek(0)
            with np.load(file, allow_pickle=False) as content:
                arrays = {name: content[name] for name in (*NAMES, *OPTIONAL) if name in content.files}
    except FileNotFoundError:
        raise BadData(f"data.name: there is no file {path}") from None
    except (BadData, MemoryError):
        raise
    except Exception as error:  # zip, header and dtype errors of a damaged or hostile file
        raise BadData(f"{path} cannot be read as an .npz of plain arrays ({error})") from None
    missing = [name for name in NAMES if name not in arrays]
    if missing:
        raise BadData(f"{path} lacks {', '.join(missing)}; an .npz needs {', '.join(NAMES)}")
    for name in ONE_VALUE:
        if name in arrays:
            if arrays[name].ndim:
                raise BadData(f"{path}: {name} must be one value, but has the shape {list(arrays[name].shape)}")
            arrays[name] = arrays[name].item()
    return arrays


def check_entries(path: Path, entries: zipfile.ZipFile) -> None:
    """A compressed file may unfold into a thousand times its size, and an array's header may promise anything."""
    unfolded = sum(entry.file_size for entry in entries.infolist())
    if unfolded > max(UNSUSPICIOUS, EXPANSION * path.stat().st_size):
        raise BadData(
            f"{path} would expand to {unfolded / 2**30:,.1f} GiB, more than {EXPANSION} times its size: save it with "
            "numpy.savez, uncompressed, if that is meant"
        )
    check_size(path, unfolded)
    for entry in entries.infolist():
        if entry.filename.endswith(".npy"):
            with entries.open(entry) as stream:
                check_header(path, entry, stream)


def check_header(path: Path, entry: zipfile.ZipInfo, stream: IO[bytes]) -> None:
    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(stream)
    if dtype.hasobject:
        raise BadData(f"{path} cannot be read as an .npz of plain arrays ({entry.filename} holds objects)")
    if math.prod(shape) * max(dtype.itemsize, 1) > entry.file_size:
        raise BadData(f"{path}: {entry.filename} says that it has the shape {list(shape)}, which is more than it holds")
