"""From the columns of a table to features, targets and the device of each row.

`[data]` names the columns. What it leaves out is inferred if the table is unambiguous, and reported in a line.
Otherwise the table is refused, with the key that resolves the ambiguity.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fedcluster.data import encoding, target_columns, text
from fedcluster.data.images import stacked
from fedcluster.data.split import held_out, split_tables
from fedcluster.data.tables import Table, is_number
from fedcluster.data.target_columns import Arrays, check_variety, class_labels, is_list, targets_of
from fedcluster.errors import BadData
from fedcluster.experiment import Data
from fedcluster.reporting import Say

LABELS = ("label", "labels", "target", "class", "y")
DEVICE = "device"
IDENTIFIER = re.compile(r"(?i:(.*[_\- .])?(id|ids|uuid|guid)|idx|index|key|row|unnamed: ?0|)|.*[a-z0-9](Id|ID)")
IDENTIFIER_ROWS = 100  # integers that are all distinct in at least so many rows look like an identifier

Kind = Literal["number", "category", "picture", "vector", "text"]


@dataclass(frozen=True)
class Roles:
    """The columns that are used. Without targets, the task is to predict the next token of the text."""

    features: tuple[str, ...]
    kinds: tuple[Kind, ...]
    targets: tuple[str, ...]
    device: str | None


def arrays(
    tables: dict[str, Table], data: Data, target: str | None, say: Say = print, whole_fleet: bool = True
) -> Arrays:
    """x and y of both parts, and the devices of their rows if a column names them. `target` is the kind of targets that
    the task takes, if the experiment names a task. The data of a single device (not of the `whole_fleet`) may have the
    same target in every row, and must number classes as every other device does."""
    train = tables["train"]
    if data.length is not None and data.tokenizer is None:
        raise BadData("data.length is a number of tokens: it needs data.tokenizer")
    check_names(train, data)
    roles = roles_of(train, data, target)
    for table in tables.values():
        missing = [name for name in (*roles.features, *roles.targets) if name not in table]
        if missing:
            raise BadData(f"{table.path} has no column {missing[0]}, which {train.path} has")
    if not roles.targets:
        return next_tokens(tables, roles, data, say)
    result = targets_of(tables, roles.targets, target, data, whole_fleet)
    tables, y = split_tables(tables, data.split, say), result["y_train"]
    train = tables["train"]
    result |= {f"y_{split}": y[table.rows] for split, table in tables.items() if table.rows is not None}
    result |= {
        f"device_{split}": devices(table, roles.device)
        for split, table in tables.items()
        if roles.device is not None and (split == "train" or roles.device in table)
    }
    if "device_test" in result:
        report_left_out(result["device_test"], result["device_train"], train.path, say)
    if whole_fleet:
        check_variety(train, roles.targets, result["y_train"])
    owner = device_numbers(result.get("device_train"))
    if result["target"] == "number":
        result |= target_columns.standardised(result, roles.targets, data, owner)
    inputs, description = features_of(tables, roles, data, owner, say)
    result["preparation"] = preparation(roles, result, inputs)
    device = "" if roles.device is None else f"; device: {roles.device}"
    say(f"{train.path}: {description}; target: {target_columns.describe(roles.targets, result)}{device}")
    return result | inputs


def device_numbers(owner: NDArray[Any] | None) -> NDArray[np.int64] | None:
    """The devices of the rows, numbered from 0."""
    return None if owner is None else np.unique(owner, return_inverse=True)[1]


def preparation(roles: Roles, result: Arrays, inputs: Arrays) -> str:
    """The keys of [data], as JSON, that prepare other rows by the statistics, levels and classes of these."""
    keys = {"standardise": {}, "categories": {}} | inputs.pop("keys", {})
    keys["categories"] |= result.pop("categories", {})
    if "target_scale" in result:
        keys["standardise"] |= zip(roles.targets, result["target_scale"].T.tolist(), strict=False)
    return json.dumps({name: value for name, value in keys.items() if value})


def check_shared(table: Table, data: Data, target: str | None) -> None:
    """Refuse what every device of a federation would encode in its own way: categories without given levels, and
    characters as tokens."""
    check_names(table, data)
    roles = roles_of(table, data, target)
    for name, kind in zip(roles.features, roles.kinds, strict=True):
        if kind == "category" and name not in levels_given(data):
            raise BadData(
                f"column {name} is a category, and devices of a federation must agree on its levels: give them as "
                f'data.categories = {{{name} = ["...", "..."]}}'
            )
    if data.tokenizer == "characters":
        raise BadData(
            'data.tokenizer = "characters" has the characters of one device only: use "bytes", or a tokenizer from disk'
        )


def levels_given(data: Data) -> dict[str, tuple[str, ...]]:
    """The levels that data.categories lists, by column."""
    return data.categories if isinstance(data.categories, dict) else {}


def moments(tables: dict[str, Table], data: Data, target: str | None) -> dict[str, tuple[float, float, float]]:
    """Count, mean and sum of squared deviations over the training rows, of every numeric feature and target without a
    given scale. A device of a federation sends them if it is allowed to."""
    train = tables["train"]
    roles = roles_of(train, data, target)
    if data.standardise is False or not roles.targets:
        return {}
    train = split_tables(tables, data.split, lambda line: None)["train"]
    kinds = dict(zip(roles.features, roles.kinds, strict=True))
    names = [name for name, kind in kinds.items() if kind == "number" or (kind == "vector" and not is_ids(train, name))]
    target = target_columns.kind_of_targets(tables["train"], roles.targets, target, data, False)
    names += roles.targets if target == "number" else ()
    fixed = data.standardise if isinstance(data.standardise, dict) else {}
    return {name: encoding.Moments.of(numbers_of(train, name)).told() for name in names if name not in fixed}


def numbers_of(table: Table, name: str) -> NDArray[np.float64]:
    """All numbers of a column, also of one of lists."""
    values = table.lists(name).ravel() if is_list(table.data.field(name).type) else table.numbers(name)
    return values.astype(np.float64)


def is_ids(table: Table, name: str) -> bool:
    """Whether a column of lists holds whole numbers, which are taken as token ids."""
    return bool(pa.types.is_integer(table.data.field(name).type.value_type))


def check_names(table: Table, data: Data) -> None:
    """Refuse columns in [data] that the table does not have, or that have two roles."""
    named = {
        "features": data.features or (),
        "target": names_of(data.target),
        "device": names_of(data.device),
        "categories": tuple(data.categories or ()),
        "standardise": tuple(data.standardise) if isinstance(data.standardise, dict) else (),
        "split": names_of(data.split) if isinstance(data.split, str) else (),
    }
    for key, names in named.items():
        for name in names:
            if name not in table:
                near = get_close_matches(name, table.data.column_names, n=1)
                meant = f"did you mean {near[0]}?" if near else f"it has {encoding.some(table.data.column_names, 20)}"
                raise BadData(f"data.{key}: {table.path} has no column {name}; {meant}")
    roles = [*named["features"], *named["target"], *named["device"], *named["split"]]
    repeated = next((name for name in roles if roles.count(name) > 1), None)
    if repeated is not None:
        raise BadData(
            f"[data] names the column {repeated} twice: a column is a feature, a target, the device or the split"
        )
    for key in ("categories", "standardise"):
        used = (*(data.features or ()), *(named["target"] or names_of(label_column(table))))
        other = next((name for name in named[key] if data.features and name not in used), None)
        if other is not None:
            raise BadData(f"data.{key} names {other}, which is not among data.features: add it there, or leave it out")


def names_of(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if given is None else (given,) if isinstance(given, str) else given


def roles_of(table: Table, data: Data, target: str | None) -> Roles:
    device = data.device or (DEVICE if DEVICE in table and DEVICE not in (data.features or ()) else None)
    target_names = names_of(data.target)
    if not target_names and target != "token":
        label = label_column(table)
        if label is None and data.tokenizer is None:
            raise BadData(
                f"{table.path} has no label column among {encoding.some(table.data.column_names, 20)}: name the "
                "target in data.target"
            )
        target_names = names_of(label)
    if target_names and target == "token":
        raise BadData(f"data.target names {target_names[0]}, but task next_token predicts the text: leave it out")
    used = {*target_names, *names_of(device), *(names_of(data.split) if isinstance(data.split, str) else ())}
    names = data.features or tuple(name for name in table.data.column_names if name not in used)
    if not names:
        raise BadData(f"{table.path} has no columns besides {encoding.some(sorted(used))}, so there are no features")
    if data.features is None:
        pictures = [name for name in names if is_picture(table.data.field(name).type)]
        if pictures:
            names = tuple(pictures[:1])
        elif data.tokenizer is None:
            check_identifiers(table, names)
    kinds = tuple(kind_of(table, name, data) for name in names)
    for kind in ("picture", "vector", "text"):
        if kind in kinds and len(kinds) > 1:
            raise BadData(
                f"{table.path}: column {names[kinds.index(kind)]} ({kind}) cannot be combined with other features: "
                "name the features in data.features"
            )
    if not target_names and kinds != ("text",):
        raise BadData(
            f"{table.path}: to predict the next token, name one column of text in data.features, and data.tokenizer"
        )
    return Roles(names, kinds, target_names, device)


def label_column(table: Table) -> str | None:
    """`label` or one of its synonyms, else the column that the schema of Hugging Face declares as a class label."""
    return next((name for name in (*LABELS, *class_labels(table)) if name in table), None)


def check_identifiers(table: Table, names: Sequence[str]) -> None:
    """Refuse columns that look like identifiers, if `data.features` does not name them."""
    advice = "name the features in data.features, and this column in data.device if it is the device of each row"
    for name in (each for each in names if not is_list(table.data.field(each).type)):
        if IDENTIFIER.fullmatch(name):
            raise BadData(f"{table.path}: column {name!r} looks like an identifier, not a feature: {advice}")
        if len(table) >= IDENTIFIER_ROWS and table.is_whole(name):
            values = table.numbers(name)
            if len(np.unique(values)) == len(values):
                raise BadData(
                    f"{table.path}: column {name!r} has a different whole number in each of {len(values)} rows, like "
                    f"an identifier: {advice}"
                )


def kind_of(table: Table, name: str, data: Data) -> Kind:
    """How a feature column is encoded."""
    kind = table.data.field(name).type
    if is_picture(kind):
        return "picture"
    if is_list(kind):
        return "vector"
    if name in (data.categories or ()):
        return "category"
    if data.tokenizer is not None and table.is_text(name):
        return "text"
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return "number"
    if not table.is_text(name):
        raise BadData(
            f"{table.path}: column {name} is {kind}, and a feature is a number or a text: name the features in "
            "data.features"
        )
    texts = table.words(name)[1]
    numeric = [is_number(each) for each in texts]
    if all(numeric):
        return "number"
    scaled = isinstance(data.standardise, dict) and name in data.standardise
    if any(numeric) or data.features is None or scaled:
        codes = table.words(name)[0]
        row = int(np.flatnonzero(np.append(~np.array(numeric), False)[codes])[0])
        first = "correct it" if data.features else "name the features in data.features"
        advice = f"{first}, or list {name} in data.categories if it is a category"
        if scaled:
            advice = "data.standardise has its mean and deviation"
        table.refuse(row, f"{name} {texts[codes[row]][:80]!r} is not a number: {advice}")
    if len(texts) > min(encoding.MOST_LEVELS, len(table) / 2):
        raise BadData(
            f"{table.path}: column {name} has {len(texts):,} different texts in {len(table):,} rows: give "
            "data.tokenizer to read it as text, or list it in data.categories if it is a category"
        )
    return "category"


def features_of(
    tables: dict[str, Table], roles: Roles, data: Data, owner: NDArray[Any] | None, say: Say
) -> tuple[Arrays, str]:
    """x of both parts, and a description of how the columns are encoded."""
    train, name = tables["train"], roles.features[0]
    match roles.kinds[0]:
        case "picture":
            return {f"x_{s}": stacked(picture_bytes(t, name), t.path, say) for s, t in tables.items()}, (
                f"pictures: {name}"
            )
        case "text":
            assert data.tokenizer is not None
            tokenize = text.tokenizer(data.tokenizer, train.strings(name))
            length = data.length or text.LENGTH
            x = {f"x_{s}": text.padded(t.strings(name), tokenize, length, t.path) for s, t in tables.items()}
            description = f"text: {name}, {tokenize}, cut or padded with token {tokenize.padding} to {length}"
            return x | {"vocabulary": tokenize.size}, description
        case "vector":
            return vectors(tables, name, data, owner)
    if data.standardise in (None, True) and all(
        pa.types.is_uint8(train.data.field(name).type) for name in roles.features
    ):
        rows = {f"x_{s}": np.stack([t.numbers(n) for n in roles.features], axis=1) for s, t in tables.items()}
        return {key: x.astype(np.uint8) for key, x in rows.items()}, f"bytes: {encoding.some(roles.features)}"
    kinds: list[Any] = list(roles.kinds)
    encoded = encoding.build(train, roles.features, kinds, data, owner)
    x = {}
    for split, table in tables.items():
        x[f"x_{split}"], others = encoded.encode(table)
        for column, count in others.items():
            where = "data.categories" if column in levels_given(data) else "the training part"
            say(f"{table.path}: {count:,} rows have a {column} that is not in {where}: encoded as other")
    return x | {"vocabulary": encoded.vocabulary, "keys": encoded.keys()}, encoded.describe()


def vectors(tables: dict[str, Table], name: str, data: Data, owner: NDArray[Any] | None) -> tuple[Arrays, str]:
    """A column of equally long lists: integers are token ids; other numbers are standardised together."""
    rows = {split: table.lists(name) for split, table in tables.items()}
    if is_ids(tables["train"], name):
        return {f"x_{split}": values for split, values in rows.items()}, f"token ids: {name}"
    scale = encoding.scale_of_lists(name, rows["train"], data, owner)
    scaled = ", standardised" if scale != encoding.UNSCALED else ""
    x: Arrays = {f"x_{s}": ((values - scale[0]) / scale[1]).astype(np.float32) for s, values in rows.items()}
    return x | {"keys": {"standardise": {name: scale}}}, f"rows of {rows['train'].shape[1]} numbers{scaled}: {name}"


def next_tokens(tables: dict[str, Table], roles: Roles, data: Data, say: Say) -> Arrays:
    """Windows of text, and the next token at every position. The rows of a device are the lines of one text. Without a
    test part, the last fifth of every device's text is held out, or the share that data.split gives."""
    assert data.tokenizer is not None
    name, train = roles.features[0], tables["train"]
    share = data.split
    if isinstance(share, str):
        tables, share = split_tables(tables, share, say), None
    joined = {split: texts_by_device(table, name, roles.device) for split, table in tables.items()}
    if "test" not in tables:
        joined = held_out(joined["train"], share, train.path, say)
    elif share is not None:
        raise BadData("data.split is a share of the rows, but the data have a test part: leave it out")
    tokenize = text.tokenizer(data.tokenizer, joined["train"].values())
    result: Arrays = {"target": "token", "outputs": tokenize.size, "vocabulary": tokenize.size}
    length = data.length or text.LENGTH
    for split, texts in joined.items():
        x, y, stream = text.windows(list(texts.values()), tokenize, length, train.path)
        if not len(x):
            raise BadData(f"{train.path}: the {split} part has no text of two tokens or more")
        result |= {f"x_{split}": x, f"y_{split}": y}
        if roles.device is not None and roles.device in tables.get(split, train):
            result[f"device_{split}"] = np.array(list(texts))[stream]
        if split == "train" and roles.device is not None:
            short = np.setdiff1d(np.arange(len(texts)), stream)
            if len(short):
                names = encoding.some((str(list(texts)[k]) for k in short), 3)
                say(f"{train.path}: {len(short):,} devices have fewer than two tokens and are left out: {names}")
    device = "" if roles.device is None else f"; device: {roles.device}"
    say(f"{train.path}: text: {name}, {tokenize}, windows of {length}, to predict the next token{device}")
    return result


def texts_by_device(table: Table, name: str, device: str | None) -> dict[Any, str]:
    rows = table.strings(name)
    if device is None:
        return {"": "\n".join(rows)}
    lines: dict[Any, list[str]] = {}
    for owner, row in zip(devices(table, device).tolist(), rows, strict=True):
        lines.setdefault(owner, []).append(row)
    return {owner: "\n".join(lines[owner]) for owner in sorted(lines)}


def report_left_out(test: NDArray[Any], train: NDArray[Any], source: Any, say: Say) -> None:
    """Report the devices that have test rows only, and therefore are not in the fleet."""
    names = np.setdiff1d(test.astype(str), train.astype(str))
    if len(names):
        say(
            f"{source}: {len(names):,} devices have rows in the test part only, so they are not in the fleet: "
            f"{encoding.some(names.tolist(), 3)}"
        )


def devices(table: Table, name: str) -> NDArray[Any]:
    """The device of each row: integers if all are, so that 2 comes before 10, else names."""
    table.refuse_empty(name)
    if pa.types.is_integer(table.data.field(name).type):
        return np.asarray(table.data.column(name).combine_chunks().to_numpy(zero_copy_only=False))
    codes, texts = table.words(name)
    if all(re.fullmatch(r"0|-?[1-9]\d{0,17}", each, re.ASCII) for each in texts):
        return np.array([int(each) for each in texts], np.int64)[codes]
    return np.array(texts)[codes]


def is_picture(kind: Any) -> bool:
    """Whether it is a picture as Hugging Face stores it: a struct with the bytes of the file."""
    return bool(pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0)


def picture_bytes(table: Table, name: str) -> list[bytes | None]:
    """The bytes of every picture. Paths are ignored: a table must not make us read other files."""
    chunks = [chunk.field("bytes") for chunk in table.data.column(name).chunks]
    return [None if one is None else bytes(one) for chunk in chunks for one in chunk.to_pylist()]
