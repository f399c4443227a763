"""The smoothness L at w: the largest absolute eigenvalue of any device's Hessian, as a range.

f is a mean of the f_k, so no eigenvalue of its Hessian is larger than the largest of theirs. First every device is
screened with a few Lanczos steps on some of its samples. Then the devices with the largest values, and a few others,
are measured on all of their samples until their bounds are close, group by group until a group no longer raises the
largest value.

The lower end of the range is a curvature that was found. The upper end holds for the measured devices by Lanczos's
probabilistic bound. For the other devices it is an estimate: their screened value times the largest ratio of bound to
screened value among the measured devices. Both are for this w; the supremum over all w cannot be computed.

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
from fedcluster.fleet.fleet import Floats, Ints
from fedcluster.models.flat_model import FlatModel, Loss
from fedcluster.models.local_sgd import Batches
from fedcluster.reporting import Track
from fedcluster.rng import stream
from fedcluster.training.survey import sample_rows
from fedcluster.training.threads import in_order

SCREENING_STEPS = 4
SCREENING_ROWS, MIN_ROWS = 50_000, 64  # samples used in screening: in all, and at least of each device
GROUP_SIZE = 4  # devices measured at a time
MIN_GAIN = 0.005  # a group that raises the largest value by less, relatively, is the last
MAX_RATIO, MAX_STEPS = 1.1, 40  # a device is measured until high / low <= MAX_RATIO, for at most MAX_STEPS steps
RISK = 0.01  # probability that any of the upper bounds is too low


def smoothness(
    flat_models: list[FlatModel],
    w: Tensor,
    dataset: Dataset,
    partition: Partition,
    devices: Ints,
    local: Local,
    seed: int,
    track: Track,
) -> Range:
    """The range of L at w over these devices, with a thread for each flat model."""
    for flat_model in flat_models:
        flat_model.load(w)
        flat_model.module.eval()
    rows_each = max(MIN_ROWS, SCREENING_ROWS // len(devices))

    def lanczos(flat_model: FlatModel, k: int, rows: Ints) -> Lanczos:
        parts = list(Batches(dataset, rows, local, seed, (0, 0, k)).whole())
        start = torch.from_numpy(stream(seed, "curvature", device=k).standard_normal(flat_model.size, np.float32))
        return Lanczos(hessian_product(flat_model, w, parts), start.to(w.device))

    def screen(flat_model: FlatModel, k: int) -> float:
        rows = sample_rows(partition.sample_indices(k), rows_each, seed, "screening", k)
        iteration = lanczos(flat_model, k, rows)
        iteration.advance(SCREENING_STEPS)
        return iteration.lower()

    def measure(flat_model: FlatModel, k: int) -> Range:
        iteration = lanczos(flat_model, k, partition.sample_indices(k))
        iteration.advance(2 * SCREENING_STEPS)
        while True:
            bounds = iteration.bounds(RISK / len(devices))
            if bounds.high <= MAX_RATIO * bounds.low or iteration.steps >= MAX_STEPS:
                return bounds
            iteration.advance(2)

    numbers = [int(k) for k in devices]
    tracked = track(numbers, "curvature of the devices", "devices")
    screened = np.array(list(in_order(screen, tracked, flat_models)))
    measured: dict[int, Range] = {}
    for group in measuring_order(screened):
        before = max((bounds.low for bounds in measured.values()), default=0.0)
        tracked = track([numbers[i] for i in group], "largest curvatures", "devices")
        measured |= dict(zip(group, in_order(measure, tracked, flat_models), strict=True))
        if before and max(measured[i].low for i in group) <= (1 + MIN_GAIN) * before:
            break
    return overall(screened, measured)


def measuring_order(screened: Floats) -> list[list[int]]:
    """Devices in the order in which they are measured: first some from the whole ranking, which show how far screened
    values are off, together with the top; then from the top down."""
    ranking = np.argsort(-screened, kind="stable")
    spread = sorted({int(i) for i in ranking[np.linspace(0, len(ranking) - 1, GROUP_SIZE).round().astype(int)]})
    rest = [int(i) for i in ranking if i not in spread]
    top = [rest[start : start + GROUP_SIZE] for start in range(0, len(rest), GROUP_SIZE)]
    return [spread + (top[0] if top else []), *top[1:]]


def overall(screened: Floats, measured: dict[int, Range]) -> Range:
    """The range of the largest value, from the bounds of measured devices and the screened values of the others."""
    low, high = (max(getattr(bounds, end) for bounds in measured.values()) for end in ("low", "high"))
    factor = max((bounds.high / screened[i] for i, bounds in measured.items() if screened[i] > 0), default=1.0)
    others = [float(value) for i, value in enumerate(screened) if i not in measured]
    return Range(low, float(max([high, *(factor * value for value in others)])))


def hessian_product(flat_model: FlatModel, w: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> Product:
    """v -> H v with the Hessian H at w of the objective over all samples of `parts`."""
    loss, rows = Loss(flat_model.module, flat_model.objective), sum(len(y) for _, y in parts)
    trained, fixed = flat_model.parts(w)
    leaves = [tensor.detach().clone().requires_grad_() for tensor in trained.values()]
    weights = dict(zip(trained, leaves, strict=True)) | fixed

    def product(v: Tensor) -> Tensor:
        total = torch.zeros_like(v)
        direction = list(flat_model.named(v, partial=True).values())
        for x, y in parts:
            gradient = torch.autograd.grad(loss.at(weights, x.to(w.device), y.to(w.device)), leaves, create_graph=True)
            Hv = torch.autograd.grad(gradient, leaves, direction)
            total.add_(torch.cat([part.reshape(-1) for part in Hv]), alpha=len(y) / rows)
        return total

    return product
