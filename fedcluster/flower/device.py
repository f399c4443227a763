"""The device: its own data, a trainer built from the server's plan, and the state that it keeps between cycles.

It trains with the simulator's own code. From the server it takes numbers and names of known parts, never code: code
outside the package (`package.module:name`) is used only if the device was started with `--allow`.
"""

import json
import logging
import secrets
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from fedcluster.data import sources
from fedcluster.data.dataset import Dataset, DataSpec
from fedcluster.data.held_out import held_out_sizes, hold_out
from fedcluster.data.partition import HeldOut, Partition, one_device
from fedcluster.errors import BadData, BadExperiment
from fedcluster.experiment import Data, Experiment, load
from fedcluster.fleet import fleet
from fedcluster.flower.limits import read_limits
from fedcluster.flower.messages import InvalidMessage, pack_tensors, unpack_tensors
from fedcluster.flower.registry import DEVICE_ID, Registration, outputs_of
from fedcluster.flower.secure_parts import SecureParts
from fedcluster.models import tasks
from fedcluster.models.metrics import Metric
from fedcluster.models.tasks import Task
from fedcluster.state import Tensors
from fedcluster.training.evaluation import Evaluator, Sums
from fedcluster.training.executors.in_process import InProcess
from fedcluster.training.trainer import build_trainer, without_engine

STATE = "fedcluster.device_state"  # records in Flower's Context
RECEIVED = "fedcluster.received"
PLAN = (
    "seed",
    "data",
    "model",
    "frozen",
    "task",
    "metrics",
    "test_share",
    "algorithm",
    "local",
    "transforms",
    "scale",
    "shift",
    "standardise",
    "privacy",
)

logger = logging.getLogger("flwr")


@dataclass(frozen=True)
class Identity:
    """What a device is given when it is started, Flower's node config: its id, its data, and what it may send. `init`
    is a copy of the experiment's `model.init`, needed only for frozen weights, which the server never sends. `columns`
    is an experiment file whose [data] and [task] name the columns of the device's table: the server cannot ask for
    others. `limits` is a file with the limits that the device sets. `certificates` is the folder with its key and, for
    secure aggregation, the public keys of the others."""

    device: str
    data: str
    timezone: str = ""
    slots: str = ""
    tell_labels: bool = False
    allow: tuple[str, ...] = ()
    init: str = ""
    columns: str = ""
    tell_statistics: bool = False
    evaluate: bool = False
    limits: str = ""
    certificates: str = ""

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Identity":
        device, data = str(config.get("device", "")), str(config.get("data", ""))
        if not DEVICE_ID.fullmatch(device):
            raise BadExperiment(f"device {device!r}: use letters, digits and ._- only, at most 64 characters")
        if not data:
            raise BadData("a device needs data: a path or the name of a known data set")
        allow = tuple(name for name in str(config.get("allow", "")).split(",") if name)
        tell_labels = bool(config.get("tell-labels", False))
        names = ("timezone", "slots", "init", "columns", "limits", "certificates")
        zone, slots, init, columns, limits, certificates = (str(config.get(name, "")) for name in names)
        tell_statistics = bool(config.get("tell-statistics", False))
        evaluate = bool(config.get("evaluate", False))
        return cls(
            device,
            data,
            zone,
            slots,
            tell_labels,
            allow,
            init,
            columns,
            tell_statistics,
            evaluate,
            limits,
            certificates,
        )

    def config(self) -> dict[str, Any]:
        """The inverse of `of`."""
        texts = {"device": self.device, "data": self.data, "timezone": self.timezone, "slots": self.slots}
        texts |= {"allow": ",".join(self.allow), "init": self.init, "columns": self.columns}
        told = {"tell-labels": self.tell_labels, "tell-statistics": self.tell_statistics}
        files = {"limits": self.limits, "certificates": self.certificates}
        return texts | told | files | {"evaluate": self.evaluate}


class Device:
    """A device with its data loaded; its trainer is built when the first plan comes."""

    def __init__(self, identity: Identity, dataset: Dataset | None = None) -> None:
        self.identity, self.limits = identity, read_limits(identity.limits)
        self.data, self.target = own_columns(identity)
        self.secret = secrets.randbits(128)  # the seed of our own noise
        self.statistics: dict[str, tuple[float, float, float]] = {}
        if dataset is None and identity.columns:
            self.statistics = sources.moments(self.data, self.target)
            if self.statistics and not identity.tell_statistics:
                raise BadExperiment(
                    f"{', '.join(list(self.statistics)[:3])}: devices have to agree on how numbers are standardised: "
                    f"give data.standardise in {identity.columns}, or join with --tell-statistics"
                )
        self.said: list[str] = []  # what was taken for what
        self.dataset = dataset or self.open(dict.fromkeys(self.statistics, (0.0, 1.0)))
        self.plan = ""
        self.executor: InProcess | None = None
        self.evaluator: Evaluator | None = None
        self.held_out: HeldOut | None = None
        self.secure: SecureParts | None = None

    def open(self, scales: dict[str, Any]) -> Dataset:
        """Our data, with columns of numbers standardised by these means and deviations."""
        given = self.data.standardise if isinstance(self.data.standardise, dict) else {}
        keys = {key: value for key, value in self.data if value is not None}
        self.said = []
        return sources.open_device(
            Data(**keys | {"standardise": given | scales or False}), self.target, self.said.append
        )

    @property
    def samples(self) -> int:
        return len(self.dataset.y_train)

    def registration(self) -> Registration:
        spec, labels = self.dataset.spec, None
        if self.identity.tell_labels:
            labels = np.bincount(self.dataset.labels("--tell-labels"), minlength=self.dataset.classes).tolist()
        return Registration(
            device=self.identity.device,
            samples=self.samples,
            shape=list(spec.shape),
            target=spec.target,
            outputs=spec.outputs,
            vocabulary=spec.vocabulary,
            timezone=self.identity.timezone,
            slots=self.identity.slots,
            labels=labels,
            test_samples=len(self.dataset.y_test) if self.identity.evaluate else None,
            statistics=self.statistics or None,
        )

    def prepare(self, plan: str) -> InProcess:
        """The simulator's executor with this device alone, built again only when the plan changes."""
        if self.executor is None or plan != self.plan:
            self.executor, self.plan, self.evaluator = self.build(plan), plan, None
        return self.executor

    def evaluate(self, plan: str, k: int, received: Tensors) -> tuple[int, Sums]:
        """The number of samples on which we score the model, as device k, and the sums that our scores are made
        from."""
        if not self.identity.evaluate:
            raise BadExperiment("this device does not let the server ask for its scores (--evaluate)")
        executor = self.prepare(plan)
        trainer = executor.trainer
        if self.held_out is None:
            raise BadData("this device holds out no samples")
        if received.keys() != {"model"} or received["model"].shape != trainer.flat_model.w.shape:
            raise InvalidMessage("not the model of the plan")
        if self.evaluator is None:
            metrics = self.metrics(trainer.task)
            self.evaluator = Evaluator(trainer.flat_model, executor.dataset, None, trainer.task, metrics)
        self.evaluator.load(received["model"])
        x, y = self.held_out.samples(k)
        return len(y), self.evaluator.sums(map, x, y, self.evaluator.metrics)

    @property
    def secure_parts(self) -> SecureParts:
        """This device's parts in secure sums."""
        if self.secure is None:
            self.secure = SecureParts(self.identity.device, self.identity.certificates, self.limits)
        return self.secure

    def metrics(self, task: Task) -> list[Metric]:
        """Those of the plan. Their code has to be allowed, as all other, but is not needed for training."""
        names = json.loads(self.plan)["metrics"]
        for name in names or ():
            self.check_allowed(str(name))
        return tasks.metrics_of(Experiment(metrics=names), task)

    def build(self, text: str) -> InProcess:
        plan = read_plan(text)
        task = plan["task"]
        for name in (plan["model"], task["name"], task.get("loss"), plan["algorithm"]["name"], *plan["transforms"]):
            self.check_allowed(str(name))  # before anything is imported
        keys = {key: plan[key] for key in ("seed", "task", "algorithm", "local", "transforms")}
        keys |= {"fleet": {"test_share": plan["test_share"]}, "privacy": plan["privacy"]}
        init = {"init": self.identity.init} if plan["frozen"] is not None and self.identity.init else {}
        try:
            spec = DataSpec.read(plan["data"])
            experiment = Experiment(model={"name": str(plan["model"])} | init, **keys)
        except BadExperiment as error:
            raise InvalidMessage(f"a plan that cannot be followed ({error})") from None
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidMessage(f"a plan that cannot be followed ({type(error).__name__})") from None
        if self.statistics:
            self.dataset = self.open(read_scales(plan["standardise"], self.statistics))
            logger.info("%s", "; ".join(self.said))
        dataset = self.prepared(spec, plan["scale"], plan["shift"])
        trainer = build_trainer(experiment, spec, secret=self.secret)
        if trainer.flat_model.frozen_digest() != plan["frozen"]:
            raise BadData(
                "the frozen weights of the model differ from the server's: if the experiment has model.init, join with "
                "--init and a copy of that file; else use the server's versions of the model's code and files"
            )
        if slower := without_engine(trainer.flat_model):
            logger.warning("%s", slower)
        partition = own_partition(dataset, experiment.fleet.test_share, experiment.seed)
        self.held_out = partition.held_out
        self.limits.check(trainer, int(partition.sizes[0]))
        return InProcess(trainer, dataset, partition)

    def check_allowed(self, name: str) -> None:
        if ":" in name and name not in self.identity.allow:
            raise BadExperiment(f"the server asks for {name}, which this device does not allow (--allow)")

    def prepared(self, spec: DataSpec, scale: Any, shift: Any) -> Dataset:
        """The device's data with the federation's kind of targets, standardised with the server's scale and shift where
        the plan has them."""
        dataset = self.dataset.with_target(spec.target, "the federation")
        ours = dataset.spec
        fewer_allowed = spec.target in ("class", "token")
        if (
            ours.shape != spec.shape
            or (ours.outputs > spec.outputs if fewer_allowed else ours.outputs != spec.outputs)
            or ours.vocabulary > spec.vocabulary
        ):
            raise BadData(
                f"{dataset.name} has samples {list(ours.shape)} of {outputs_of(ours)}, but the federation learns "
                f"{list(spec.shape)} of {outputs_of(spec)}"
            )
        return dataset if scale is None else dataset.standardised(scale, shift)


def own_partition(dataset: Dataset, share: float, seed: int) -> Partition:
    """The samples that this device trains on, and those on which it scores models: the share that it holds out, else
    its own test samples."""
    everything = one_device(np.arange(len(dataset.y_train)), dataset)
    if share == 0:
        own = HeldOut(np.array([len(dataset.y_test)]), lambda k: (dataset.x_test, dataset.y_test))
        return replace(everything, held_out=own)
    return hold_out(everything, share, dataset, seed) if held_out_sizes(everything.sizes, share).any() else everything


def read_plan(text: str) -> dict[str, Any]:
    """A plan of the right form; its values are not checked yet."""
    try:
        plan = json.loads(text)
    except (ValueError, RecursionError):
        plan = None
    if not isinstance(plan, dict) or set(plan) != set(PLAN):
        raise InvalidMessage("a plan with unknown or missing keys")
    parts = plan["task"], plan["algorithm"]
    named = all(isinstance(part, dict) and "name" in part for part in parts)
    if not named or not isinstance(plan["transforms"], list) or not isinstance(plan["metrics"], list | None):
        raise InvalidMessage("a plan without the names of task, algorithm, transforms and metrics")
    return plan


def own_columns(identity: Identity) -> tuple[Data, str | None]:
    """What the columns of the device's table are, and the kind of its targets. Without a file that says it, numbers
    stay as they are."""
    if not identity.columns:
        return Data(name=identity.data, standardise=False), None
    described = load(Path(identity.columns))
    keys = {key: value for key, value in described.data if value is not None}
    return Data(**keys | {"name": identity.data}), tasks.target_of(described)


def read_scales(given: Any, columns: Collection[str]) -> dict[str, tuple[float, float]]:
    """The plan's `standardise`: mean and deviation of every one of these columns."""
    try:
        scales = {str(name): (float(mean), float(deviation)) for name, (mean, deviation) in given.items()}
        if scales.keys() != set(columns) or not all(isfinite(m) and isfinite(d) and d > 0 for m, d in scales.values()):
            raise ValueError("other columns")
    except (ValueError, TypeError, AttributeError, OverflowError):
        raise InvalidMessage("a plan without the mean and deviation of our columns") from None
    return scales


def silent(text: str) -> None:
    """Prints nothing."""


@lru_cache(maxsize=1)
def simulated_fleet(path: str) -> tuple[Dataset, Partition, Experiment]:
    """Data and partition of an experiment."""
    experiment = load(Path(path))
    dataset = sources.open_dataset(experiment.data, silent, tasks.target_of(experiment))
    everything = experiment.fleet.model_copy(update={"test_share": 0.0})  # devices hold out samples themselves
    _, partition = fleet.build(everything, dataset, experiment.seed)
    return partition.dataset or dataset, partition, experiment


@lru_cache(maxsize=256)
def simulated_device(path: str, k: int) -> Device:
    """Device k of an experiment's simulated fleet, for Flower's simulation, where one process is many devices."""
    dataset, partition, experiment = simulated_fleet(path)
    rows = partition.sample_indices(k)
    x, y = dataset.x_train.numpy()[rows], dataset.y_train.numpy()[rows]
    given = {name: getattr(dataset, name) for name in ("target", "outputs", "vocabulary", "target_scale")}
    tested = partition.held_out if partition.held_out and partition.held_out.sizes[k] else None
    x_test, y_test = tested.samples(k) if tested else (dataset.x_test[:1], dataset.y_test[:1])
    share = Dataset(x, y, x_test.numpy(), y_test.numpy(), **given)
    evaluate = tested is not None or experiment.fleet.test_share > 0
    return Device(Identity(str(k), path, init=experiment.model.init or "", evaluate=evaluate), share)


def load_state(context: RecordDict, run: str, number: int) -> Tensors | None:
    """The device state after phase `number` of this run; None before the first phase, or when it was lost."""
    stored = context.config_records.get(STATE)
    if number == 0 or stored is None or stored.get("run") != run:
        return None
    prefix = f"{number}/"
    found = {name.removeprefix(prefix): data for name, data in stored.items() if name.startswith(prefix)}
    return unpack_tensors(found) or None


def store_state(
    context: RecordDict, run: str, cycle_start: int, before: Tensors | None, number: int, after: Tensors
) -> None:
    """Store the device state from before the cycle and from after this phase: if the reply is lost, the server repeats
    the cycle from where it began."""
    stored: dict[str, Any] = {"run": run}
    for at, tensors in ((cycle_start, before), (number, after)):
        if tensors:
            stored |= {f"{at}/{name}": data for name, data in pack_tensors(tensors).items()}
    context[STATE] = ConfigRecord(stored)


def add_received(context: RecordDict, cycle: str, phase: int, phases: int, received: Tensors) -> Tensors:
    """Everything received in this cycle. Later phases do not send again what an earlier one sent, so it is stored until
    the last phase."""
    stored = context.config_records.get(RECEIVED)
    context.pop(RECEIVED, None)
    if phase > 0:
        if stored is None or stored.get("cycle") != cycle:
            raise InvalidMessage("a later phase of a cycle whose first phase did not reach this device")
        received = unpack_tensors({name: data for name, data in stored.items() if name != "cycle"}) | received
    if phase + 1 < phases:
        context[RECEIVED] = ConfigRecord({"cycle": cycle, **pack_tensors(received)})
    return received
