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

from fedcluster.data import encoding, targets, text
from fedcluster.data.images import stacked
from fedcluster.data.split import held_out, split_tables
from fedcluster.data.tables import Table, is_number
from fedcluster.errors import BadData
from fedcluster.experiment import Data
from fedcluster.reporting import Say

LABELS = ("label", "labels", "target", "class", "y")
DEVICE = "device"
IDENTIFIER = re.compile(r"(?i:(.*[_\- .])?(id|ids|uuid|guid)|idx|index|key|row|unnamed: ?0|)|.*[a-z0-9](Id|ID)")
IDENTIFIER_ROWS = 100  # integers that are all distinct in at least so many rows look like an identifier
FEW_VALUES = 20  # distinct integers are taken for classes
DENSE_VALUES = 1000  # more distinct integers are taken for classes up to this one, if they have few gaps from 0 on

Arrays = dict[str, Any]
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
    inputs, description = features_of(tables, roles, data, result.get("device_train"), say)
    result |= inputs
    kind = f"{result['outputs']} classes" if result["target"] == "class" else targets.PLURALS[result["target"]]
    device = "" if roles.device is None else f"; device: {roles.device}"
    say(f"{train.path}: {description}; target: {encoding.some(roles.targets)} ({kind}){device}")
    return result


def check_shared(table: Table, data: Data, target: str | None) -> None:
    """Refuse what every device of a federation would encode in its own way: categories without given levels, and
    characters as tokens."""
    check_names(table, data)
    roles = roles_of(table, data, target)
    levels = data.categories if isinstance(data.categories, dict) else {}
    for name, kind in zip(roles.features, roles.kinds, strict=True):
        if kind == "category" and name not in levels:
            raise BadData(
                f"column {name} is a category, and devices of a federation must agree on its levels: give them as "
                f'data.categories = {{{name} = ["...", "..."]}}'
            )
    if data.tokenizer == "characters":
        raise BadData(
            'data.tokenizer = "characters" has the characters of one device only: use "bytes", or a tokenizer from disk'
        )


def moments(tables: dict[str, Table], data: Data, target: str | None) -> dict[str, tuple[float, float, float]]:
    """Count, mean and sum of squared deviations over the training rows, of every numeric column without a given scale.
    A device of a federation sends them if it is allowed to."""
    train = tables["train"]
    roles = roles_of(train, data, target)
    if roles.targets:
        train = split_tables(tables, data.split, lambda line: None)["train"]
    fixed = data.standardise if isinstance(data.standardise, dict) else {}
    open_columns = [
        name
        for name, kind in zip(roles.features, roles.kinds, strict=True)
        if kind == "number" and name not in fixed and data.standardise is not False
    ]
    return {name: encoding.Moments.of(train.numbers(name)).told() for name in open_columns}


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
        classes = (named["target"] or names_of(label_column(table))) if key == "categories" else ()
        used = (*(data.features or ()), *classes)
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


def class_labels(table: Table) -> dict[str, int]:
    """The number of classes of every column that the schema of Hugging Face declares as a class label."""
    try:
        features = json.loads((table.data.schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {str(name): len(kind["names"]) for name, kind in features.items() if kind.get("_type") == "ClassLabel"}
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        return {}


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
    if any(numeric) or data.features is None:
        codes = table.words(name)[0]
        row = int(np.flatnonzero(np.append(~np.array(numeric), False)[codes])[0])
        first = "" if data.features else "name the features in data.features, and "
        advice = f"{first}{name} in data.categories if it is a category"
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
            description = f"text: {name}, {tokenize.size:,} {data.tokenizer} cut or padded to {length} tokens"
            return x | {"vocabulary": tokenize.size}, description
        case "vector":
            return vectors(tables, name, data)
    if data.standardise in (None, True) and all(
        pa.types.is_uint8(train.data.field(name).type) for name in roles.features
    ):
        rows = {f"x_{s}": np.stack([t.numbers(n) for n in roles.features], axis=1) for s, t in tables.items()}
        return {key: x.astype(np.uint8) for key, x in rows.items()}, f"bytes: {encoding.some(roles.features)}"
    device_numbers = None if owner is None else np.unique(owner, return_inverse=True)[1]
    kinds: list[Any] = list(roles.kinds)
    encoded = encoding.build(train, roles.features, kinds, data, device_numbers)
    x = {}
    for split, table in tables.items():
        x[f"x_{split}"], others = encoded.encode(table)
        for column, count in others.items():
            say(f"{table.path}: {count:,} rows have a {column} that the training part does not have: encoded as other")
    return x | {"vocabulary": encoded.vocabulary}, encoded.describe()


def vectors(tables: dict[str, Table], name: str, data: Data) -> tuple[Arrays, str]:
    """A column of equally long lists: integers are token ids; other numbers are standardised together."""
    rows = {split: table.lists(name) for split, table in tables.items()}
    if rows["train"].dtype.kind in "iu":
        return {f"x_{split}": values for split, values in rows.items()}, f"token ids: {name}"
    scale = (0.0, 1.0)
    if isinstance(data.standardise, dict):
        scale = data.standardise.get(name, scale)
    elif data.standardise is not False:
        scale = encoding.Moments.of(rows["train"].ravel()).pooled()
    description = f"rows of {rows['train'].shape[1]} numbers{', standardised' if scale != (0.0, 1.0) else ''}: {name}"
    return {f"x_{s}": ((values - scale[0]) / scale[1]).astype(np.float32) for s, values in rows.items()}, description


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
    say(
        f"{train.path}: text: {name}, {tokenize.size:,} {data.tokenizer}, windows of {length}, of which the next token "
        f"is predicted{device}"
    )
    return result


def texts_by_device(table: Table, name: str, device: str | None) -> dict[Any, str]:
    rows = table.strings(name)
    if device is None:
        return {"": "\n".join(rows)}
    lines: dict[Any, list[str]] = {}
    for owner, row in zip(devices(table, device).tolist(), rows, strict=True):
        lines.setdefault(owner, []).append(row)
    return {owner: "\n".join(lines[owner]) for owner in sorted(lines)}


def targets_of(
    tables: dict[str, Table], names: Sequence[str], kind: str | None, data: Data, whole_fleet: bool
) -> Arrays:
    """y of both parts, their kind and the number of outputs."""
    train = tables["train"]
    listed = data.categories.get(names[0], ()) if isinstance(data.categories, dict) else ()
    kind = kind or ("class" if listed else inferred(train, names))
    if kind == "class":
        if len(names) > 1:
            raise BadData(f"data.target names {len(names)} columns, and a classification has one: give task.name")
        values = {split: labels(table, names[0]) for split, table in tables.items()}
        if listed:
            values = {split: places(y, listed, tables[split], names[0]) for split, y in values.items()}
        elif not whole_fleet:
            check_numbered(values, train, names[0])
        result: Arrays = {f"y_{split}": y for split, y in numbered(values, tables, names[0]).items()}
        known = len(listed) or class_labels(train).get(names[0], 0)
        outputs = max(known, *(int(y.max()) + 1 for y in result.values()))
    else:
        result = {f"y_{split}": numbers(table, names, kind) for split, table in tables.items()}
        outputs = result["y_train"].shape[1] if result["y_train"].ndim == 2 else 1
    return result | {"target": kind, "outputs": outputs}


def report_left_out(test: NDArray[Any], train: NDArray[Any], source: Any, say: Say) -> None:
    """Report the devices that have test rows only, and therefore are not in the fleet."""
    names = np.setdiff1d(test.astype(str), train.astype(str))
    if len(names):
        say(
            f"{source}: {len(names):,} devices have rows in the test part only, so they are not in the fleet: "
            f"{encoding.some(names.tolist(), 3)}"
        )


def check_variety(table: Table, names: Sequence[str], y: NDArray[Any]) -> None:
    """Refuse targets that are the same in all training rows."""
    if (y == y[:1]).all():
        raise BadData(
            f"{table.path}: the target {encoding.some(names)} is the same in all training rows, so there is nothing to "
            "learn"
        )


def inferred(table: Table, names: Sequence[str]) -> str:
    """The kind of the targets, if the columns are unambiguous."""
    advice = 'give task.name = "classification" or "regression"'
    if len(names) > 1 or is_list(table.data.field(names[0]).type):
        values = numbers(table, names, "number")
        if ((values == 0) | (values == 1)).all():
            return "multilabel"
        if (values % 1 != 0).any():
            return "number"
        raise BadData(
            f'{table.path}: the targets {encoding.some(names)} are whole numbers: give task.name = "regression" if '
            "they are measurements"
        )
    name = names[0]
    kind = table.data.field(name).type
    if pa.types.is_boolean(kind) or not (
        table.is_text(name) or pa.types.is_integer(kind) or pa.types.is_floating(kind)
    ):
        return "class"
    floats = table.floats(name)
    if floats is None:
        return "class"  # texts
    table.refuse_empty(name)
    distinct = np.unique(floats[np.isfinite(floats)])
    if len(distinct) == 1 and np.isfinite(floats).all():
        check_variety(table, names, distinct)
    fractions = (distinct % 1 != 0).any()
    if fractions:
        return "number" if len(distinct) > FEW_VALUES else "class"  # whose check then names the fraction
    if pa.types.is_floating(kind) and np.isfinite(floats).all():
        raise BadData(
            f"{table.path}: column {name} has whole numbers written as {kind}, which may be classes or numbers: "
            f"{advice}"
        )
    dense = len(distinct) > 0 and distinct[0] >= 0 and distinct[-1] < min(DENSE_VALUES, 2 * len(distinct))
    if len(distinct) <= FEW_VALUES or dense:
        return "class"
    raise BadData(
        f"{table.path}: column {name} has {len(distinct):,} different whole numbers from {distinct[0]:g} to "
        f"{distinct[-1]:g}, which may be classes or numbers: {advice}"
    )


def numbers(table: Table, names: Sequence[str], kind: str) -> NDArray[np.float32]:
    """Numeric targets, or labels that are 0 or 1: [rows], or [rows, several]."""
    if is_list(table.data.field(names[0]).type):
        values = table.lists(names[0]).astype(np.float64)
    else:
        columns = [table.numbers(name) for name in names]
        values = columns[0] if len(names) == 1 and kind == "number" else np.stack(columns, axis=1)
    if kind == "multilabel":
        wrong = np.argwhere((values != 0) & (values != 1))
        if len(wrong):
            row, label = wrong[0].tolist()
            table.refuse(row, f"{names[label % len(names)]} is {values[row, label]:g}: a label applies (1) or not (0)")
    return values.astype(np.float32)


def labels(table: Table, name: str) -> NDArray[Any]:
    """Labels as integers or texts. Fractions are refused."""
    kind, is_text = table.data.field(name).type, table.is_text(name)
    if not (is_text or pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise BadData(f"{table.path}: column {name} must be whole numbers or the names of classes, but is {kind}")
    table.refuse_empty(name)
    if not is_text:
        values = np.asarray(table.data.column(name).combine_chunks().to_numpy(zero_copy_only=False))
        return whole(table, name, values.astype(np.int64) if values.dtype.kind == "b" else values)
    codes, texts = table.words(name)
    numeric = np.array([is_number(each) for each in texts])
    if numeric.all():
        if all(re.fullmatch(r"[+-]?\d{1,18}", each, re.ASCII) for each in texts):
            return np.array([int(each) for each in texts], np.int64)[codes]
        return whole(table, name, np.array([float(each) for each in texts])[codes])
    if numeric.any():
        odd = numeric if 2 * numeric[codes].sum() <= len(codes) else ~numeric
        row = int(np.flatnonzero(odd[codes])[0])
        table.refuse(
            row,
            f"{name} is {texts[codes[row]]!r}, but other rows have {'texts' if numeric[codes[row]] else 'numbers'}: "
            "number the classes from 0, or name all of them",
        )
    return np.array(texts)[codes]


def whole(table: Table, name: str, values: NDArray[Any]) -> NDArray[Any]:
    if values.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            wrong = np.flatnonzero(~np.isfinite(values) | (values % 1 != 0))
        if len(wrong):
            row = int(wrong[0])
            table.refuse(
                row,
                f"{name} {values[row]:g} is not a class: classes are whole numbers from 0, or names; for numbers, "
                'give task.name = "regression"',
            )
    return values


def places(values: NDArray[Any], listed: Sequence[str], table: Table, name: str) -> NDArray[np.int64]:
    """Classes by their places in the list that `data.categories` has for them."""
    place = {text: k for k, text in enumerate(listed)}
    texts, codes = np.unique(values.astype(str), return_inverse=True)
    unknown = np.array([text not in place for text in texts])[codes]
    if unknown.any():
        row = int(unknown.argmax())
        table.refuse(row, f"{name} {str(values[row])[:80]!r} is not among the classes that data.categories lists")
    return np.array([place[text] for text in texts], np.int64)[codes]


def check_numbered(values: dict[str, NDArray[Any]], table: Table, name: str) -> None:
    """Refuse classes that a device of a federation would number by what it has of them."""
    if any(y.dtype.kind not in "iu" or int(y.min()) < 0 for y in values.values()):
        raise BadData(
            f"{table.path}: the classes in column {name} are not whole numbers from 0, and devices of a federation "
            "must number them alike: use whole numbers from 0, or list the classes in the file of --columns, as "
            f'data.categories = {{{name} = ["...", "..."]}}'
        )


def numbered(values: dict[str, NDArray[Any]], tables: dict[str, Table], name: str) -> dict[str, NDArray[np.int64]]:
    """Labels as classes from 0: integers as they are if none is negative, everything else by its rank."""
    most = targets.most_classes(sum(map(len, values.values())))
    known = class_labels(tables["train"]).get(name)
    kinds = {y.dtype.kind in "iu" for y in values.values()}
    if kinds == {True} and (known or all(int(y.min()) >= 0 for y in values.values())):
        for split, y in values.items():
            outside = np.flatnonzero((y < 0) | (y >= (known or most)))
            if len(outside):
                row = int(outside[0])
                why = f"is not one of the {known} classes" if known else "is too large for a class"
                tables[split].refuse(row, f"{name} {y[row]} {why}: number the classes from 0")
        return {split: y.astype(np.int64) for split, y in values.items()}
    if len({y.dtype.kind in "UO" for y in values.values()}) > 1:
        raise BadData(
            f"column {name} holds numbers in one of {tables['train'].path} and {tables['test'].path}, texts in the "
            "other"
        )
    classes = np.unique(np.concatenate(list(values.values())))
    if len(classes) > most:
        raise BadData(f"{tables['train'].path}: column {name} has {len(classes)} distinct values, too many for classes")
    return {split: np.searchsorted(classes, y).astype(np.int64) for split, y in values.items()}


def devices(table: Table, name: str) -> NDArray[Any]:
    """The device of each row: integers if all are, so that 2 comes before 10, else names."""
    table.refuse_empty(name)
    if pa.types.is_integer(table.data.field(name).type):
        return np.asarray(table.data.column(name).combine_chunks().to_numpy(zero_copy_only=False))
    codes, texts = table.words(name)
    if all(re.fullmatch(r"0|-?[1-9]\d{0,17}", each, re.ASCII) for each in texts):
        return np.array([int(each) for each in texts], np.int64)[codes]
    return np.array(texts)[codes]


def is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_picture(kind: Any) -> bool:
    """Whether it is a picture as Hugging Face stores it: a struct with the bytes of the file."""
    return bool(pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0)


def picture_bytes(table: Table, name: str) -> list[bytes | None]:
    """The bytes of every picture. Paths are ignored: a table must not make us read other files."""
    chunks = [chunk.field("bytes") for chunk in table.data.column(name).chunks]
    return [None if one is None else bytes(one) for chunk in chunks for one in chunk.to_pylist()]
