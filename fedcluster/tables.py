"""Tables that people hand over, CSV or Parquet: read by column, and what is wrong is named by line."""

import csv
import math
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from fedcluster.errors import BadData

PARQUET = b"PAR1"


class Table:
    """Columns of text or numbers. Nothing in them is believed before it was asked for by kind and range."""

    def __init__(self, path: Path, content: bytes) -> None:
        self.path = path
        self.parquet = content.startswith(PARQUET)
        try:
            self.data = pq.read_table(pa.BufferReader(content)) if self.parquet else read_csv(path, content)
        except (pa.ArrowException, OSError) as error:
            raise BadData(f"{path} cannot be read as a table ({str(error).splitlines()[0][:120]})") from None
        if self.data.num_rows == 0:
            raise BadData(f"{path} has no rows")

    def __len__(self) -> int:
        return int(self.data.num_rows)

    def __contains__(self, name: str) -> bool:
        return name in self.data.column_names

    def where(self, row: int) -> str:
        """Where a person finds this row: in a CSV file the first is line 2, after the names of the columns."""
        return f"{self.path}, row {row + 1}" if self.parquet else f"{self.path}, line {row + 2}"

    def refuse(self, row: int, why: str) -> NoReturn:
        raise BadData(f"{self.where(row)}: {why}")

    def words(self, name: str) -> tuple[NDArray[np.int64], list[str]]:
        """A column of text as (codes, texts): the row's text is texts[code], -1 where it is empty."""
        column = self.data.column(name)
        try:
            text = pc.utf8_trim_whitespace(column.cast(pa.string()))
        except pa.ArrowException:
            raise BadData(f"{self.path}: column {name} must be text, but is {column.type}") from None
        coded = pc.if_else(pc.equal(text, ""), None, text).combine_chunks().dictionary_encode()
        codes = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        return codes, coded.dictionary.to_pylist()

    def numbers(self, name: str, least: float = -math.inf, most: float = math.inf, gaps: bool = False) -> NDArray[Any]:
        """A column of finite numbers from `least` to `most`; an empty cell is NaN where there may be gaps."""
        values = self.floats(name)
        if values is None:
            codes, texts = self.words(name)
            wrong = np.array([not is_number(text) for text in texts] + [False])
            row = int(np.flatnonzero(wrong[codes])[0])
            self.refuse(row, f"{name} {texts[codes[row]]!r} is not a number")
        empty = np.isnan(values)
        outside = ~np.isfinite(values) | (values < least) | (values > most)
        bad = np.flatnonzero(np.where(empty, not gaps, outside))
        if len(bad):
            row = int(bad[0])
            if empty[row]:
                self.refuse(row, f"{name} is empty: fill it in, or leave out the column")
            self.refuse(row, f"{name} {values[row]:g} is not allowed: {span(least, most)}")
        return values

    def floats(self, name: str) -> NDArray[np.float64] | None:
        """A column as float64, empty cells as NaN; None when it holds something else."""
        column = self.data.column(name)
        try:
            if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
                text = pc.utf8_trim_whitespace(column)
                column = pc.if_else(pc.equal(text, ""), None, text)
            column = column.cast(pa.float64())
        except pa.ArrowException:
            return None
        return np.asarray(column.combine_chunks().to_numpy(zero_copy_only=False), dtype=np.float64)

    def times(self, name: str) -> NDArray[np.int64] | None:
        """A column of moments, in milliseconds since 1970 by the clock that wrote them; None when it is not one."""
        column = self.data.column(name)
        try:
            if pa.types.is_timestamp(column.type) and column.type.tz:
                column = column.cast(pa.timestamp("ms", "UTC"), safe=False)
            moments = column.cast(pa.timestamp("ms"), safe=False).cast(pa.int64())
        except pa.ArrowException:
            return None
        if moments.null_count:
            self.refuse(int(np.flatnonzero(pc.is_null(moments).to_numpy())[0]), f"{name} is empty")
        return np.asarray(moments.combine_chunks().to_numpy(zero_copy_only=False), dtype=np.int64)


def read_csv(path: Path, content: bytes) -> Any:
    """Every cell as text. A row with too few or too many cells is named; blank lines at the end do not count."""
    content = content.removeprefix(b"\xef\xbb\xbf").rstrip() + b"\n"
    try:
        names = [name.strip() for name in next(csv.reader([content.split(b"\n", 1)[0].decode()]), [])]
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadData(f"{path}: its first line cannot be read ({error})") from None
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise BadData(f"{path}: the first line names the column {twice[0]!r} twice")
    bad: list[Any] = []

    def note(row: Any) -> str:
        bad.append(row)
        return "skip"

    table = pa_csv.read_csv(
        pa.BufferReader(content),
        read_options=pa_csv.ReadOptions(use_threads=False, column_names=names, skip_rows=1),
        parse_options=pa_csv.ParseOptions(invalid_row_handler=note, ignore_empty_lines=False),
        convert_options=pa_csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
    )
    if bad:
        row = bad[0]
        raise BadData(
            f"{path}, line {row.number}: has {row.actual_columns} cells, but the first line names {len(names)} columns"
        )
    return table


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text


def span(least: float, most: float) -> str:
    if most == math.inf:
        return f"it must be at least {least:g}" if least > -math.inf else "it must be finite"
    return f"it must be from {least:g} to {most:g}"
