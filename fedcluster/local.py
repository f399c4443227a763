"""Local training: E optimizer steps from the model received, each on a batch of the device's own data."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from fedcluster.dataset import Dataset
from fedcluster.experiment import Local
from fedcluster.fleet import Ints
from fedcluster.learner import Learner
from fedcluster.optimizers import optimizer
from fedcluster.rng import stream, torch_seed

Correct = Callable[[Tensor, Tensor, Tensor], None]
"""A local rule: changes the gradient in place, given (gradient, w, the w that was received)."""

GATHER = 1200  # samples copied out of the data set at a time: two paper-sized devices, a few MB


class Batches:
    """The E batches of one device in one cycle, drawn uniformly from its rows of the training set."""

    def __init__(self, dataset: Dataset, rows: Ints, options: Local, seed: int, place: tuple[int, int, int]) -> None:
        self.dataset, self.rows, self.options, self.seed, self.place = dataset, rows, options, seed, place

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        steps, batch = self.options.steps, self.options.batch
        if batch == "full":
            yield from [self.gather(self.rows)] * steps
            return
        drawn = self.rows[stream(self.seed, "batch", *self.place).integers(len(self.rows), size=(steps, batch))]
        several = max(1, GATHER // batch)
        for start in range(0, steps, several):
            x, y = self.gather(drawn[start : start + several].reshape(-1))
            yield from zip(torch.split(x, batch), torch.split(y, batch), strict=True)

    def gather(self, rows: Ints) -> tuple[Tensor, Tensor]:
        """One copy of several batches out of the data set."""
        index = torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64))
        return self.dataset.inputs(self.dataset.x_train.index_select(0, index)), self.dataset.y_train[index]


@torch.no_grad()
def descend(learner: Learner, start: Tensor, batches: Batches, correct: Correct | None = None) -> Tensor:
    """w_0 = start;  w_{t+1} = step(w_t, correct(grad f(w_t; batch_t)));  returns w_E."""
    learner.load(start)
    learner.module.train()
    device, w, g = learner.device, learner.w[: learner.size], learner.gradient
    if learner.chain is not None and correct is None and batches.options.optimizer == "sgd":
        for x, y in batches:
            learner.chain.descend(x.to(device), y.to(device), batches.options.lr)
        return learner.w.clone()
    torch.manual_seed(torch_seed(batches.seed, "dropout", *batches.place))
    rule = optimizer(batches.options)
    start = start[: learner.size]
    for x, y in batches:
        learner.differentiate(x.to(device), y.to(device))
        if correct is not None:
            correct(g, w, start)
        rule.step(w, g)
    return learner.w.clone()
