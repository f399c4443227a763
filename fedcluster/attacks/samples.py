"""Attacks on samples: malicious devices train honestly on samples that they have changed.

label_flip    class y becomes C - 1 - y
backdoor      a share `poisoned` of the samples gets a trigger, a bright square of `patch` x `patch` pixels in the
              lower right corner, and the class `target`; Gu, Dolan-Gavitt, Garg: BadNets, 2017
replacement   the same, and the movement is sent `boost` times as long, left out 1 / share, so that the average is
              the attackers' model; Bagdasaryan, Veit, Hua, Estrin, Shmatikov: How To Backdoor Federated Learning,
              AISTATS 2020
"""

from collections.abc import Callable
from typing import Annotated, Any

import torch
from numpy.random import Generator
from pydantic import Field
from torch import Tensor

from fedcluster.attacks.attack import Attack, Uploads, moved, movement
from fedcluster.data.dataset import DataSpec
from fedcluster.errors import BadExperiment
from fedcluster.experiment import Count, Positive, Section
from fedcluster.state import Tensors

TRIGGERED = 2000  # test samples on which a backdoor's success is measured


class LabelFlip(Attack):
    def __init__(self, options: Any, spec: DataSpec, share: float) -> None:
        super().__init__(options, spec, share)
        if spec.target != "class":
            raise BadExperiment('attack.name = "label_flip" needs targets that are classes: use another attack')

    def poison(self, x: Tensor, y: Tensor, rng: Generator) -> tuple[Tensor, Tensor]:
        return x, self.spec.outputs - 1 - y


class Backdoor(Attack):
    class Options(Section):
        target: Annotated[int, Field(ge=0)] = 0
        patch: Count = 3
        poisoned: Annotated[float, Field(gt=0, le=1)] = 0.5

    def __init__(self, options: Any, spec: DataSpec, share: float) -> None:
        super().__init__(options, spec, share)
        if spec.target != "class" or len(spec.shape) != 3:
            raise BadExperiment("attack.name: a backdoor's trigger is for pictures with classes: use another attack")
        if options.target >= spec.outputs or options.patch > min(spec.shape[1:]):
            raise BadExperiment(
                f"attack: target = {options.target} and patch = {options.patch} do not fit {spec.outputs} classes and "
                f"pictures of {spec.shape[1]} x {spec.shape[2]} pixels"
            )

    def poison(self, x: Tensor, y: Tensor, rng: Generator) -> tuple[Tensor, Tensor]:
        chosen = torch.from_numpy(rng.permutation(len(y))[: max(1, round(self.options.poisoned * len(y)))])
        x, y = x.clone(), y.clone()
        x[chosen], y[chosen] = self.with_trigger(x[chosen]), self.options.target
        return x, y

    def triggered(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
        """Samples of other classes; at most 2000, evenly spaced."""
        others = torch.nonzero(y != self.options.target).flatten()
        rows = others[:: max(1, len(others) // TRIGGERED)][:TRIGGERED]
        return self.with_trigger(x[rows]), torch.full_like(y[rows], self.options.target)

    def with_trigger(self, x: Tensor) -> Tensor:
        patch: int = self.options.patch
        x = x.clone()
        x[..., -patch:, -patch:] = 255 if x.dtype == torch.uint8 else x.max()
        return x


class Replacement(Backdoor):
    class Options(Backdoor.Options):
        boost: Positive | None = None

    def forge(
        self, uploads: Uploads, malicious: list[int], received: Tensors, rng: Callable[[int], Generator]
    ) -> Uploads:
        boost = self.options.boost or 1 / self.share
        return {device: moved(movement(uploads[device], received), received, boost) for device in malicious}
