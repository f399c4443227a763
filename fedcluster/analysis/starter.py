"""An experiment file to begin with: chosen for a data set, with a comment on what may be changed."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from fedcluster.data import columns, sources
from fedcluster.data.dataset import Dataset
from fedcluster.data.tables import Table
from fedcluster.errors import BadData, BadExperiment, BadRun
from fedcluster.experiment import SECTIONS, Data, Experiment, parse
from fedcluster.experiment.files import read_overrides
from fedcluster.experiment.overrides import replace_keys
from fedcluster.inputs import read_bytes
from fedcluster.models import tasks, zoo
from fedcluster.reporting import Say

Keys = dict[str, Any]

MAJOR_CLASS = {"devices": 1000, "samples": 500, "partition": "major_class", "rho_device": 0.9}
SMALL = {"devices": 100, "samples": 100, "partition": "major_class", "rho_device": 0.9}
KNOWN: dict[str, dict[str, Keys]] = {
    "digits": {"fleet": SMALL, "model": {"name": "mlp"}},
    "mnist": {"fleet": MAJOR_CLASS, "model": {"name": "cnn"}},
    "fashion_mnist": {"fleet": MAJOR_CLASS, "model": {"name": "cnn"}},
    "cifar10": {"fleet": MAJOR_CLASS, "model": {"name": "cnn"}},
    "femnist": {"fleet": {"partition": "natural"}, "model": {"name": "cnn"}},
    "shakespeare": {
        "data": {"length": 80},
        "fleet": {"partition": "natural"},
        "task": {"name": "next_token"},
        "clusters": {"count": 5, "participation": 0.2},
        "model": {"name": "lstm"},
        "local": {"batch": 10, "lr": 1.0},
    },
}
"""What is known of the data sets that have a name, without opening them."""

COMMENTS = {
    "seed": "every random draw follows from it",
    "rounds": "in a round every cluster has its turn",
    "data.name": "a name, a file, a folder or a Hugging Face id",
    "data.features": "what the model sees, by column",
    "data.target": "the column that it learns",
    "data.device": "the column that says which device holds a row",
    "fleet.devices": "how many devices there are",
    "fleet.samples": 'of each device; "all" shares the rows out',
    "fleet.partition": "major_class, dirichlet, pathological, shards, quantity, iid, natural, ...",
    "fleet.rho_device": "share of a device's samples that are of one class",
    "fleet.alpha": "the smaller, the more devices differ",
    "clusters.method": "random, balanced, timezone, availability, ...",
    "clusters.count": "M: the clusters that take turns; 1 is traditional FedAvg",
    "clusters.participation": "share of a cluster's devices in each of its turns",
    "task.name": "classification, regression, multilabel or next_token",
    "model.name": "logistic, mlp, cnn, alexnet (the paper's), lstm or package.module:name",
    "algorithm.name": "inside the clusters: fedavg, fedprox, scaffold, ... (fedcluster algorithms)",
    "local.steps": "E: steps of a device in its turn",
    "local.batch": "samples a step",
    "local.lr": "learning rate; fedcluster compare --lr tuned looks for the best",
}
HEAD = """# {name}: clusters of devices take turns within every round.
#
#     fedcluster partition {file}    shows the fleet and its clusters
#     fedcluster run {file}          trains
#     fedcluster compare {file}      compares with FedAvg and with training in one place
"""
TAIL = """
# More that a file may have:
#
# [clock]                  simulated time: deadlines, devices that drop out
# dropout = 0.1
#
# [stop]                   an early end
# metric = "test_loss"
# patience = 10
"""


def write(name: str, out: Path, overrides: list[str], say: Say) -> None:
    """Write the experiment file for these data. What was taken for what is said, and doubt is refused with the key that
    settles it."""
    if out.exists():
        raise BadRun(f"{out} exists: name another file with --out")
    text = render(keys_for(name, out.parent, given(overrides), say), name, out.name)
    Experiment(**parse(text, str(out)))
    with out.open("x") as file:
        file.write(text)


def given(overrides: list[str]) -> Keys:
    """The sections and keys of -o."""
    keys: Keys = {}
    replace_keys(keys, read_overrides(overrides))
    for name, value in keys.items():
        if name in SECTIONS and not isinstance(value, dict):
            raise BadExperiment(f"-o {name}: {name} is a section: write a key of it, such as -o data.target=price")
    return keys


def keys_for(name: str, folder: Path, wanted: Keys, say: Say) -> Keys:
    """All keys of the file, in their order; `wanted` ones as they are."""
    keys: Keys = {
        "seed": 0,
        "rounds": 20,
        "data": {"name": name},
        "fleet": {},
        "clusters": {"method": "random", "count": 10, "participation": 0.1},
        "task": {"name": "classification"},
        "model": {},
        "algorithm": {"name": "fedavg"},
        "local": {"steps": 20, "batch": 30, "lr": 0.05},
    }
    chosen = KNOWN[name] if name in KNOWN else chosen_for(name, folder, wanted, say)
    replace_keys(keys, dotted(chosen))
    replace_keys(keys, dotted(wanted))
    return keys


def chosen_for(name: str, folder: Path, wanted: Keys, say: Say) -> dict[str, Keys]:
    """What suits data of the user's own, which are opened for it."""
    data = {"name": name} | named_columns(name, wanted.get("data", {}), say)
    experiment = Experiment(data=data, task=wanted.get("task", {}))
    dataset = sources.open_dataset(experiment.data, say, tasks.target_of(experiment))
    task = tasks.build(experiment, dataset.target)
    if Path(name).exists():
        data["name"] = os.path.relpath(name, folder or ".")
    fleet, devices = fleet_for(dataset)
    say(f"{dataset.name}: {len(dataset.y_train):,} training samples, so there are {devices:,} devices")
    count = max(1, min(10, devices // 2))
    lr = {"regression": 0.01, "next_token": 1.0}.get(task.name, 0.05)
    return {
        "data": data,
        "fleet": fleet,
        "clusters": {"count": count, "participation": 0.1 if devices >= 20 * count else 0.5},
        "task": {"name": task.name},
        "model": {"name": model_for(dataset)},
        "local": {"lr": lr, "batch": 10 if dataset.vocabulary else 30},
    }


def fleet_for(dataset: Dataset) -> tuple[Keys, int]:
    """The devices that the data name, or else one for every fifty samples, whose class mixes differ."""
    if dataset.device_train is not None:
        return {"partition": "natural"}, len(np.unique(dataset.device_train))
    devices = min(1000, max(2, len(dataset.y_train) // 50))
    if dataset.target == "class":
        return {"devices": devices, "samples": "all", "partition": "dirichlet", "alpha": 0.5}, devices
    return {"devices": devices, "samples": "all", "partition": "iid"}, devices


def model_for(dataset: Dataset) -> str:
    """The default model, but the CNN in place of the paper's AlexNet, which takes ten times as long."""
    name = zoo.default_name(dataset.spec)
    return "cnn" if name == "alexnet" else name


def named_columns(name: str, wanted: Keys, say: Say) -> Keys:
    """The keys of [data] that name the columns of a table; nothing for other data."""
    path = Path(name)
    files = sources.files_in(path) if path.is_dir() else {"train": path} if path.suffix in sources.TABLES else {}
    if not files or not files["train"].is_file() or "tokenizer" in wanted:
        return dict(wanted)
    table = Table(files["train"], read_bytes(files["train"], "data.name"))
    there = table.data.column_names
    target = wanted.get("target") or columns.label_column(table)
    if target is None:
        raise BadData(
            f"{name} has the columns {', '.join(there[:50])}: say which one to predict, -o data.target=NAME, or, for "
            "the next token of a text, -o data.tokenizer=characters"
        )
    device = wanted.get("device") or (columns.DEVICE if columns.DEVICE in there else None)
    keys = {"target": target} | ({"device": device} if device else {})
    used = {device, *([target] if isinstance(target, str) else target)}
    if "features" not in wanted:
        fitting = [column for column in there if column not in used and is_feature(table, column, say)]
        if not fitting:
            raise BadData(f"{name} has no columns besides {', '.join(sorted(map(str, used)))} that can be features")
        pictures = [column for column in fitting if columns.is_picture(table.data.field(column).type)]
        keys["features"] = pictures[:1] or fitting
    return keys | wanted


def is_feature(table: Table, column: str, say: Say) -> bool:
    """Whether a column may be a feature; why not is said."""
    try:
        columns.check_identifiers(table, [column])
        columns.kind_of(table, column, Data(features=(column,)))
    except BadData as error:
        say(f"left out: {str(error).partition(': ')[2].rpartition(': ')[0]}")
        return False
    return True


def dotted(keys: Keys) -> list[tuple[str, Any]]:
    """Keys of sections as section.key."""
    flat: list[tuple[str, Any]] = []
    for name, value in keys.items():
        flat += [(f"{name}.{key}", one) for key, one in value.items()] if isinstance(value, dict) else [(name, value)]
    return flat


def render(keys: Keys, name: str, file: str) -> str:
    """The file's text. Values are written as JSON, which TOML can read for what a file may hold here."""
    lines = [HEAD.format(name=plain(name), file=plain(file)).rstrip("\n")]
    for section, values in keys.items():
        if not isinstance(values, dict):
            lines.append(line(section, section, values))
        elif values:
            lines += ["", f"[{section}]", *(line(f"{section}.{key}", key, value) for key, value in values.items())]
    return "\n".join(lines) + "\n" + TAIL


def plain(name: str) -> str:
    """A name in a comment, in one line."""
    return name if name.isprintable() else json.dumps(name)


def line(path: str, key: str, value: Any) -> str:
    text = f"{key} = {toml(value)}"
    return f"{text:<27} # {COMMENTS[path]}" if path in COMMENTS else text


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(one)}" for key, one in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False, default=str)
