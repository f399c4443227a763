"""L, how fast the gradient can turn: the largest absolute eigenvalue of any device's Hessian at w, between two bounds.

f is an average of the f_k, so none of its eigenvalues is larger, and the f_k are all that has to be looked at. First
every device is screened by a few Lanczos steps. Then the devices with the largest values, and a few others, are
measured on all of their samples until their bounds are close, group by group until a group no longer raises the largest
value.

The lower end of the range is a curvature that was really seen. The upper end holds for the measured devices by
Lanczos's probabilistic bound. For the others it is an estimate: their screened value times the largest factor between
bound and screened value among the measured ones. Both are at this w: a supremum over all w is beyond anybody's reach.

H v is differentiated, not approximated: H v = grad (grad f . v).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedcluster.analysis.bound import Range
from fedcluster.analysis.lanczos import Lanczos, Product
from fedcluster.data.dataset import Dataset
from fedcluster.data.partition import Partition
from fedcluster.experiment import Local
from fedcluster.fleet.fleet import Ints
from fedcluster.models.flat_model import FlatModel, Loss
from fedcluster.models.local_sgd import Batches
from fedcluster.rng import stream
from fedcluster.runs.progress import Display
from fedcluster.training.survey import sample_rows
from fedcluster.training.threads import in_order

SCREENING = 4  # Lanczos steps for every device
ROWS, LEAST_ROWS = 50_000, 64  # samples that are screened, about so many in all, and at least of each device
GROUP = 4  # devices that are measured at a time
STILL = 0.005  # relative gain at which the largest value stands still
CLOSE, MOST = 1.1, 40  # how close the bounds of a measured device are to be, and in at most so many steps
RISK = 0.01  # that any upper bound is missed


def smoothness(
    flat_models: list[FlatModel],
    w: Tensor,
    dataset: Dataset,
    partition: Partition,
    devices: Ints,
    local: Local,
    seed: int,
    display: Display,
) -> Range:
    """The range of L at w over these devices, with a thread for every learner."""
    for flat_model in flat_models:
        flat_model.load(w)
        flat_model.module.eval()
    most = max(LEAST_ROWS, ROWS // len(devices))

    def begin(flat_model: FlatModel, k: int, rows: Ints) -> Lanczos:
        parts = list(Batches(dataset, rows, local, seed, (0, 0, k)).whole())
        start = torch.from_numpy(stream(seed, "curvature", device=k).standard_normal(flat_model.size, np.float32))
        return Lanczos(hessian_product(flat_model, w, parts), start.to(w.device))

    def screen(flat_model: FlatModel, k: int) -> float:
        iteration = begin(flat_model, k, sample_rows(partition.sample_indices(k), most, seed, "screening", k))
        iteration.advance(SCREENING)
        return iteration.lower()

    def measure(flat_model: FlatModel, k: int) -> Range:
        iteration = begin(flat_model, k, partition.sample_indices(k))
        iteration.advance(2 * SCREENING)
        while (bounds := iteration.bounds(RISK / len(devices))).high > CLOSE * bounds.low and iteration.steps < MOST:
            iteration.advance(2)
        return bounds

    things = [int(k) for k in devices]
    watched = display.track(things, "curvature of the devices", "devices")
    screened = np.array(list(in_order(screen, watched, flat_models)))
    found: dict[int, Range] = {}
    for group in groups(screened):
        before = max((bounds.low for bounds in found.values()), default=0.0)
        watched = display.track([things[i] for i in group], "largest curvatures", "devices")
        found |= dict(zip(group, in_order(measure, watched, flat_models), strict=True))
        if before and max(found[i].low for i in group) <= (1 + STILL) * before:
            break
    return overall(screened, found)


def groups(screened: Ints) -> list[list[int]]:
    """Devices in the order in which they are measured: a few from all over the ranking, which tell what screening is
    worth, then from the top, a group at a time."""
    ranking = np.argsort(-screened, kind="stable")
    spread = sorted({int(i) for i in ranking[np.linspace(0, len(ranking) - 1, GROUP).round().astype(int)]})
    rest = [int(i) for i in ranking if i not in spread]
    top = [rest[start : start + GROUP] for start in range(0, len(rest), GROUP)]
    return [spread + (top[0] if top else []), *top[1:]]


def overall(screened: Ints, found: dict[int, Range]) -> Range:
    """The range of the largest value, from the bounds of measured devices and the screened values of the others."""
    low, high = (max(getattr(bounds, end) for bounds in found.values()) for end in ("low", "high"))
    factor = max((bounds.high / screened[i] for i, bounds in found.items() if screened[i] > 0), default=1.0)
    others = [float(value) for i, value in enumerate(screened) if i not in found]
    return Range(low, float(max([high, *(factor * value for value in others)])))


def hessian_product(flat_model: FlatModel, w: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> Product:
    """v -> H v, of the objective over all these samples at w."""
    loss, rows = Loss(flat_model.module, flat_model.objective), sum(len(y) for _, y in parts)
    trained, fixed = flat_model.parts(w)
    leaves = [tensor.detach().clone().requires_grad_() for tensor in trained.values()]
    weights = dict(zip(trained, leaves, strict=True)) | fixed

    def product(v: Tensor) -> Tensor:
        total = torch.zeros_like(v)
        along = list(flat_model.named(v, partial=True).values())
        for x, y in parts:
            slopes = torch.autograd.grad(loss.at(weights, x.to(w.device), y.to(w.device)), leaves, create_graph=True)
            turns = torch.autograd.grad(slopes, leaves, along)
            total.add_(torch.cat([turn.reshape(-1) for turn in turns]), alpha=len(y) / rows)
        return total

    return product
