"""CSV and Parquet tables, read by column. Errors name the line or row."""

import csv
import math
import re
from collections import Counter
from copy import copy
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from fedcluster.errors import BadData
from fedcluster.inputs import check_size

PARQUET = b"PAR1"
MAX_COLUMNS = 100_000


class Table:
    """Columns of text or numbers. Values are checked for type and range when a column is read. If the table is a part
    of a file, `rows` are the numbers of its rows in the file."""

    def __init__(self, path: Path | str, content: bytes | pa.Table) -> None:
        self.path = path
        self.rows: NDArray[np.int64] | None = None
        self.csv = isinstance(content, bytes) and not content.startswith(PARQUET)
        self.data: Any = content
        try:
            if isinstance(content, bytes):
                self.data = read_csv(path, content) if self.csv else read_parquet(path, content)
            for number, field in enumerate(self.data.schema):
                if pa.types.is_dictionary(field.type) or pa.types.is_decimal(field.type):
                    plain = pa.float64() if pa.types.is_decimal(field.type) else field.type.value_type
                    self.data = self.data.set_column(number, field.name, self.data.column(number).cast(plain))
        except (BadData, MemoryError):
            raise
        except Exception as error:  # a damaged or hostile file may fail in any way
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise BadData(f"{path} cannot be read as a table ({reason[:120]})") from None
        names = self.data.column_names
        if len(set(names)) < len(names):
            raise BadData(f"{path} names the column {next(n for n in names if names.count(n) > 1)!r} twice")
        if self.data.num_rows == 0:
            raise BadData(f"{path} has no rows")

    def __len__(self) -> int:
        return int(self.data.num_rows)

    def __contains__(self, name: str) -> bool:
        return name in self.data.column_names

    def take(self, rows: NDArray[np.int64]) -> "Table":
        """The table of these rows. Messages still name rows by their numbers in the file."""
        part = copy(self)
        part.data, part.rows = self.data.take(pa.array(rows)), rows if self.rows is None else self.rows[rows]
        return part

    def where(self, row: int) -> str:
        """The file and line or row, for messages. In a CSV file, the first row is line 2, after the column names."""
        if self.rows is not None:
            row = int(self.rows[row])
        return f"{self.path}, line {row + 2}" if self.csv else f"{self.path}, row {row + 1}"

    def refuse(self, row: int, why: str) -> NoReturn:
        raise BadData(f"{self.where(row)}: {why}")

    def is_text(self, name: str) -> bool:
        kind = self.data.field(name).type
        return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))

    def is_whole(self, name: str) -> bool:
        """Whether the column holds integers, or text that is written as integers."""
        if not self.is_text(name):
            return bool(pa.types.is_integer(self.data.field(name).type))
        return all(re.fullmatch(r"[+-]?\d+", text, re.ASCII) for text in self.words(name)[1])

    def refuse_empty(self, name: str) -> None:
        """Refuse a column with an empty cell."""
        column = self.data.column(name)
        empty = pc.is_null(column).to_numpy()
        if self.is_text(name):
            empty |= self.words(name)[0] < 0
        if empty.any():
            self.refuse(int(empty.argmax()), f"{name} is empty: fill it in, or leave out the row")

    def words(self, name: str) -> tuple[NDArray[np.int64], list[str]]:
        """A column of text as (codes, texts): the text of row i is texts[codes[i]]. An empty cell has the code -1."""
        column = self.data.column(name)
        try:
            text = pc.utf8_trim_whitespace(column.cast(pa.string()))
        except pa.ArrowException:
            raise BadData(f"{self.path}: column {name} must be text, but is {column.type}") from None
        coded = pc.if_else(pc.equal(text, ""), None, text).combine_chunks().dictionary_encode()
        codes = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        return codes, coded.dictionary.to_pylist()

    def strings(self, name: str) -> list[str]:
        """A column of text, unchanged. No cell may be empty."""
        if not self.is_text(name):
            raise BadData(f"{self.path}: column {name} must be text, but is {self.data.field(name).type}")
        cells: list[str | None] = self.data.column(name).to_pylist()
        texts = [text for text in cells if text]
        if len(texts) < len(cells):
            self.refuse(next(row for row, text in enumerate(cells) if not text), f"{name} is empty")
        return texts

    def lists(self, name: str) -> NDArray[Any]:
        """A column of equally long lists of finite numbers, [rows, length]."""
        column = self.data.column(name).combine_chunks()
        self.refuse_empty(name)
        lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
        unequal = np.flatnonzero(lengths != lengths[0])
        if len(unequal):
            row = int(unequal[0])
            self.refuse(
                row, f"{name} has {lengths[row]} values, but {lengths[0]} in the first row: make them equally long"
            )
        values = column.flatten()
        try:
            if values.null_count or not int(lengths[0]):
                raise BadData(f"{self.path}: column {name} has lists with missing values")
            array = np.asarray(values.to_numpy(zero_copy_only=False))
            if array.dtype.kind not in "fiub" or not np.isfinite(array).all():
                raise BadData(f"{self.path}: column {name} must have lists of finite numbers, but has {values.type}")
        except pa.ArrowException:
            raise BadData(f"{self.path}: column {name} must have lists of numbers, but has {values.type}") from None
        return array.reshape(len(self), -1)

    def numbers(self, name: str, least: float = -math.inf, most: float = math.inf, gaps: bool = False) -> NDArray[Any]:
        """A column of finite numbers from `least` to `most`. With `gaps`, cells may be empty, and are NaN."""
        values = self.floats(name)
        if values is None:
            codes, texts = self.words(name)
            wrong = np.array([not is_number(text) for text in texts] + [False])[codes]
            if wrong.any():
                row = int(wrong.argmax())
                self.refuse(row, f"{name} {texts[codes[row]][:80]!r} is not a number")
            values = np.array([*map(float, texts), math.nan])[codes]
        empty = np.isnan(values)
        outside = ~np.isfinite(values) | (values < least) | (values > most)
        bad = np.flatnonzero(np.where(empty, not gaps, outside))
        if len(bad):
            row = int(bad[0])
            if empty[row]:
                self.refuse(row, f"{name} is empty: fill it in, or leave out the column")
            self.refuse(row, f"{name} {values[row]:g} is not allowed: {allowed_range(least, most)}")
        return values

    def floats(self, name: str) -> NDArray[np.float64] | None:
        """A column as float64, empty cells as NaN; None if some cell is not a number."""
        column = self.data.column(name)
        try:
            if self.is_text(name):
                text = pc.utf8_trim_whitespace(column)
                column = pc.if_else(pc.equal(text, ""), None, text)
            column = column.cast(pa.float64())
        except pa.ArrowException:
            return None
        return np.asarray(column.combine_chunks().to_numpy(zero_copy_only=False), dtype=np.float64)

    def times(self, name: str) -> NDArray[np.int64] | None:
        """A column of timestamps in milliseconds since 1970, in local time if they have no time zone; None if the
        column has no timestamps."""
        column = self.data.column(name)
        try:
            if pa.types.is_timestamp(column.type) and column.type.tz:
                column = column.cast(pa.timestamp("ms", "UTC"), safe=False)
            times = column.cast(pa.timestamp("ms"), safe=False).cast(pa.int64())
        except pa.ArrowException:
            return None
        if times.null_count:
            self.refuse(int(np.flatnonzero(pc.is_null(times).to_numpy())[0]), f"{name} is empty")
        return np.asarray(times.combine_chunks().to_numpy(zero_copy_only=False), dtype=np.int64)


def read_parquet(path: Path | str, content: bytes) -> Any:
    """A few bytes of Parquet can decode to very many rows, so the size is checked before decoding."""
    file = pq.ParquetFile(pa.BufferReader(content))
    rows, columns = file.metadata.num_rows, file.metadata.num_columns
    if columns > MAX_COLUMNS:
        raise BadData(f"{path} has {columns} columns: at most {MAX_COLUMNS} can be read")
    groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    check_size(path, max(rows * columns * 8, sum(group.total_byte_size for group in groups)))
    return file.read()


def read_csv(path: Path | str, content: bytes) -> Any:
    """Read every cell as text. Refuse a row with too few or too many cells by its line. Blank lines at the end are
    ignored."""
    content = content.removeprefix(b"\xef\xbb\xbf").rstrip() + b"\n"
    try:
        content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BadData(f"{path}, line {line}: not UTF-8 text") from None
    try:
        names = [name.strip() for name in next(csv.reader([content.split(b"\n", 1)[0].decode()]), [])]
    except csv.Error as error:
        raise BadData(f"{path}: the first line cannot be read ({error})") from None
    if len(names) > MAX_COLUMNS:
        raise BadData(f"{path} has {len(names)} columns: at most {MAX_COLUMNS} can be read")
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise BadData(f"{path}: the first line names the column {repeated[0]!r} twice")
    bad_rows: list[Any] = []

    def skip(row: Any) -> str:
        bad_rows.append(row)
        return "skip"

    table = pa_csv.read_csv(
        pa.BufferReader(content),
        read_options=pa_csv.ReadOptions(use_threads=False, column_names=names, skip_rows=1),
        parse_options=pa_csv.ParseOptions(invalid_row_handler=skip, ignore_empty_lines=False),
        convert_options=pa_csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
    )
    if bad_rows:
        row = bad_rows[0]
        raise BadData(
            f"{path}, line {row.number}: {row.actual_columns} cells, but the first line names {len(names)} columns"
        )
    return table


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text and text.isascii()


def allowed_range(least: float, most: float) -> str:
    if most == math.inf:
        return f"it must be at least {least:g}" if least > -math.inf else "it must be finite"
    return f"it must be from {least:g} to {most:g}"
