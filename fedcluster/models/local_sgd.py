"""Local training: optimizer steps from the model received, each on a batch of the device's own data."""

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedcluster.data.dataset import Dataset
from fedcluster.errors import BadExperiment
from fedcluster.experiment import Local
from fedcluster.fleet.fleet import Ints
from fedcluster.fleet.schedule import steps_of
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.optimizers import clip_norm_, optimizer
from fedcluster.rng import stream, torch_seed

GradientTransform = Callable[[Tensor, Tensor, Tensor], Tensor | None]
"""A local rule: given (gradient, w, the w that was received), changes the gradient in place or returns another."""


class LocalOptimizer(Protocol):
    """An optimizer: moves w in place, given a gradient."""

    def step(self, w: Tensor, g: Tensor) -> None: ...


GATHER = 1200  # samples copied out of the data set at a time: two paper-sized devices, a few MB
AT_ONCE = 2**16  # samples in the steps that the compiled engine takes in one call, which nothing can interrupt
WHOLE = 250  # samples at a time where a gradient is over all of them


class Batches:
    """The batches of one device in one cycle: `steps` of them, for steps of learning rate `lr`.

    With `local.steps` every batch is drawn uniformly, with replacement, from the device's rows of the training set.
    With `local.epochs` every pass shuffles the rows and cuts them into batches, of which the last may be smaller.
    """

    def __init__(
        self,
        dataset: Dataset,
        rows: Ints,
        options: Local,
        seed: int,
        place: tuple[int, int, int],
        lr: float | None = None,
    ) -> None:
        self.dataset, self.rows, self.options, self.seed, self.place = dataset, rows, options, seed, place
        self.steps = steps_of(options, seed, round=place[0], device=place[2], samples=len(rows))
        self.lr = options.lr if lr is None else lr

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The samples and labels of each step; several batches are copied out of the data set at a time."""
        if self.options.batch == "full":
            yield from [self.gather(self.rows)] * self.steps
            return
        for drawn in self.drawn():
            steps, batch = drawn.shape
            several = max(1, GATHER // batch)
            for start in range(0, steps, several):
                x, y = self.gather(drawn[start : start + several].reshape(-1))
                yield from zip(torch.split(x, batch), torch.split(y, batch), strict=True)

    def drawn(self) -> list[Ints]:
        """The same as indices into the training set: matrices [steps, batch], one after the other, each of steps whose
        batches have one size."""
        if self.options.batch == "full":
            return [np.tile(self.rows, (self.steps, 1))]
        rng, n, batch = stream(self.seed, "batch", *self.place), len(self.rows), self.options.batch
        if self.options.epochs is None:
            return [self.rows[rng.integers(n, size=(self.steps, batch))]]
        passes = [self.rows[rng.permutation(n)] for _ in range(self.options.epochs)]
        if n % batch == 0:
            return [np.concatenate(passes).reshape(-1, batch)]
        parts = [
            part for rows in passes for part in (rows[: n - n % batch].reshape(-1, batch), rows[None, n - n % batch :])
        ]
        return [part for part in parts if len(part)]

    def whole(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All of the device's data, once."""
        for start in range(0, len(self.rows), WHOLE):
            yield self.gather(self.rows[start : start + WHOLE])

    def gather(self, rows: Ints) -> tuple[Tensor, Tensor]:
        index = torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64))
        return self.dataset.inputs(self.dataset.x_train.index_select(0, index)), self.dataset.y_train[index]


@torch.no_grad()
def local_sgd(
    flat_model: FlatModel,
    start: Tensor,
    batches: Batches,
    gradient_offset: Tensor | None = None,
    correct: GradientTransform | None = None,
    rule: LocalOptimizer | None = None,
) -> Tensor:
    """w_0 = start;  w_{t+1} = step(w_t, clip(correct(grad f(w_t; batch_t))) + gradient_offset);  returns w_E.

    The one local loop. `rule` takes the step; left out, it is the experiment's optimizer, begun afresh.
    """
    flat_model.load(start)
    flat_model.module.train()
    device, w, g = flat_model.device, flat_model.w[..., : flat_model.size], flat_model.gradient
    options = batches.options
    plain = options.optimizer == "sgd" and not options.decay and options.clip_norm is None
    if flat_model.network is not None and correct is None and rule is None and plain:
        moves = None if gradient_offset is None else gradient_offset * -batches.lr
        for drawn in batches.drawn():
            rows = torch.from_numpy(np.ascontiguousarray(drawn, dtype=np.int64))
            for part in torch.split(rows, max(1, AT_ONCE // rows.shape[1])):
                flat_model.network.sgd(batches.dataset, part, batches.lr, moves)
        return flat_model.w.clone()
    torch.manual_seed(torch_seed(batches.seed, "dropout", *batches.place))
    rule = rule or optimizer(options, batches.lr)
    start = start[..., : flat_model.size]
    for x, y in batches:
        flat_model.compute_gradient(x.to(device), y.to(device))
        if correct is not None:
            replace_by(correct(g, w, start), g)
        if options.clip_norm is not None:
            clip_norm_(g, options.clip_norm)
        if gradient_offset is not None:
            g.add_(gradient_offset)
        rule.step(w, g)
    return flat_model.w.clone()


def replace_by(returned: object, gradient: Tensor) -> None:
    """Take the gradient that a local rule returned, if it returned one."""
    if returned is None or returned is gradient:
        return
    if not isinstance(returned, Tensor) or returned.shape != gradient.shape:
        what = f"a tensor of shape {list(returned.shape)}" if isinstance(returned, Tensor) else repr(returned)[:80]
        raise BadExperiment(
            f"algorithm.name: the local rule returned {what}; return a gradient of shape {list(gradient.shape)}, "
            "or change the one given in place and return None"
        )
    gradient.copy_(returned)


@torch.no_grad()
def full_gradient(flat_model: FlatModel, w: Tensor, batches: Batches) -> Tensor:
    """grad f_k(w) over all of the device's data, without weight decay."""
    flat_model.load(w)
    flat_model.module.train()
    torch.manual_seed(torch_seed(batches.seed, "dropout", *batches.place))
    total = torch.zeros_like(flat_model.gradient)
    for x, y in batches.whole():
        flat_model.compute_gradient(x.to(flat_model.device), y.to(flat_model.device))
        total.add_(flat_model.gradient, alpha=y.shape[flat_model.w.ndim - 1] / len(batches.rows))
    return total
