"""The training and the test part of data that come without one, or with a column that tells."""

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fedcluster.data.tables import Table
from fedcluster.errors import BadData
from fedcluster.reporting import Say
from fedcluster.rng import stream

HELD_OUT = 0.2
TEST, TRAIN = {"test", "true", "1"}, {"train", "false", "0"}


def test_rows(rows: int, share: float) -> NDArray[np.bool_]:
    """A share of the rows at random, the same for every seed."""
    order = stream(0, "hold_out").permutation(rows)
    chosen = np.zeros(rows, bool)
    chosen[order[: min(max(1, round(share * rows)), rows - 1)]] = True
    return chosen


def split_tables(tables: dict[str, Table], split: float | str | None, say: Say) -> dict[str, Table]:
    """The tables with a test part: the one there is, or the rows that `split` says, a share or a column."""
    train = tables["train"]
    if "test" in tables:
        if split is not None:
            raise BadData(f"data.split = {split!r}, but {tables['test'].path} is the test part: leave it out")
        return tables
    if len(train) < 2:
        raise BadData(f"{train.path} has one row, and a training and a test part need one each")
    if isinstance(split, str):
        chosen = marked(train, split)
        said = f"{int(chosen.sum()):,} rows are the test part, by the column {split}"
    else:
        chosen = test_rows(len(train), HELD_OUT if split is None else split)
        said = f"no test split: a fixed {'fifth' if split is None else format(split, '.0%')} of its rows is held out"
    say(f"{train.path}: {said}")
    return {"train": train.take(np.flatnonzero(~chosen)), "test": train.take(np.flatnonzero(chosen))}


def marked(table: Table, name: str) -> NDArray[np.bool_]:
    """The rows that a column calls the test part."""
    table.refuse_empty(name)
    if pa.types.is_boolean(table.data.field(name).type):
        chosen = np.asarray(table.data.column(name).combine_chunks().to_numpy(zero_copy_only=False), bool)
    else:
        codes, texts = table.words(name)
        said = [each.lower() for each in texts]
        other = [each for each in texts if each.lower() not in TEST | TRAIN]
        if other:
            raise BadData(
                f"data.split: column {name} of {table.path} has {other[0]!r}: each row must say train or test, "
                "false or true, 0 or 1"
            )
        chosen = np.array([each in TEST for each in said])[codes]
    if chosen.all() or not chosen.any():
        raise BadData(f"data.split: column {name} of {table.path} has only rows of one part")
    return chosen


def held_out(texts: dict[Any, str], share: float | None, source: Any, say: Say) -> dict[str, dict[Any, str]]:
    """Texts as training and test part: the last fifth of each, or the last `share`, is held out."""
    part = HELD_OUT if share is None else share
    cuts = {owner: len(text) - round(part * len(text)) for owner, text in texts.items()}
    said = "fifth" if share is None else format(share, ".0%")
    say(f"{source}: no test split: the last {said} of {'every' if len(texts) > 1 else 'the'} text is held out")
    return {
        "train": {owner: text[: cuts[owner]] for owner, text in texts.items()},
        "test": {owner: text[cuts[owner] :] for owner, text in texts.items()},
    }
