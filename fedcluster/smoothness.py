"""L, how fast the gradient can turn: the largest absolute eigenvalue of the Hessian, by power iteration.

    v <- H v / ||H v||,      ||H v|| -> L

||H v|| never falls from one step to the next, so the last value is the largest seen. H v is differentiated, not
approximated: H v = grad (grad f . v).
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fedcluster.dataset import Dataset
from fedcluster.display import Display
from fedcluster.experiment import Local
from fedcluster.fleet import Fleet
from fedcluster.learner import Learner
from fedcluster.local import Batches
from fedcluster.program import Loss
from fedcluster.rng import stream

POOLED = 2000  # samples of the fleet's pooled data that stand for f
DEVICES = 4  # whose own f_k are looked at too: the theorem wants every one of them smooth
MOST, TOLERANCE = 100, 1e-4  # steps of the iteration, and the relative gain at which it stops

Product = Callable[[Tensor], Tensor]


def smoothness(
    learner: Learner, w: Tensor, dataset: Dataset, fleet: Fleet, local: Local, seed: int, display: Display
) -> float:
    """The largest curvature seen at w, of f and of a few f_k."""
    some = stream(seed, "curvature").choice(len(fleet), min(DEVICES, len(fleet)), replace=False)
    everyone = [fleet.pooled(POOLED, seed), *(fleet.draw(int(k)) for k in some)]
    learner.load(w)
    learner.module.eval()
    found = []
    for number in display.track(range(len(everyone)), "smoothness", "losses"):
        parts = list(Batches(dataset, everyone[number], local, seed, (0, 0, 0)).whole())
        start = torch.from_numpy(stream(seed, "curvature", cycle=number).standard_normal(learner.size, np.float32))
        found.append(largest_curvature(hessian_product(learner, w, parts), start.to(w.device)))
    return max(found)


def hessian_product(learner: Learner, w: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> Product:
    """v -> H v, of the objective over all these samples at w."""
    loss, rows = Loss(learner.module, learner.objective), sum(len(y) for _, y in parts)
    trained, fixed = learner.parts(w)
    leaves = [tensor.detach().clone().requires_grad_() for tensor in trained.values()]
    weights = dict(zip(trained, leaves, strict=True)) | fixed

    def product(v: Tensor) -> Tensor:
        total = torch.zeros_like(v)
        along = list(learner.named(v, partial=True).values())
        for x, y in parts:
            slopes = torch.autograd.grad(loss.at(weights, x.to(w.device), y.to(w.device)), leaves, create_graph=True)
            turns = torch.autograd.grad(slopes, leaves, along)
            total.add_(torch.cat([turn.reshape(-1) for turn in turns]), alpha=len(y) / rows)
        return total

    return product


def largest_curvature(product: Product, start: Tensor) -> float:
    v, reached = start / start.norm(), 0.0
    for _ in range(MOST):
        turned = product(v)
        before, reached = reached, float(turned.norm())
        if reached - before <= TOLERANCE * reached:
            break
        v = turned / reached
    return reached
