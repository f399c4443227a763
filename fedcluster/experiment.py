"""The experiment: one frozen, validated description of a run. TOML in, TOML out, a hash.

Every default is the paper's where the paper has one. Where a key takes a name, Python code may give the
thing itself (a function, a module, a data set) and a file may give `package.module:name`.
"""

import difflib
import hashlib
import json
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, time
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tomli_w
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fedcluster.errors import BadData, BadExperiment
from fedcluster.inputs import MOST_TEXT, read_bytes

DATASETS = ("digits", "mnist", "fashion_mnist", "cifar10", "femnist", "shakespeare")
TOKENIZERS = ("characters", "bytes")
WITH_DEVICES = "devices"  # data that only the devices of a federation have
CLUSTERINGS = (
    "random",
    "redrawn",
    "major_class",
    "balanced",
    "similar",
    "timezone",
    "availability",
    "file",
)
TRACE_FORMATS = ("intervals", "state_changes", "flash", "fedscale")
MODELS = ("alexnet", "cnn", "mlp", "logistic", "lstm")
LOCAL_OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")


def check_name(value: Any, names: Iterable[str]) -> Any:
    """A name from the list, `package.module:name`, or in Python the thing itself."""
    if isinstance(value, str) and value not in names and ":" not in value:
        raise ValueError(f"= {shown(value)} is not allowed: use {alternatives(names)}package.module:name")
    if not isinstance(value, str) and not callable(value):
        raise ValueError(f"= {shown(value)} is not allowed: use {alternatives(names)}a function")
    return value


def alternatives(names: Iterable[str]) -> str:
    known = ", ".join(names)
    return f"one of {known}, or " if known else ""


def one_of(*names: str) -> AfterValidator:
    return AfterValidator(lambda value: check_name(value, names))


Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, le=1e30)]  # float32 goes to 3e38
NonNegative = Annotated[float, Field(ge=0, le=1e30)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Devices = Annotated[int, Field(ge=1, le=10**7)]  # a fleet is a few columns of this length
Samples = Annotated[int, Field(ge=1, le=10**7)]  # of one device: they are drawn at once
Steps = Annotated[int, Field(ge=1, le=10**6)]


def is_path(text: str) -> str:
    """A text that the operating system can take for a path; whether there is a file is another question."""
    if not text or "\0" in text or not is_text(text):
        raise ValueError(f"= {text[:80]!r} is not allowed: write a path")
    return text


Columns = Annotated[tuple[str, ...], Field(strict=False, min_length=1, max_length=100_000)]
Scale = Annotated[tuple[Annotated[float, Field(ge=-1e30, le=1e30)], Positive], Field(strict=False)]
FilePath = Annotated[str, Field(max_length=4096), AfterValidator(is_path)]
AtLeastOne = Annotated[float, Field(ge=1, le=1e9)]

NORM_BOUND = 10.0  # times the median movement that an update may make
CLAIM_CAP = 5.0  # times the median device's samples that a device's claim counts for, unless accept.sample_cap says


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Data(Section):
    """Where the samples come from, and what the columns of a table are. `name` is a name, a Hugging Face id, a path, or
    in Python the data themselves."""

    name: Any = "digits"
    features: Columns | None = None
    target: str | Columns | None = None
    device: str | None = None
    split: str | Annotated[float, Field(gt=0, lt=1)] | None = None
    categories: Columns | dict[str, Columns] | None = None
    encoding: Literal["one-hot", "codes"] | None = None
    standardise: bool | dict[str, Scale] | None = None
    tokenizer: Annotated[str, AfterValidator(is_path)] | None = None
    length: Annotated[int, Field(ge=1, le=10**6)] | None = None

    @field_validator("name")
    @classmethod
    def name_is_data(cls, name: Any) -> Any:
        if isinstance(name, dict) and name and not any(isinstance(v, str | int | float) for v in name.values()):
            return name  # columns, or splits of them
        if name is None or isinstance(name, int | float | list | tuple | dict | date | time):
            raise ValueError(
                f"= {shown(name)} is not allowed: use a name, a path, package.module:callable, or a Dataset"
            )
        return is_path(name) if isinstance(name, str) else name


class Part(Section):
    """A section that names a part of the program and has the options that the part itself declares as its `Options`.
    The name is one of the part's registry, `package.module:name`, or in Python the class or function itself."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)
    registry: ClassVar[str]
    key: ClassVar[str] = "name"  # which of the section's keys names the part

    @classmethod
    def names(cls) -> dict[str, Any]:
        """The registry. It is imported late: experiments come before the parts that they name."""
        module, _, table = cls.registry.partition(":")
        found: dict[str, Any] = getattr(import_module(module), table)
        return found

    @field_validator("name", "partition", check_fields=False)
    @classmethod
    def name_is_known(cls, name: Any) -> Any:
        return check_name(name, cls.names())

    @model_validator(mode="after")
    def options_are_complete(self) -> "Part":
        """Check the options against the part's own, and fill in their defaults."""
        kind = self.options_class()
        given = self.__pydantic_extra__ or {}
        try:
            filled = kind(**given)
        except ValidationError as error:
            known = [*type(self).model_fields, *kind.model_fields] if self.key != "name" else kind.model_fields
            raise ValueError(f".{describe(error.errors(), known)}") from None
        object.__setattr__(self, "__pydantic_extra__", dict(filled))
        return self

    def find(self) -> Any:
        """The class or function that the name stands for."""
        name = getattr(self, self.key)
        if not isinstance(name, str):
            return name
        names = self.names()
        return names[name] if name in names else import_object(name)

    def options_class(self) -> type[Section]:
        found = self.find()
        kind: type[Section] = getattr(found.func if isinstance(found, partial) else found, "Options", Section)
        return kind

    @property
    def options(self) -> Any:
        return self.options_class()(**(self.__pydantic_extra__ or {}))


class Fleet(Part):
    """Which devices there are, what is known of them, and how the training samples are partitioned over them.

    With `partition = "natural"` the data name the devices, otherwise the fleet file `path`, the trace `availability` or
    `devices` does. `world` generates what is known of them. `samples` of each device, or "all": the training set is
    shared out. `test_share` of each device's samples is not trained on, but kept to score the model on that device. The
    partition declares options of its own."""

    registry = "fedcluster.data.partitions.registry:PARTITIONS"
    key = "partition"
    devices: Devices | None = None
    samples: Samples | Literal["all"] | None = None
    partition: Any = "major_class"
    path: FilePath | None = None
    availability: FilePath | None = None
    trace_format: Annotated[str | Callable[..., Any], one_of(*TRACE_FORMATS)] | None = None
    world: Literal["diurnal"] | None = None
    date: str = "2026-01-01"
    test_share: Annotated[float, Field(ge=0, le=0.9)] = 0.0

    def __init__(self, **keys: Any) -> None:  # any key: the partition declares its own
        super().__init__(**keys)

    @model_validator(mode="before")
    @classmethod
    def default_sizes(cls, keys: Any) -> Any:
        """The paper's 1000 devices of 500 samples, or what the partition declares."""
        if not isinstance(keys, dict) or keys.get("partition") == "natural":
            return keys
        described = keys.get("path") is not None or keys.get("availability") is not None
        named = keys.get("partition", "major_class")
        method = cls.names().get(named) if isinstance(named, str) else None
        samples = 500 if method is None else method.samples
        if named == "dirichlet" and keys.get("min_samples") is not None:
            samples = "all"
        return ({} if described else {"devices": 1000}) | {"samples": samples} | keys

    @field_validator("date")
    @classmethod
    def date_is_one(cls, day: str) -> str:
        try:
            return date.fromisoformat(day).isoformat()
        except ValueError:
            raise ValueError(f"= {shown(day)} is not allowed: write a day as YYYY-MM-DD") from None

    @model_validator(mode="after")
    def generated_or_described(self) -> "Fleet":
        if self.trace_format is not None and self.availability is None:
            raise ValueError("has trace_format, but no availability: name the trace's file, or leave out trace_format")
        if self.world is not None and (self.path is not None or self.availability is not None):
            raise ValueError("has world, a generated population, and path or availability: give one or the other")
        return self


class Clusters(Section):
    """Who takes turns with whom. With `method = "file"` the file says how many clusters there are."""

    method: Annotated[str | Callable[..., Any], one_of(*CLUSTERINGS)] = "random"
    count: Annotated[int, Field(ge=1, le=10**6)] | None = None
    rho_cluster: Share = 0.1
    features: Literal["labels", "gradients"] = "labels"
    path: FilePath | None = None
    free_seconds: Seconds = 600.0
    soft: bool = False
    order: Literal["cyclic", "reshuffle", "once", "random", "balanced"] = "reshuffle"
    weighting: Literal["cluster", "sample"] = "cluster"
    participation: Annotated[float, Field(gt=0, le=1)] = 0.1

    @model_validator(mode="before")
    @classmethod
    def paper_count(cls, keys: Any) -> Any:
        if isinstance(keys, dict) and keys.get("method") != "file":
            return {"count": 10} | keys
        return keys

    @model_validator(mode="after")
    def file_has_a_path(self) -> "Clusters":
        if self.method == "file" and self.path is None:
            raise ValueError('with method = "file" needs path, a CSV file with columns device,cluster')
        if self.soft and self.method != "availability":
            raise ValueError('.soft = true needs method = "availability": only there a device fits several clusters')
        return self


class Model(Section):
    """The model, and optionally its start W_0. Left out, the name follows from the samples: alexnet for pictures, mlp
    for rows of numbers, lstm for tokens."""

    name: Annotated[str | Callable[..., Any], one_of(*MODELS)] | None = None
    init: FilePath | None = None


class Algorithm(Part):
    """The federated algorithm that runs inside the clusters."""

    registry = "fedcluster.algorithms.registry:ALGORITHMS"
    name: Any = "fedavg"


class Aggregation(Part):
    """How the accepted updates of a cycle become one."""

    registry = "fedcluster.algorithms.aggregation.registry:AGGREGATORS"
    name: Any = "mean"


class LearningRateSchedule(Part):
    """How the learning rate changes over rounds and cycles."""

    registry = "fedcluster.models.schedules:SCHEDULES"
    name: Any = "constant"


class OpenTask(Section):
    """The options of a task that the data will name."""

    loss: Any = None


class Task(Part):
    """What is learned. Left out, the name follows from the targets of the data."""

    registry = "fedcluster.models.tasks:TASKS"
    name: Any = None

    @field_validator("name")
    @classmethod
    def name_is_known(cls, name: Any) -> Any:
        task = import_module(cls.registry.partition(":")[0]).Task
        return name if name is None or isinstance(name, task) else check_name(name, cls.names())

    def options_class(self) -> type[Section]:
        return OpenTask if self.name is None else super().options_class()

    def named(self, name: str) -> "Task":
        """The same section for a task that it does not name; BadExperiment where the options are not the task's."""
        try:
            return Task(name=name, **{key: value for key, value in self.options if value is not None})
        except ValidationError as error:
            raise BadExperiment(f"task.{describe(error.errors(), Task.model_fields).lstrip('. ')}") from None


class Local(Section):
    """What a device does in its cycle: `steps` optimizer steps on batches drawn with replacement, or `epochs` shuffled
    passes over its own data."""

    optimizer: Literal["sgd", "momentum", "adam", "adamw"] = "sgd"
    steps: Steps | Annotated[tuple[Steps, Steps], Field(strict=False)] | None = None
    epochs: Steps | None = None
    batch: Samples | Literal["full"] = 30
    lr: Positive = 0.01
    momentum: Decay = 0.5
    nesterov: bool = False
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NonNegative | None = None
    clip_norm: Positive | None = None
    schedule: LearningRateSchedule | None = None

    @model_validator(mode="before")
    @classmethod
    def default_steps(cls, keys: Any) -> Any:
        if isinstance(keys, dict) and keys.get("steps") is None and keys.get("epochs") is None:
            return keys | {"steps": 20}
        return keys

    @field_validator("steps")
    @classmethod
    def range_ascends(cls, steps: int | tuple[int, int] | None) -> int | tuple[int, int] | None:
        if isinstance(steps, tuple) and steps[0] > steps[1]:
            raise ValueError(f"= {list(steps)} is not allowed: a range is [least, most], such as [10, 30]")
        return steps

    @model_validator(mode="after")
    def keys_fit(self) -> "Local":
        if self.steps is not None and self.epochs is not None:
            raise ValueError("has both steps and epochs: give one of them")
        if self.nesterov and (self.optimizer != "momentum" or self.momentum == 0):
            raise ValueError('.nesterov = true needs optimizer = "momentum" and a momentum above 0')
        return self

    @property
    def step_range(self) -> tuple[int, int]:
        """The least and the most steps, where `steps` says how many."""
        assert self.steps is not None, "it has epochs"
        return self.steps if isinstance(self.steps, tuple) else (self.steps, self.steps)

    @property
    def decay(self) -> float:
        """The weight decay: torch's default, 0.01 with AdamW and else 0, where none is given."""
        if self.weight_decay is None:
            return 0.01 if self.optimizer == "adamw" else 0.0
        return self.weight_decay

    @property
    def l2(self) -> float:
        """The weight decay as part of the gradient: all of it but AdamW's, which is decoupled."""
        return 0.0 if self.optimizer == "adamw" else self.decay


class Server(Section):
    """What the server does with a cycle's average movement: go `lr` times as far, or feed it to an optimizer. Some
    defaults depend on the optimizer."""

    optimizer: Literal["none", "avgm", "adagrad", "adam", "yogi", "round_momentum", "amplified"] = "none"
    lr: Positive = 1.0
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.99)
    tau: Positive = 1e-3
    memory: Literal["sliding", "held"] | None = None
    schedule: LearningRateSchedule | None = None

    @model_validator(mode="after")
    def defaults_of_the_optimizer(self) -> "Server":
        for key, value in SERVER_DEFAULTS.get(self.optimizer, {}).items():
            if key not in self.model_fields_set:
                object.__setattr__(self, key, value)
        if self.memory is not None and self.optimizer != "round_momentum":
            raise ValueError(f'.memory = "{self.memory}" needs optimizer = "round_momentum"')
        return self


SERVER_DEFAULTS: dict[str, dict[str, Any]] = {
    "adagrad": {"lr": 0.03, "betas": (0.0, 0.99)},
    "adam": {"lr": 0.03},
    "yogi": {"lr": 0.03},
    "round_momentum": {"betas": (0.5, 0.99), "memory": "sliding"},
    "amplified": {"lr": 1.5},
}


class Accept(Section):
    """What an update is held to. `norm_bound`: it may move so many times as far as the median update. `sample_cap`: a
    device counts for so many times the samples of the median device. Left out, a federation, where sample counts are
    claims, has `CLAIM_CAP`, and a simulation, which knows them, has none."""

    norm_bound: AtLeastOne | Literal["off"] = NORM_BOUND
    sample_cap: AtLeastOne | Literal["off"] | None = None

    @property
    def most(self) -> float:
        return math.inf if self.norm_bound == "off" else self.norm_bound

    def cap(self, claimed: bool) -> float:
        if self.sample_cap is None:
            return CLAIM_CAP if claimed else math.inf
        return math.inf if self.sample_cap == "off" else self.sample_cap


class Centralized(Section):
    """The baseline on pooled data. Left out, `steps` spends as many samples a round as the fleet does."""

    steps: Steps | None = None
    batch: Samples | Literal["full"] = 60


class Clock(Section):
    """Simulated time. A cycle is done when its cohort's updates are in, of which `over_select` times as many are asked
    for, or at its deadline (seconds); with fewer than `min_updates` it fails. A device is lost with probability
    `dropout`, besides those that leave while they are at it."""

    deadline: Seconds | None = None
    over_select: Annotated[float, Field(ge=1, le=1000)] = 1.3
    min_updates: Count = 1
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0


class Eval(Section):
    """Which scores are recorded besides those of every round. Every `every` rounds, all devices or a sample of so many
    are scored on samples of their own that they do not train on (see `fleet.test_share`). `best` names the score whose
    best model is kept, such as "test_accuracy"."""

    every: Count = 10
    devices: Devices | Literal["all"] = "all"
    best: str | None = None


class Stop(Section):
    """When a run ends before its last round: once the score `metric` has reached `target`, or has not improved for
    `patience` rounds."""

    metric: str = "test_loss"
    target: float | None = None
    patience: Count | None = None

    @model_validator(mode="after")
    def has_a_condition(self) -> "Stop":
        if self.target is None and self.patience is None:
            raise ValueError("needs target, a score to reach, or patience, a number of rounds without improvement")
        return self


class Experiment(Section):
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    rounds: Count = 100
    method: Literal["fedcluster", "centralized"] = "fedcluster"
    data: Data = Data()
    fleet: Fleet = Field(default_factory=Fleet)
    clusters: Clusters = Clusters()
    model: Model = Model()
    task: Task = Field(default_factory=Task)
    algorithm: Algorithm = Field(default_factory=Algorithm)
    local: Local = Local()
    aggregation: Aggregation = Field(default_factory=Aggregation)
    transforms: Annotated[tuple[Any, ...], Field(strict=False, max_length=100)] = ()
    metrics: Annotated[tuple[Any, ...], Field(strict=False, max_length=100)] | None = None
    server: Server = Server()
    accept: Accept = Accept()
    centralized: Centralized = Centralized()
    clock: Clock | None = None
    eval: Eval = Eval()
    stop: Stop | None = None

    def __init__(self, **keys: Any) -> None:
        try:
            super().__init__(**current_keys(keys))
        except ValidationError as error:
            raise BadExperiment(format_error(error)) from None

    @field_validator("transforms")
    @classmethod
    def transforms_are_named(cls, transforms: tuple[Any, ...]) -> tuple[Any, ...]:
        for given in transforms:
            if isinstance(given, str | int | float | list | dict) and ":" not in str(given):
                raise ValueError(f"= {shown(given)} is not allowed: use package.module:name, or in Python a transform")
        return transforms

    @model_validator(mode="after")
    def local_fits(self) -> "Experiment":
        """Some algorithms assume the step w <- w - lr g, or steps that are linear in g, or plain gradients."""
        found = self.algorithm.find()
        kind = found.func if isinstance(found, partial) else found
        fitting = kind.local_optimizers(self.algorithm.options) if hasattr(kind, "local_optimizers") else None
        if fitting is not None and self.local.optimizer not in fitting:
            extra = self.algorithm.__pydantic_extra__ or {}
            options = "".join(f' and {key} = "{value}"' for key, value in extra.items() if key == "option")
            raise ValueError(
                f'local.optimizer = "{self.local.optimizer}" is not allowed with algorithm = '
                f'"{self.algorithm.name}"{options}: use {" or ".join(fitting)}'
            )
        for key, why in getattr(kind, "unsupported", {}).items():
            if given := getattr(self.local, key):
                raise ValueError(
                    f'local.{key} = {json.dumps(given)} is not allowed with algorithm = "{self.algorithm.name}": {why}'
                )
        return self

    def sections(self) -> dict[str, Any]:
        """Every key that was given or filled in, by section; objects given in Python as they are."""

        def keys(section: Section) -> dict[str, Any]:
            given = {key: value for key, value in section if value is not None}
            found = {key: keys(value) if isinstance(value, Section) else value for key, value in given.items()}
            return {key: value for key, value in found.items() if value != {}}

        return keys(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; things given in Python by the name that finds them again."""
        found = self.sections()
        if not isinstance(name := found["data"]["name"], str):
            found["data"] = found["data"] | {"name": reference(name)}
        plain: dict[str, Any] = json.loads(json.dumps(found, default=reference))
        return plain

    def to_toml(self) -> str:
        return tomli_w.dumps(self.to_dict())

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def override(self, **overrides: Any) -> "Experiment":
        """A copy with keys replaced, validated anew: `override(rounds=5, local={"lr": 0.1})` or `**{"local.lr": 0.1}`.

        The other keys of a section stay, except the options of an algorithm or aggregator that is replaced by another.
        A section object, such as `Local(lr=0.1)`, replaces the whole section.
        """
        keys = self.sections() | {
            "server": self.server.model_dump(exclude_unset=True)
        }  # the rest follows its optimizer
        given: list[tuple[str, Any]] = []
        for key, value in overrides.items():
            if isinstance(value, dict) and isinstance(keys.get(key), dict):
                given += [(f"{key}.{name}", one) for name, one in value.items()]
            else:
                given.append((key, value))
        replace_keys(keys, given)
        return Experiment(**keys)


# Options of algorithms that were keys of [local] before there was [algorithm], with their defaults. The files of runs
# from then have all of them.
FORMERLY_LOCAL = {"mu": 0.1, "beta": 1.0, "eta": 1.0, "option": "II", "reset": "never", "statistics": "per_step"}


# Options of partitions that every file of a run has from when they were keys of [fleet], with partition and default.
FORMERLY_FLEET = {"rho_device": ("major_class", 0.5), "alpha": ("dirichlet", 0.3)}


def current_key(dotted: str) -> str:
    """The key that a key of an earlier version is now."""
    section, _, key = dotted.partition(".")
    if section != "local" or (key not in FORMERLY_LOCAL and key != "algorithm"):
        return dotted
    return "algorithm.name" if key == "algorithm" else f"algorithm.{key}"


def current_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The same experiment with `local.algorithm` and the options of algorithms in [algorithm], where they are now, and
    without the options of other partitions in [fleet]."""
    found, local = dict(keys), keys.get("local")
    if isinstance(fleet := found.get("fleet"), dict):
        other = {key for key, owner in FORMERLY_FLEET.items() if fleet.get("partition", "major_class") != owner[0]}
        found["fleet"] = {
            key: value for key, value in fleet.items() if key not in other or value != FORMERLY_FLEET[key][1]
        }
    if not isinstance(local, dict) or not ({"algorithm", *FORMERLY_LOCAL} & local.keys()):
        return found
    given = found.get("algorithm", {})
    if not isinstance(given, dict | Algorithm):
        return found
    section = dict(given)
    name = local.get("algorithm", section.get("name", "fedavg"))
    if section.get("name", name) != name:
        raise BadExperiment(
            f"local.algorithm = {shown(name)} and algorithm.name = {shown(section['name'])} differ: remove the former"
        )
    section["name"] = name
    try:
        options = Algorithm(name=name).options_class().model_fields
    except ValidationError as error:
        raise BadExperiment(f"algorithm.{describe(error.errors(), Algorithm.model_fields)}") from None
    for key in FORMERLY_LOCAL.keys() & local.keys():
        if key in options:
            section.setdefault(key, local[key])
        elif local[key] != FORMERLY_LOCAL[key]:
            raise BadExperiment(
                f"local.{key} = {shown(local[key])} is not allowed: the algorithm {shown(name)} has no such option"
            )
    found["algorithm"] = section
    found["local"] = {key: value for key, value in local.items() if key not in {"algorithm", *FORMERLY_LOCAL}}
    return found


def load(path: str | Path, overrides: list[str] | None = None) -> Experiment:
    """Read an experiment file and apply `key=value` overrides, each value as TOML would have it."""
    path = Path(path)
    keys = current_keys(parse(read(path), str(path)))
    given: list[tuple[str, Any]] = []
    for override in overrides or []:
        if not is_text(override):
            raise BadExperiment(f"-o {override[:80]!r}: is not UTF-8 text")
        key, equals, raw = override.partition("=")
        if not equals:
            raise BadExperiment(f"-o {override[:80]}: write it as key=value, for example -o clusters.count=5")
        given.append((key.strip(), literal(raw.strip())))
    replace_keys(keys, given)
    for section, key in PATHS:
        resolve_path(keys.get(section), key, path.parent)
    return Experiment(**keys)


PATHS = (
    ("data", "name"),
    ("data", "tokenizer"),
    ("fleet", "path"),
    ("fleet", "availability"),
    ("clusters", "path"),
    ("model", "init"),
)


def read(path: Path) -> str:
    if not path.exists():
        raise BadData(f"{path}: there is no such experiment file")
    try:
        return read_bytes(path, "experiment", MOST_TEXT).decode()
    except UnicodeDecodeError as error:
        raise BadData(f"{path}: cannot be read as text ({error})") from None


def is_text(text: str) -> bool:
    """Whether it is UTF-8: what is not comes from the command line as half characters."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def parse(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise BadExperiment(f"{source}: not valid TOML: nested too deep") from None
    except ValueError as error:  # also what Python says of a number with thousands of digits
        raise BadExperiment(f"{source}: not valid TOML: {error}") from None


def literal(raw: str) -> Any:
    """A TOML value, or a plain word taken as a string."""
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except RecursionError:
        raise BadExperiment(f"-o ...={raw[:40]}...: nested too deep") from None
    except ValueError:
        return raw
    return parsed["value"] if len(parsed) == 1 else raw


EITHER = {"local.steps": "epochs", "local.epochs": "steps"}  # two ways to say one thing, of which a section has one


def replace_keys(keys: dict[str, Any], given: Iterable[tuple[str, Any]]) -> None:
    """Replace keys by the values given for them. local.epochs takes the place of local.steps, and the reverse."""
    for dotted, _ in given:
        section = keys.get(dotted.partition(".")[0])
        if dotted in EITHER and isinstance(section, dict):
            section.pop(EITHER[dotted], None)
    for dotted, value in given:
        set_key(keys, dotted, value)


def set_key(keys: dict[str, Any], dotted: str, value: Any) -> None:
    dotted = current_key(dotted)
    *sections, key = dotted.split(".")
    if sections == ["fleet"] and key == "partition" and isinstance(had := keys.get("fleet"), dict):
        keys["fleet"] = without_options(had, value)
    if len(sections) > 1 and tuple(sections) not in PARTS:
        raise BadExperiment(f"{dotted[:80]} is not a key: write section.key=value")
    for section in sections:
        keys = keys.setdefault(section, {})
        if not isinstance(keys, dict):
            raise BadExperiment(f"{dotted}: {section} is a value, not a section")
    if key == "name" and tuple(sections) in PARTS and keys.get("name", value) != value:
        keys.clear()  # its options are those of another part
    keys[key] = value


PARTS = (("task",), ("algorithm",), ("aggregation",), ("local", "schedule"), ("server", "schedule"))
"""The sections that name a part of the program and have its options."""


def without_options(fleet: dict[str, Any], partition: Any) -> dict[str, Any]:
    """The keys of [fleet] that stay when this partition takes the place of another: not the options of the other, nor
    the samples if they were the other's default."""
    if fleet.get("partition", "major_class") == partition:
        return fleet
    kept = {key: value for key, value in fleet.items() if key in Fleet.model_fields}
    return {key: value for key, value in kept.items() if (key, value) != ("samples", "all")}


def resolve_path(section: Any, key: str, folder: Path) -> None:
    """A relative path is looked for beside the experiment file first, then in the working directory."""
    if isinstance(section, dict) and isinstance(section.get(key), str):
        for place in (folder, Path()):
            if section[key] not in (*DATASETS, *TOKENIZERS, WITH_DEVICES) and there_is(place / section[key]):
                section[key] = str((place / section[key]).resolve())
                return


def there_is(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, or no path at all
        return False


def import_object(name: str, *takes: str) -> Any:
    """What `package.module:name` stands for: a function or a class that takes such arguments."""
    module, _, attribute = name.partition(":")
    try:
        thing = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise BadExperiment(f"{name[:80]}: cannot be imported ({error}); is it on the Python path?") from None
    if not callable(thing):
        raise BadExperiment(f"{name[:80]} is a {type(thing).__name__}: name a function or a class")
    if takes:
        try:
            signature(thing).bind(*takes)
        except TypeError:
            raise BadExperiment(f"{name[:80]} cannot be called with ({', '.join(takes)})") from None
        except ValueError:  # it does not say what it takes
            pass
    return thing


def reference(thing: Any) -> str:
    if isinstance(thing, partial):
        given = [*map(repr, thing.args), *(f"{name}={value!r}" for name, value in sorted(thing.keywords.items()))]
        return f"{reference(thing.func)}({', '.join(given)})"
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}:{named.__qualname__}"


def changes(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """The dotted keys in which two experiments differ."""
    keys = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            keys += changes(before, after, f"{prefix}{key}.")
        elif before != after:
            keys.append(f"{prefix}{key[:80]} (was {shown(before)}, now {shown(after)})")
    return keys


def format_error(error: ValidationError) -> str:
    """The first problem, by the key's path, with what is allowed."""
    problems = error.errors()
    first = problems[0]
    if not first["loc"]:
        return str(first["ctx"]["error"])
    section = SECTIONS.get(str(first["loc"][0]))
    if section is None:
        return describe(problems, Experiment.model_fields)
    inside = [problem | {"loc": problem["loc"][1:]} for problem in problems if problem["loc"][0] == first["loc"][0]]
    others = len({problem["loc"][:2] for problem in problems}) - 1
    if not inside[0]["loc"]:  # of the section as a whole
        if inside[0]["type"] == "value_error":
            return f"{first['loc'][0]} {inside[0]['ctx']['error']}{more(others)}".replace(" .", ".", 1)
        return f"{first['loc'][0]} = {shown(first['input'])} is not allowed: {first['msg']}{more(others)}"
    return f"{first['loc'][0]}.{describe(inside, section.model_fields, others)}"


def describe(problems: Sequence[Any], known: Iterable[str], others: int | None = None) -> str:
    """The first problem with a section that has these keys."""
    first = problems[0]
    key = str(first["loc"][0])[:100] if first["loc"] else ""
    if others is None:
        others = len({problem["loc"][:1] for problem in problems}) - 1
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, known, n=1)
        meant = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(known) or 'none'}"
        return f"{key} is not a key; {meant}{more(others)}"
    if first["type"] == "value_error":
        return f"{key} {first['ctx']['error']}{more(others)}".replace(" .", ".", 1)
    said = dict.fromkeys(problem["msg"] for problem in problems if problem["loc"][:1] == first["loc"][:1])
    return f"{key} = {shown(first['input'])} is not allowed: {'; or '.join(said)}{more(others)}"


def more(others: int) -> str:
    return f" (and {others} more)" if others else ""


def shown(value: Any) -> str:
    """A value in a message: whatever it is, in a few words."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # too deep, or a number of thousands of digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:97]}..."


SECTIONS: dict[str, type[Section]] = {
    "data": Data,
    "fleet": Fleet,
    "clusters": Clusters,
    "model": Model,
    "task": Task,
    "algorithm": Algorithm,
    "local": Local,
    "aggregation": Aggregation,
    "server": Server,
    "accept": Accept,
    "centralized": Centralized,
    "clock": Clock,
    "eval": Eval,
    "stop": Stop,
}
