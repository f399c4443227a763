"""The data sets that are known by name: where they are on the hub, and what their columns are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import pyarrow as pa

from fedcluster.data.tables import Table
from fedcluster.experiment import Data


@dataclass(frozen=True)
class Known:
    """A Hugging Face id, keys of [data] that the experiment may leave out, and what makes the table of it that has
    these columns."""

    hub: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Table], Table] = lambda table: table


def joined(table: Table) -> Table:
    """LEAF's Shakespeare, rows of 80 characters (x) and the next one (y), as the texts that they were cut from.

    Row i + 1 of a character goes on from row i where its x is row i's x and y without the first letter. Where that
    does not hold, a text of its own begins.
    """
    if not {"character_id", "x", "y"} <= set(table.data.column_names):
        return table
    roles: list[str] = []
    texts: list[list[str]] = []
    before, window = None, ""
    columns = (table.strings(name) for name in ("character_id", "x", "y"))
    for role, x, y in zip(*columns, strict=True):
        if role == before and x == window:
            texts[-1].append(y)
        else:
            roles.append(role)
            texts.append([x, y])
        before, window = role, (x + y)[1:]
    return Table(table.path, pa.table({"role": roles, "text": ["".join(parts) for parts in texts]}))


KNOWN: dict[str, Known] = {
    "mnist": Known("ylecun/mnist"),
    "fashion_mnist": Known("zalando-datasets/fashion_mnist"),
    "cifar10": Known("uoft-cs/cifar10"),
    "femnist": Known("flwrlabs/femnist", {"features": ("image",), "target": ("character",), "device": "writer_id"}),
    "shakespeare": Known(
        "flwrlabs/shakespeare", {"features": ("text",), "device": "role", "tokenizer": "characters"}, joined
    ),
}


def completed(data: Data, known: Known) -> Data:
    """The keys of [data], with the known ones where the experiment leaves them out."""
    given = {key: value for key, value in data if value is not None}
    return Data(**dict(known.columns) | given)


def meant(name: str, others: list[str], least: float = 0.6) -> str:
    """ "did you mean ...?" for a name that is unknown, or nothing. `least` is how alike the two have to be."""
    hubs = [each.hub for each in KNOWN.values()]
    if name in (*KNOWN, *hubs):
        return ""
    names = [other for other in (*KNOWN, "digits", *hubs, *others) if other != name]
    near = get_close_matches(name.lower(), names, n=1, cutoff=least)
    return f"; did you mean {near[0]}?" if near else ""
