"""The sections of an experiment: every key, its type and its default, which is the paper's where the paper has one.

`contradiction` says of a section which of its keys do not fit together."""

import math
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from fedcluster.errors import BadExperiment
from fedcluster.experiment.messages import describe
from fedcluster.experiment.parts import Part, Section, check_name, one_in, one_of
from fedcluster.experiment.types import (
    AtLeastOne,
    Columns,
    Count,
    DataName,
    Day,
    Decay,
    Devices,
    FilePath,
    NonNegative,
    Positive,
    Samples,
    Scale,
    Seconds,
    Steps,
    StepsOrRange,
    is_path,
)

DATASETS = ("digits", "mnist", "fashion_mnist", "cifar10", "femnist", "shakespeare")
TOKENIZERS = ("characters", "bytes")
WITH_DEVICES = "devices"  # data that only the devices of a federation have
TRACE_FORMATS = ("intervals", "state_changes", "flash", "fedscale")
TRACKERS = ("tensorboard", "mlflow", "wandb", "csv", "parquet")
LOCAL_OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")
NORM_BOUND = 10.0  # times the median movement that an update may make
CLAIM_CAP = 5.0  # times the median device's samples that a device's claim counts for, unless accept.sample_cap says


class Data(Section):
    """Where the samples come from, and what the columns of a table are. `name` is a name, a Hugging Face id, a path, or
    in Python the data themselves."""

    name: DataName = "digits"
    features: Columns | None = None
    target: str | Columns | None = None
    device: str | None = None
    split: str | Annotated[float, Field(gt=0, lt=1)] | None = None
    categories: Columns | dict[str, Columns] | None = None
    encoding: Literal["one-hot", "codes"] | None = None
    standardise: bool | dict[str, Scale] | None = None
    tokenizer: Annotated[str, AfterValidator(is_path)] | None = None
    length: Annotated[int, Field(ge=1, le=10**6)] | None = None


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
    date: Day = "2026-01-01"
    test_share: Annotated[float, Field(ge=0, le=0.9)] = 0.0

    def __init__(self, **keys: Any) -> None:  # any key: the partition declares its own
        super().__init__(**keys)

    @classmethod
    def defaults(cls, part: Any, keys: dict[str, Any]) -> dict[str, Any]:
        """The paper's 1000 devices of 500 samples, or what the partition declares."""
        if keys.get("partition") == "natural":
            return {}
        described = keys.get("path") is not None or keys.get("availability") is not None
        shared_out = keys.get("partition") == "dirichlet" and keys.get("min_samples") is not None
        samples = "all" if shared_out else 500 if part is None else part.samples
        return ({} if described else {"devices": 1000}) | {"samples": samples}

    def contradiction(self) -> str | None:
        if self.trace_format is not None and self.availability is None:
            return "has trace_format, but no availability: name the trace's file, or leave out trace_format"
        if self.world is not None and (self.path is not None or self.availability is not None):
            return "has world, a generated population, and path or availability: give one or the other"
        return None


class Clusters(Part):
    """Which devices are in the same cluster, and how clusters and devices take turns. The clustering that `method`
    names declares options of its own."""

    registry = "fedcluster.fleet.clustering.registry:CLUSTERINGS"
    key = "method"
    method: Any = "random"
    count: Annotated[int, Field(ge=1, le=10**6)] | None = None
    order: Literal["cyclic", "reshuffle", "once", "random", "balanced"] = "reshuffle"
    weighting: Literal["cluster", "sample"] = "cluster"
    overlap: Annotated[int, Field(ge=0, le=1000)] = 0
    participation: Annotated[float, Field(gt=0, le=1)] = 0.1

    def __init__(self, **keys: Any) -> None:  # any key: the clustering declares its own
        super().__init__(**keys)

    @classmethod
    def defaults(cls, part: Any, keys: dict[str, Any]) -> dict[str, Any]:
        """The paper's 10 clusters, or what the clustering declares."""
        return {"count": 10 if part is None else part.default_count}


class Model(Section):
    """The model, and optionally its start W_0. Left out, the name follows from the samples: alexnet for pictures of
    28x28 and more, mlp for smaller ones and for rows of numbers, lstm for tokens."""

    name: Annotated[Any, one_in("fedcluster.models.zoo:ZOO")] = None
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
    steps: StepsOrRange | None = None
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

    def contradiction(self) -> str | None:
        if self.steps is not None and self.epochs is not None:
            return "has both steps and epochs: give one of them"
        if self.nesterov and (self.optimizer != "momentum" or self.momentum == 0):
            return '.nesterov = true needs optimizer = "momentum" and a momentum above 0'
        return None

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
        return self

    def contradiction(self) -> str | None:
        if self.memory is not None and self.optimizer != "round_momentum":
            return f'.memory = "{self.memory}" needs optimizer = "round_momentum"'
        return None


SERVER_DEFAULTS: dict[str, dict[str, Any]] = {
    "adagrad": {"lr": 0.03, "betas": (0.0, 0.99)},
    "adam": {"lr": 0.03},
    "yogi": {"lr": 0.03},
    "round_momentum": {"betas": (0.5, 0.99), "memory": "held"},
    "amplified": {"lr": 1.5},
}


class Accept(Section):
    """What an update is held to. `norm_bound`: it may move so many times as far as the median update. `cycle_bound`: a
    cycle's aggregate may move the model so many times as far as the median cycle, and is clipped to it. `sample_cap`: a
    device counts for so many times the samples of the median device. Left out, a federation, where sample counts are
    claims, has `CLAIM_CAP`, and a simulation, which knows them, has none."""

    norm_bound: AtLeastOne | Literal["off"] = NORM_BOUND
    sample_cap: AtLeastOne | Literal["off"] | None = None
    cycle_bound: AtLeastOne | None = None

    @property
    def max_movement(self) -> float:
        """`norm_bound` as a number."""
        return math.inf if self.norm_bound == "off" else self.norm_bound

    def cap(self, claimed: bool) -> float:
        if self.sample_cap is None:
            return CLAIM_CAP if claimed else math.inf
        return math.inf if self.sample_cap == "off" else self.sample_cap


class Attack(Part):
    """Malicious devices in a simulation: `share` of all, and whether they are spread over the clusters or fill one
    cluster after the other. The attack that `name` names declares options of its own."""

    registry = "fedcluster.attacks.registry:ATTACKS"
    name: Any = "sign_flip"
    share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    placement: Literal["spread", "concentrated"] = "spread"


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


class Privacy(Section):
    """What the server, and whoever sees the models, may learn of a device.

    With `secure_aggregation` the server learns the sum of a cohort's updates and no single one. More than the share
    `threshold` of a cohort, and at least `min_cohort` devices, have to stay until the end of a cycle; no sum is of
    fewer.

    With `epsilon`, the budget of the whole run, or `noise_multiplier`, z, the models may depend on any one device by
    (epsilon, delta) at most. A device's movement is clipped to the norm `clip`, or to one that follows the median
    movement. `bands` is the number of cycles over which noise of the mechanism "banded" is correlated; left out, it is
    the number of clusters. `sampling` is "poisson" unless the mechanism is "local". Clusters that are made from labels
    or gradients leak outside epsilon, and are refused unless `allow_leaky_clusters`."""

    secure_aggregation: bool = False
    threshold: Annotated[float, Field(ge=0.5, lt=1)] = 2 / 3
    min_cohort: Annotated[int, Field(ge=3, le=10_000)] = 3
    epsilon: Positive | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    clip: Annotated[float, Field(gt=0)] | Literal["adaptive"] | None = None
    noise_multiplier: NonNegative | None = None
    mechanism: Literal["gaussian", "banded", "local"] = "gaussian"
    sampling: Literal["poisson", "fixed"] | None = None
    bands: Count | None = None
    allow_leaky_clusters: bool = False

    def contradiction(self) -> str | None:
        if not self.differential:
            given = [key for key in DIFFERENTIAL if getattr(self, key) != type(self).model_fields[key].default]
            return f"has {given[0]}, but no noise: give epsilon, or noise_multiplier" if given else None
        if self.epsilon is not None and self.noise_multiplier is not None:
            return "has both epsilon and noise_multiplier, and each follows from the other: give one of them"
        for key, remedy in NEEDED.items():
            if getattr(self, key) is None:
                return f"has no {key}: {remedy}"
        if isinstance(self.clip, float) and math.isinf(self.clip) and self.noise_multiplier != 0:
            return ".clip = inf is not allowed with noise, which is in proportion to it: give a number"
        if self.clip == "adaptive" and (self.noise_multiplier == 0 or self.mechanism == "local"):
            return (
                '.clip = "adaptive" needs noise of the server: give a number with mechanism = "local" or without noise'
            )
        if self.bands is not None and self.mechanism != "banded":
            return f'has bands = {self.bands}, an option of mechanism = "banded": remove it, or change that'
        if self.mechanism == "local" and self.sampling == "poisson":
            return '.sampling = "poisson" gains nothing with mechanism = "local": remove it'
        if self.mechanism == "banded" and self.sampling == "fixed":
            return '.mechanism = "banded" is proven for sampling = "poisson" only: remove sampling'
        return None

    @property
    def differential(self) -> bool:
        """Whether there is differential privacy at all."""
        return self.epsilon is not None or self.noise_multiplier is not None

    @property
    def poisson(self) -> bool:
        """Whether every device of a cluster takes part with the same probability, independently of the others."""
        return self.sampling == "poisson" or (self.sampling is None and self.mechanism != "local")


DIFFERENTIAL = ("delta", "clip", "mechanism", "sampling", "bands", "allow_leaky_clusters")
NEEDED = {
    "delta": "choose one well below 1 / (number of devices)",
    "clip": 'give the norm to which movements are clipped, or "adaptive"',
}


class Eval(Section):
    """Which scores are recorded besides those of every round. Every `every` rounds, all devices or a sample of so many
    are scored on samples of their own that they do not train on (see `fleet.test_share`). `best` names the score whose
    best model is kept, such as "test_accuracy"."""

    every: Count = 10
    devices: Devices | Literal["all"] = "all"
    best: str | None = None


class Pluralistic(Section):
    """A model for each cluster, besides W: the average over the models after its cycles, "uniform" or exponential with
    this decay."""

    average: Literal["uniform"] | Annotated[float, Field(gt=0, lt=1)] = "uniform"


class Stop(Section):
    """When a run ends before its last round: once the score `metric` has reached `target`, or has not improved for
    `patience` rounds."""

    metric: str = "test_loss"
    target: float | None = None
    patience: Count | None = None

    def contradiction(self) -> str | None:
        if self.target is None and self.patience is None:
            return "needs target, a score to reach, or patience, a number of rounds without improvement"
        return None


class Track(Section):
    """Which tools the run is also recorded in. `project` is MLflow's experiment and the project of Weights & Biases."""

    to: Annotated[tuple[Annotated[Any, one_of(*TRACKERS)], ...], Field(strict=False, max_length=20)] = ()
    project: Annotated[str, Field(min_length=1, max_length=128)] = "fedcluster"

    @field_validator("to", mode="before")
    @classmethod
    def one_is_a_list(cls, to: Any) -> Any:
        return (to,) if isinstance(to, str) or callable(to) else to


NAMING: dict[str, type[Part]] = {"fleet": Fleet, "clusters": Clusters, "attack": Attack}
"""The sections that name a part by another key than `name`, and have keys besides its options."""

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
    "attack": Attack,
    "centralized": Centralized,
    "clock": Clock,
    "privacy": Privacy,
    "eval": Eval,
    "stop": Stop,
    "pluralistic": Pluralistic,
    "track": Track,
}
