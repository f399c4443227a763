"""Images as bytes [rows, channels, height, width], from a column of a table or a folder with a subfolder per class."""

import time
from collections.abc import Callable, Collection, Iterator
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from fedcluster.errors import BadData
from fedcluster.inputs import check_size, read_bytes

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")  # decoded without running another program
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm", ".pnm"}
ORIENTATION = 0x0112  # EXIF tag
REPORT_EVERY = 2.0  # seconds


def stacked(
    contents: Collection[bytes | Path | None], source: Any, say: Callable[[str], None] = print
) -> NDArray[np.uint8]:
    """Images of one size, each given as the bytes of its file or as its path. `say` receives the progress."""
    stack: NDArray[np.uint8] | None = None
    mode, reported = "L", time.monotonic()
    for i, content in enumerate(contents):
        if time.monotonic() - reported >= REPORT_EVERY:
            reported = time.monotonic()
            say(f"decoding: {i:,} of {len(contents):,} pictures")
        picture = decoded(content, f"{source}: picture {i}")
        if stack is None:
            mode = "RGB" if np.asarray(picture).ndim == 3 else "L"
            shape = np.asarray(picture.convert(mode)).shape
            check_size(Path(str(source)), len(contents) * int(np.prod(shape)))
            stack = np.empty((len(contents), *shape), np.uint8)
        values = np.asarray(picture.convert(mode))
        if values.shape != stack.shape[1:]:
            raise BadData(
                f"{source}: picture {i} is {values.shape}, but the first is {stack.shape[1:]}; resize them to one size"
            )
        stack[i] = values
    if stack is None:
        raise BadData(f"{source} has no pictures")
    return np.moveaxis(stack, 3, 1) if stack.ndim == 4 else stack[:, None]


def decoded(content: bytes | Path | None, where: str) -> Image.Image:
    if content is None:
        raise BadData(f"{where} is missing: the table must hold its bytes")
    if isinstance(content, Path):
        where, content = str(content), read_bytes(content, "data.name")
    try:
        picture: Image.Image = Image.open(BytesIO(content), formats=FORMATS)
        picture.load()
        if picture.getexif().get(ORIENTATION) is not None:
            picture = ImageOps.exif_transpose(picture)
        return picture
    except MemoryError:
        raise
    except Exception as error:  # a damaged or hostile file may raise anything
        raise BadData(f"{where} cannot be decoded ({str(error)[:120] or type(error).__name__})") from None


class Folder:
    """Images in one folder per class, either directly or inside the folders `train` and `test`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        splits = {split: path / split for split in ("train", "test")}
        self.splits = splits if splits["train"].is_dir() else {"train": path}
        self.files = {split: list(pictures_in(folder)) for split, folder in self.splits.items()}
        if not self.files["train"]:
            raise BadData(
                f"{path} has neither train.csv nor train.parquet nor a folder of pictures "
                f"({', '.join(sorted(SUFFIXES))}) for each class"
            )

    def digest(self) -> str:
        """A hash of the names and contents of all files."""
        digest = sha256()
        for split, files in self.files.items():
            for file in files:
                content = sha256(read_bytes(file, "data.name")).hexdigest()
                digest.update(f"{split}/{file.parent.name}/{file.name}\n{content}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def classes(self) -> list[str]:
        """The names of the folders: numbers in the order of numbers, else in that of texts."""
        names = {file.parent.name for files in self.files.values() for file in files}
        numeric = all(name.isdecimal() and name.isascii() for name in names)
        return sorted(names, key=int) if numeric else sorted(names)

    def check_numbered(self) -> None:
        """Refuse folders that a device of a federation may number differently from other devices."""
        names = self.classes()
        if names != [str(k) for k in range(len(names))]:
            raise BadData(
                f"{self.path}: the folders {', '.join(names[:3])} ... are numbered in their order, and devices of a "
                "federation must number classes in the same way: name them 0, 1, 2, ... without gaps, or use a table"
            )

    def arrays(self, say: Callable[[str], None] = print) -> dict[str, Any]:
        number = {name: k for k, name in enumerate(self.classes())}
        arrays: dict[str, Any] = {}
        for split, files in self.files.items():
            arrays[f"x_{split}"] = stacked(files, self.splits[split], say)
            arrays[f"y_{split}"] = np.array([number[file.parent.name] for file in files])
        return arrays


def pictures_in(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        raise BadData(f"{folder} is not a folder of pictures")
    for path in sorted(folder.glob("*/*"), key=str):
        if path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and not path.parent.name.startswith("."):
            yield path
