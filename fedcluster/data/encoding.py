"""How the feature columns of a table are encoded: numbers are standardised, categories are one-hot or codes.

    number    (x - mean) / deviation
    category  one input for each level, 1 where it applies ("one-hot"), or the number of the level ("codes")

Means, deviations and levels are those of the training part. A level that the training part does not have is "other":
all inputs 0, or the code after the last level.

A federation can compute the same statistics. For each column of numbers a device sends its count n_k, mean m_k and sum
of squared deviations s_k, and

    N = sum n_k        mean = sum n_k m_k / N        deviation^2 = sum (s_k + n_k (m_k - mean)^2) / N

Sums are rounded once (fsum), so the result does not depend on the order of the devices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedcluster.data.tables import Table
from fedcluster.errors import BadData
from fedcluster.experiment import Data
from fedcluster.inputs import check_size

MOST_LEVELS = 1000  # of a category, unless it is listed in data.categories
MOST_INPUTS = 100_000  # of a sample
LARGEST = 1e6  # of a feature that is not standardised: steps of any usual size diverge beyond
UNSCALED = (0.0, 1.0)  # mean and deviation of numbers that stay as they are
Floats = NDArray[np.float64]
Scale = tuple[float, float]  # mean and deviation


@dataclass(frozen=True)
class Number:
    """A column of numbers, with the scale that standardises it."""

    name: str
    mean: float
    deviation: float


@dataclass(frozen=True)
class Category:
    """A column of texts or whole numbers that have no order."""

    name: str
    levels: tuple[str, ...]


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of a column of numbers: arrays over devices."""

    count: NDArray[Any]
    mean: NDArray[Any]
    squares: NDArray[Any]  # of deviations from the device's own mean

    @classmethod
    def of(cls, values: Floats, owner: NDArray[Any] | None = None) -> "Moments":
        """The moments of a column, by the device that owns each row; without `owner`, all rows are one device's."""
        owner = np.zeros(len(values), np.int64) if owner is None else owner
        count = np.bincount(owner).astype(np.float64)
        mean = np.bincount(owner, values) / np.maximum(count, 1)
        return cls(count, mean, np.bincount(owner, (values - mean[owner]) ** 2))

    @classmethod
    def gathered(cls, told: Sequence[Sequence[float]]) -> "Moments":
        """The moments of several devices, from what each has sent."""
        count, mean, squares = np.array(told, np.float64).T
        return cls(count, mean, squares)

    def told(self) -> tuple[float, float, float]:
        """Count, mean and sum of squared deviations of one device."""
        return float(self.count[0]), float(self.mean[0]), float(self.squares[0])

    def pooled(self) -> tuple[float, float]:
        """Mean and deviation over all rows of all devices. A constant column has the deviation 1."""
        rows = math.fsum(self.count)
        mean = math.fsum(self.count * self.mean) / rows
        squares = math.fsum(self.squares + self.count * (self.mean - mean) ** 2)
        deviation = math.sqrt(squares / rows)
        return mean, deviation if deviation > 1e-12 * max(1.0, abs(mean)) else 1.0


@dataclass(frozen=True)
class Encoding:
    """How the feature columns of a table become rows of inputs."""

    columns: tuple[Number | Category, ...]
    categories: Literal["one-hot", "codes"]

    @property
    def vocabulary(self) -> int:
        """The number of codes if all features are categories encoded as codes, which are then token ids; else 0."""
        if self.categories != "codes" or not all(isinstance(column, Category) for column in self.columns):
            return 0
        return 1 + max(len(column.levels) for column in self.columns if isinstance(column, Category))

    def encode(self, table: Table) -> tuple[NDArray[Any], dict[str, int]]:
        """Inputs [rows, inputs], and by column the number of rows whose level is "other"."""
        check_size(table.path, 8 * len(table) * self.inputs())  # the parts, and all of them together
        parts, others = [], {}
        for column in self.columns:
            if isinstance(column, Number):
                values = table.numbers(column.name)
                parts.append(((values - column.mean) / column.deviation).astype(np.float32)[:, None])
                large = np.flatnonzero(np.abs(parts[-1]) > LARGEST)
                if len(large):
                    row = int(large[0])
                    table.refuse(
                        row,
                        f"{column.name} {values[row]:g} is too large to train on: scale the column, by "
                        f"data.standardise = {{{column.name} = [mean, deviation]}} for one",
                    )
                continue
            codes = level_codes(table, column)
            unknown = int((codes == len(column.levels)).sum())
            if unknown:
                others[column.name] = unknown
            if self.categories == "codes":
                parts.append(codes[:, None].astype(np.int64 if self.vocabulary else np.float32))
            else:
                known = np.flatnonzero(codes < len(column.levels))
                hot = np.zeros((len(table), len(column.levels)), np.float32)
                hot[known, codes[known]] = 1
                parts.append(hot)
        return np.concatenate(parts, axis=1), others

    def inputs(self) -> int:
        return sum(
            len(column.levels) if isinstance(column, Category) and self.categories == "one-hot" else 1
            for column in self.columns
        )

    def describe(self) -> str:
        """The columns and how each is encoded, for the log."""
        scaled = [c for c in self.columns if isinstance(c, Number) and (c.mean, c.deviation) != UNSCALED]
        plain = [c for c in self.columns if isinstance(c, Number) and c not in scaled]
        coded = [f"{c.name} ({len(c.levels)})" for c in self.columns if isinstance(c, Category)]
        said = [f"numbers, standardised: {some(c.name for c in scaled)}"] if scaled else []
        said += [f"numbers, as they are: {some(c.name for c in plain)}"] if plain else []
        said += [f"categories, {self.categories}: {some(coded)}"] if coded else []
        return "; ".join(said)

    def keys(self) -> dict[str, Any]:
        """The keys of [data] that encode other rows with the same statistics."""
        scales = {column.name: (column.mean, column.deviation) for column in self.columns if isinstance(column, Number)}
        levels = {column.name: column.levels for column in self.columns if isinstance(column, Category)}
        return {"standardise": scales, "categories": levels}


def level_texts(table: Table, name: str) -> tuple[NDArray[np.int64], list[str]]:
    """The column of a category as (codes, texts). Whole numbers become texts."""
    table.refuse_empty(name)
    return table.words(name)


def levels_of(table: Table, name: str) -> tuple[str, ...]:
    """The levels of a category, sorted: whole numbers by value, texts alphabetically."""
    texts = level_texts(table, name)[1]
    whole = all(text.lstrip("+-").isdecimal() and text.isascii() for text in texts)
    return tuple(sorted(texts, key=int) if whole else sorted(texts))


def level_codes(table: Table, column: Category) -> NDArray[np.int64]:
    """The level of every row as a number. Unknown levels get the number after the last."""
    codes, texts = level_texts(table, column.name)
    place = {level: number for number, level in enumerate(column.levels)}
    return np.array([place.get(text, len(place)) for text in texts], np.int64)[codes]


def some(names: Any, most: int = 8) -> str:
    """A list of names for a message, cut after `most`."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def scale_of(name: str, values: Floats, data: Data, owner: NDArray[Any] | None = None) -> Scale:
    """Mean and deviation by which a column of numbers is standardised: those in [data], else those of its values."""
    if isinstance(data.standardise, dict) and name in data.standardise:
        return data.standardise[name]
    return UNSCALED if data.standardise is False else Moments.of(values, owner).pooled()


def scale_of_lists(name: str, values: NDArray[Any], data: Data, owner: NDArray[Any] | None = None) -> Scale:
    """The same for a column of lists [rows, length], whose numbers are standardised together."""
    owner = None if owner is None else np.repeat(owner, values.shape[1])
    return scale_of(name, values.ravel().astype(np.float64), data, owner)


def build(
    table: Table,
    names: Sequence[str],
    kinds: Sequence[Literal["number", "category"]],
    data: Data,
    owner: NDArray[Any] | None = None,
) -> Encoding:
    """The encoding of these columns, with the statistics of the training part or those given in `[data]`."""
    columns: list[Number | Category] = []
    levels = data.categories if isinstance(data.categories, dict) else {}
    for name, kind in zip(names, kinds, strict=True):
        if kind == "category":
            columns.append(Category(name, levels.get(name) or levels_of(table, name)))
        else:
            columns.append(Number(name, *scale_of(name, table.numbers(name), data, owner)))
    encoding = Encoding(tuple(columns), data.encoding or "one-hot")
    if encoding.inputs() > MOST_INPUTS:
        raise BadData(
            f"{table.path}: the features have {encoding.inputs():,} inputs, at most {MOST_INPUTS:,} are possible: use "
            'data.encoding = "codes", or fewer columns'
        )
    return encoding
