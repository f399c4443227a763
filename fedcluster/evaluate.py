"""Evaluation of the global model: on a fixed sample of the pooled training data and on the test set."""

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcluster.dataset import Dataset
from fedcluster.fleet import Fleet
from fedcluster.learner import Learner

SAMPLE = 2000  # rows of the pooled training data; all of them when there are fewer
CHUNK = 250  # rows at a time, so that activations stay small


class Evaluator:
    """The same rows for every method and every round, so that curves are comparable."""

    def __init__(self, learner: Learner, dataset: Dataset, fleet: Fleet, seed: int) -> None:
        self.learner, self.dataset = learner, dataset
        rows = torch.from_numpy(fleet.pooled(SAMPLE, seed))
        self.sample = dataset.x_train[rows], dataset.y_train[rows]

    def __call__(self, w: Tensor) -> dict[str, float]:
        train_loss, _ = self.measure(w, *self.sample)
        test_loss, test_accuracy = self.measure(w, self.dataset.x_test, self.dataset.y_test)
        return {"train_loss": train_loss, "test_loss": test_loss, "test_accuracy": test_accuracy}

    @torch.no_grad()
    def measure(self, w: Tensor, x: Tensor, y: Tensor) -> tuple[float, float]:
        """Mean cross-entropy and accuracy at w."""
        self.learner.load(w)
        self.learner.module.eval()
        loss, right = 0.0, 0
        for rows, targets in zip(torch.split(x, CHUNK), torch.split(y, CHUNK), strict=True):
            scores = self.learner.module(self.dataset.inputs(rows).to(w.device))
            targets = targets.to(w.device)
            loss += float(F.cross_entropy(scores, targets, reduction="sum"))
            right += int((scores.argmax(1) == targets).sum())
        return loss / len(y), right / len(y)
