"""The experiment: one frozen, validated description of a run. TOML out, a hash, and copies with other keys."""

import hashlib
import json
from functools import partial
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import Field, ValidationError, field_validator, model_validator

from fedcluster.errors import BadExperiment
from fedcluster.experiment.earlier_keys import current_keys
from fedcluster.experiment.messages import format_error, format_value
from fedcluster.experiment.overrides import replace_keys
from fedcluster.experiment.parts import Section, reference
from fedcluster.experiment.sections import (
    SECTIONS,
    Accept,
    Aggregation,
    Algorithm,
    Attack,
    Centralized,
    Clock,
    Clusters,
    Data,
    Eval,
    Fleet,
    Local,
    Model,
    Pluralistic,
    Privacy,
    Server,
    Stop,
    Task,
    Track,
)
from fedcluster.experiment.types import Count


class Experiment(Section):
    """One frozen, validated description of a run. Keys are sections (`local={"lr": 0.1}`) and plain keys (`rounds=10`);
    BadExperiment says which key is wrong and what is allowed."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    rounds: Count = 100
    method: Literal["fedcluster", "centralized"] = "fedcluster"
    data: Data = Data()
    fleet: Fleet = Field(default_factory=Fleet)
    clusters: Clusters = Field(default_factory=Clusters)
    model: Model = Model()
    task: Task = Field(default_factory=Task)
    algorithm: Algorithm = Field(default_factory=Algorithm)
    local: Local = Local()
    aggregation: Aggregation = Field(default_factory=Aggregation)
    transforms: Annotated[tuple[Any, ...], Field(strict=False, max_length=100)] = ()
    metrics: Annotated[tuple[Any, ...], Field(strict=False, max_length=100)] | None = None
    server: Server = Server()
    accept: Accept = Accept()
    attack: Attack | None = None
    centralized: Centralized = Centralized()
    clock: Clock | None = None
    privacy: Privacy | None = None
    eval: Eval = Eval()
    stop: Stop | None = None
    pluralistic: Pluralistic | None = None
    track: Track | None = None

    def __init__(self, **keys: Any) -> None:
        try:
            super().__init__(**current_keys(keys))
        except ValidationError as error:
            raise BadExperiment(format_error(error, SECTIONS, Experiment.model_fields)) from None

    @field_validator("transforms")
    @classmethod
    def transforms_are_named(cls, transforms: tuple[Any, ...]) -> tuple[Any, ...]:
        for given in transforms:
            if isinstance(given, str | int | float | list | dict) and ":" not in str(given):
                raise ValueError(
                    f"= {format_value(given)} is not allowed: use package.module:name, or in Python a transform"
                )
        return transforms

    @model_validator(mode="after")
    def local_fits(self) -> "Experiment":
        """Some algorithms assume the step w <- w - lr g, or steps that are linear in g, or plain gradients."""
        algorithm = self.algorithm.find()
        kind = algorithm.func if isinstance(algorithm, partial) else algorithm
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

    @model_validator(mode="after")
    def attack_has_devices(self) -> "Experiment":
        if self.attack is not None and self.method != "fedcluster":
            raise ValueError(
                f'[attack] needs devices, and method = "{self.method}" has none: remove it, or compare with --methods '
                "fedavg,fedcluster"
            )
        return self

    @property
    def differential_privacy(self) -> Privacy | None:
        """The section [privacy] if it asks for differential privacy; it may ask for secure aggregation alone."""
        return self.privacy if self.privacy is not None and self.privacy.differential else None

    def sections(self) -> dict[str, Any]:
        """Every key that was given or filled in, by section; objects given in Python as they are."""

        def keys(section: Section) -> dict[str, Any]:
            given = {key: value for key, value in section if value is not None}
            plain = {key: keys(value) if isinstance(value, Section) else value for key, value in given.items()}
            return {key: value for key, value in plain.items() if not (isinstance(value, dict) and not value)}

        return keys(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; an object given in Python is written as `package.module:name`."""
        sections = self.sections()
        if not isinstance(name := sections["data"]["name"], str):
            sections["data"] = sections["data"] | {"name": reference(name)}
        plain: dict[str, Any] = json.loads(json.dumps(sections, default=reference))
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


def changes(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """The dotted keys in which two experiments differ."""
    keys = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            keys += changes(before, after, f"{prefix}{key}.")
        elif before != after:
            keys.append(f"{prefix}{key[:80]} (was {format_value(before)}, now {format_value(after)})")
    return keys
