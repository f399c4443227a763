"""Section, the base of all sections; Part, a section that names a part of the program; objects found by their names."""

from collections.abc import Iterable
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from fedcluster.errors import BadExperiment
from fedcluster.experiment.messages import describe, format_value


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def contradiction(self) -> str | None:
        """Why keys, each of which is allowed, do not fit together."""
        return None

    @model_validator(mode="after")
    def keys_fit_together(self) -> Self:
        if why := self.contradiction():
            raise ValueError(why)
        return self


class Part(Section):
    """A section that names a part of the program and has the options that the part itself declares as its `Options`.
    The name is one of the part's registry, `package.module:name`, or in Python the class or function itself."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)
    registry: ClassVar[str]
    key: ClassVar[str] = "name"  # which of the section's keys names the part

    @classmethod
    def names(cls) -> dict[str, Any]:
        """The parts that this section can name."""
        return registered(cls.registry)

    @classmethod
    def defaults(cls, part: Any, keys: dict[str, Any]) -> dict[str, Any]:
        """Defaults that depend on the part, None where it is not of the registry, or on other keys."""
        return {}

    @model_validator(mode="before")
    @classmethod
    def fill_in_defaults(cls, keys: Any) -> Any:
        if not isinstance(keys, dict):
            return keys
        name = keys.get(cls.key, cls.default_part())
        return cls.defaults(cls.names().get(name) if isinstance(name, str) else None, keys) | keys

    @field_validator("name", "partition", "method", check_fields=False)
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
            raise ValueError(f".{self.option_of_another(given) or describe(error.errors(), known)}") from None
        object.__setattr__(self, "__pydantic_extra__", dict(filled))
        return self

    def option_of_another(self, given: Iterable[str]) -> str:
        """A sentence on the first key that only other parts of the registry have as an option, or nothing."""
        own = self.options_class().model_fields
        for key in given:
            owners = [f'"{name}"' for name, part in self.names().items() if key in options_class(part).model_fields]
            if owners and key not in own:
                return f"{key} is an option of {self.key} = {' or '.join(owners)}: remove it, or change {self.key}"
        return ""

    @classmethod
    def default_part(cls) -> Any:
        """What the section names where it names nothing."""
        return cls.model_fields[cls.key].default

    def find(self) -> Any:
        """The class or function that the name stands for."""
        name = getattr(self, self.key)
        if not isinstance(name, str):
            return name
        names = self.names()
        return names[name] if name in names else import_object(name)

    def options_class(self) -> type[Section]:
        return options_class(self.find())

    @property
    def options(self) -> Any:
        return self.options_class()(**(self.__pydantic_extra__ or {}))


def registered(registry: str) -> dict[str, Any]:
    """The registry `module:name`. It is imported late: experiments come before the parts that they name."""
    module, _, table = registry.partition(":")
    parts: dict[str, Any] = getattr(import_module(module), table)
    return parts


def options_class(part: Any) -> type[Section]:
    """The options that a part declares. A `functools.partial` has those of its function."""
    kind: type[Section] = getattr(part.func if isinstance(part, partial) else part, "Options", Section)
    return kind


def check_name(value: Any, names: Iterable[str]) -> Any:
    """A name from the list, `package.module:name`, or in Python the object itself."""
    if isinstance(value, str) and value not in names and ":" not in value:
        raise ValueError(f"= {format_value(value)} is not allowed: use {alternatives(names)}package.module:name")
    if not isinstance(value, str) and not callable(value):
        raise ValueError(f"= {format_value(value)} is not allowed: use {alternatives(names)}a function")
    return value


def one_in(registry: str) -> AfterValidator:
    """The same for the names of a registry `module:name`."""
    return AfterValidator(lambda value: None if value is None else check_name(value, registered(registry)))


def alternatives(names: Iterable[str]) -> str:
    known = ", ".join(names)
    return f"one of {known}, or " if known else ""


def one_of(*names: str) -> AfterValidator:
    return AfterValidator(lambda value: check_name(value, names))


def import_object(name: str, *takes: str, may_take: Iterable[str] = ()) -> Any:
    """What `package.module:name` stands for: a function or a class that takes such arguments, and may take others by
    name."""
    module, _, attribute = name.partition(":")
    try:
        obj = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise BadExperiment(f"{name[:80]}: cannot be imported ({error}); is it on the Python path?") from None
    if not callable(obj):
        raise BadExperiment(f"{name[:80]} is a {type(obj).__name__}: name a function or a class")
    if takes:
        try:
            form = signature(obj)
            form.bind(*takes, **{name: name for name in may_take if name in form.parameters})
        except TypeError:
            raise BadExperiment(f"{name[:80]} cannot be called with ({', '.join(takes)})") from None
        except ValueError:  # it does not say what it takes
            pass
    return obj


def reference(obj: Any) -> str:
    if isinstance(obj, partial):
        given = [*map(repr, obj.args), *(f"{name}={value!r}" for name, value in sorted(obj.keywords.items()))]
        return f"{reference(obj.func)}({', '.join(given)})"
    named = obj if hasattr(obj, "__qualname__") else type(obj)
    return f"{named.__module__}:{named.__qualname__}"
