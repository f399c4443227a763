"""Evaluation of the global model: on a fixed sample of the pooled training data and on the test set."""

from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcluster.data.dataset import Dataset
from fedcluster.fleet.fleet import Fleet
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.kernels.network import SCORED

SAMPLE = 2000  # rows of the pooled training data; all of them when there are fewer
CHUNK = 250  # rows at a time, so that activations stay small


class Evaluator:
    """The same rows for every method and every round, so that curves are comparable."""

    def __init__(self, flat_model: FlatModel, dataset: Dataset, fleet: Fleet, seed: int) -> None:
        self.flat_model, self.dataset, self.threads = flat_model, dataset, 1
        rows = torch.from_numpy(fleet.pooled(SAMPLE, seed))
        self.sample = dataset.x_train[rows], dataset.y_train[rows]

    def __call__(self, w: Tensor) -> dict[str, float]:
        train_loss, _ = self.measure(w, *self.sample)
        test_loss, test_accuracy = self.measure(w, self.dataset.x_test, self.dataset.y_test)
        return {"train_loss": train_loss, "test_loss": test_loss, "test_accuracy": test_accuracy}

    @cached_property
    def pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.threads, initializer=torch.set_num_threads, initargs=(1,))

    def measure(self, w: Tensor, x: Tensor, y: Tensor) -> tuple[float, float]:
        """Mean cross-entropy and accuracy at w. Chunks are shared out over threads and added up in their order."""
        self.flat_model.load(w)
        self.flat_model.module.eval()
        spread: Any = map if self.threads == 1 else self.pool.map
        if (chain := self.flat_model.chain) is not None:
            share = -(-len(y) // (self.threads * SCORED)) * SCORED
            found = spread(partial(chain.score, x, y, self.dataset), torch.split(torch.arange(len(y)), share))
            parts = [part for several in found for part in several]
        else:
            parts = list(spread(self.part, torch.split(x, CHUNK), torch.split(y, CHUNK)))
        return sum(loss for loss, _ in parts) / len(y), sum(right for _, right in parts) / len(y)

    @torch.no_grad()
    def part(self, rows: Tensor, targets: Tensor) -> tuple[float, int]:
        """The summed loss of a chunk, and how many of it are right."""
        scores = self.flat_model.module(self.dataset.inputs(rows).to(self.flat_model.device))
        targets = targets.to(self.flat_model.device)
        loss = F.cross_entropy(scores, targets, reduction="sum")
        return float(loss), int((scores.argmax(1) == targets).sum())
