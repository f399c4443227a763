"""The device: its own data, the learner that the server asked for, and what it keeps from one turn to the next.

It trains by the simulator's own code. Of the server it takes numbers and names of ours, never code: a model or an
algorithm of one's own (`package.module:name`) is used only where the device was told to allow it.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from fedcluster.data import sources
from fedcluster.data.dataset import Dataset
from fedcluster.data.partition import Partition, one_device
from fedcluster.errors import BadData, BadExperiment
from fedcluster.experiment import Experiment, load
from fedcluster.fleet import fleet
from fedcluster.flower.messages import Unreadable, pack_tensors, unpack_tensors
from fedcluster.flower.registry import NAME, Registration
from fedcluster.state import Message
from fedcluster.training.executors.in_process import InProcess
from fedcluster.training.setup import build_trainer

KEPT = "fedcluster.kept"
HELD = "fedcluster.held"
PLAN = ("seed", "shape", "classes", "model", "frozen", "algorithm", "local", "transforms", "scale", "shift")


@dataclass(frozen=True)
class Identity:
    """What a device is told when it is started: Flower's node config. `init` is a copy of the experiment's
    `model.init`, which a device needs only where the model has frozen weights: the server never sends them."""

    device: str
    data: str
    timezone: str = ""
    slots: str = ""
    tell_labels: bool = False
    allow: tuple[str, ...] = ()
    init: str = ""

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Identity":
        device, data = str(config.get("device", "")), str(config.get("data", ""))
        if not NAME.fullmatch(device):
            raise BadExperiment(f"device {device!r}: an id is made of letters, digits and ._-, 64 of them at most")
        if not data:
            raise BadData("a device needs data: a path, or a name that fedcluster knows")
        allow = tuple(name for name in str(config.get("allow", "")).split(",") if name)
        told = bool(config.get("tell-labels", False))
        zone, slots, init = (str(config.get(name, "")) for name in ("timezone", "slots", "init"))
        return cls(device, data, zone, slots, told, allow, init)

    def config(self) -> dict[str, Any]:
        """The reverse of `of`."""
        words = {"device": self.device, "data": self.data, "timezone": self.timezone, "slots": self.slots}
        return words | {"tell-labels": self.tell_labels, "allow": ",".join(self.allow), "init": self.init}


class Device:
    """Loaded once, and then at the server's service until it ends."""

    def __init__(self, identity: Identity, dataset: Dataset | None = None) -> None:
        self.identity = identity
        self.dataset = dataset or sources.open_dataset(identity.data, quietly)
        self.plan = ""
        self.executor: InProcess | None = None

    @property
    def samples(self) -> int:
        return len(self.dataset.y_train)

    def registration(self) -> Registration:
        labels = np.bincount(self.dataset.y_train.numpy(), minlength=self.dataset.classes).tolist()
        return Registration(
            device=self.identity.device,
            samples=self.samples,
            shape=list(self.dataset.shape),
            classes=self.dataset.classes,
            timezone=self.identity.timezone,
            slots=self.identity.slots,
            labels=labels if self.identity.tell_labels else None,
        )

    def prepare(self, plan: str) -> InProcess:
        """The simulator's executor over this device alone. Made anew only when the server's plan is another one."""
        if self.executor is None or plan != self.plan:
            self.executor, self.plan = self.build(plan), plan
        return self.executor

    def build(self, text: str) -> InProcess:
        try:
            plan = json.loads(text)
            if not isinstance(plan, dict) or set(plan) != set(PLAN):
                raise Unreadable("a plan that is not one of ours")
            classes, model = int(plan["classes"]), str(plan["model"])
            for name in (model, plan["algorithm"]["name"], *plan["transforms"]):
                self.check_allowed(str(name))  # before anything is imported
            keys = {key: plan[key] for key in ("seed", "algorithm", "local", "transforms")}
            init = {"init": self.identity.init} if plan["frozen"] is not None and self.identity.init else {}
            experiment = Experiment(model={"name": model} | init, **keys)
        except BadExperiment as error:
            raise Unreadable(f"a plan that cannot be followed ({error})") from None
        except (ValueError, TypeError, KeyError) as error:
            raise Unreadable(f"a plan that cannot be followed ({type(error).__name__})") from None
        dataset = self.like(plan["shape"], classes, plan["scale"], plan["shift"])
        trainer = build_trainer(experiment, dataset.shape, classes)
        if trainer.flat_model.frozen_digest() != plan["frozen"]:
            raise BadData(
                "the frozen weights of the model differ from the server's: where the experiment has model.init, join "
                "with --init and a copy of that file; else use the server's versions of the model's code and files"
            )
        return InProcess(trainer, dataset, one_device(np.arange(self.samples), dataset))

    def check_allowed(self, name: str) -> None:
        if ":" in name and name not in self.identity.allow:
            raise BadExperiment(f"the server asks for {name}, which this device does not allow: join with --allow")

    def like(self, shape: list[int], classes: int, scale: Any, shift: Any) -> Dataset:
        """Our data as the federation sees them: standardised by the server's numbers where it has them."""
        dataset = self.dataset
        if list(dataset.shape) != shape or dataset.classes > classes:
            raise BadData(
                f"{dataset.name} has samples {list(dataset.shape)} of {dataset.classes} classes, "
                f"but the federation learns {shape} of {classes}"
            )
        return dataset if scale is None else dataset.standardised(scale, shift)


def quietly(text: str) -> None:
    """Where data come from is said by who asks for them."""


@lru_cache(maxsize=1)
def simulated(path: str) -> tuple[Dataset, Partition, str]:
    """Data, partition and `model.init` of an experiment."""
    experiment = load(Path(path))
    dataset = sources.open_dataset(experiment.data.name, quietly)
    _, partition = fleet.build(experiment.fleet, dataset, experiment.seed)
    return partition.dataset or dataset, partition, experiment.model.init or ""


@lru_cache(maxsize=256)
def played(path: str, k: int) -> Device:
    """Device k of an experiment's simulated fleet, for Flower's simulation, where one process plays many."""
    dataset, partition, init = simulated(path)
    rows = partition.sample_indices(k)
    x, y = dataset.x_train.numpy()[rows], dataset.y_train.numpy()[rows]
    share = Dataset(x, y, dataset.x_test[:1].numpy(), dataset.y_test[:1].numpy(), classes=dataset.classes)
    return Device(Identity(str(k), path, init=init), share)


def recall(state: RecordDict, run: str, turn: int) -> Message | None:
    """What the device kept after `turn` of this run: nothing before its first, or when it was lost."""
    kept = state.config_records.get(KEPT)
    if turn == 0 or kept is None or kept.get("run") != run:
        return None
    prefix = f"{turn}/"
    found = {name.removeprefix(prefix): data for name, data in kept.items() if name.startswith(prefix)}
    return unpack_tensors(found) or None


def hold(state: RecordDict, cycle: str, phase: int, phases: int, received: Message) -> Message:
    """Everything received in this cycle. What earlier exchanges brought is not sent again, so it is held until then."""
    held = state.config_records.get(HELD)
    state.pop(HELD, None)
    if phase > 0:
        if held is None or held.get("cycle") != cycle:
            raise Unreadable("a later exchange of a cycle whose first one did not come here")
        received = unpack_tensors({name: data for name, data in held.items() if name != "cycle"}) | received
    if phase + 1 < phases:
        state[HELD] = ConfigRecord({"cycle": cycle, **pack_tensors(received)})
    return received


def remember(state: RecordDict, run: str, began: int, before: Message | None, turn: int, after: Message) -> None:
    """Keep both sides of a cycle: should the server not have heard of it, it is taken again from where it began."""
    kept: dict[str, Any] = {"run": run}
    for number, message in ((began, before), (turn, after)):
        if message:
            kept |= {f"{number}/{name}": data for name, data in pack_tensors(message).items()}
    state[KEPT] = ConfigRecord(kept)
