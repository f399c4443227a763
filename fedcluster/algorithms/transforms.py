"""Update transforms: clipping, noise, compression. None by default.

    on_device(upload, received, rng)           on the device, after local training
    on_server(upload, received, rng)           on the server, on an accepted update, before aggregation
    on_aggregate(aggregate, received, rng)     on the server, after aggregation

Each takes and returns a message: a dict of flat vectors with the same names, shapes and types. `received` is what the
device has downloaded in this cycle, with the model W under "model". `rng` is a separate random stream for every
transform, method, phase, round, cycle and device. Transforms are applied in the experiment's order.
"""

from collections.abc import Callable, Sequence
from typing import Any

from numpy.random import Generator

from fedcluster.errors import BadExperiment
from fedcluster.experiment import import_object
from fedcluster.rng import stream
from fedcluster.state import Tensors


class UpdateTransform:
    """The identity. A transform derives from it and overrides the methods that it needs."""

    def on_device(self, upload: Tensors, received: Tensors, rng: Generator) -> Tensors:
        return upload

    def on_server(self, upload: Tensors, received: Tensors, rng: Generator) -> Tensors:
        return upload

    def on_aggregate(self, aggregate: Tensors, received: Tensors, rng: Generator) -> Tensors:
        return aggregate


class Transforms:
    """The transforms of an experiment in order, then those of the program's own, with their random streams."""

    def __init__(self, transforms: Sequence[Any] = (), seed: int = 0, own: Sequence[UpdateTransform] = ()) -> None:
        self.transforms, self.seed = [*map(find, transforms), *own], seed

    def __bool__(self) -> bool:
        return bool(self.transforms)

    def on_device(self, upload: Tensors, received: Tensors, phase: int, place: tuple[int, int, int]) -> Tensors:
        return self.apply("on_device", upload, received, phase, place)

    def on_server(self, upload: Tensors, received: Tensors, phase: int, place: tuple[int, int, int]) -> Tensors:
        return self.apply("on_server", upload, received, phase, place)

    def on_aggregate(self, aggregate: Tensors, received: Tensors, phase: int, round: int, cycle: int) -> Tensors:
        return self.apply("on_aggregate", aggregate, received, phase, (round, cycle, 0))

    def apply(
        self, where: str, message: Tensors, received: Tensors, phase: int, place: tuple[int, int, int]
    ) -> Tensors:
        for number, transform in enumerate(self.transforms):
            hook: Callable[[Tensors, Tensors, Generator], Tensors] = getattr(transform, where)
            rng = stream(self.seed, f"transform {number} {where} {phase}", *place)
            message = hook(message, received, rng)
        return message


def find(given: Any) -> UpdateTransform:
    """A transform from an instance, a class or package.module:name."""
    transform = import_object(given) if isinstance(given, str) else given
    if isinstance(transform, type):
        transform = transform()
    if not isinstance(transform, UpdateTransform):
        raise BadExperiment(f"transforms: {given} does not derive from fedcluster.UpdateTransform")
    return transform
