"""A survey of the fleet at one model w: one pass over the data of every device, or of a sample of a large fleet.

Of each device it keeps f_k(w), ||grad f_k(w)||^2, the variance of its batch gradient and a sketch of its gradient; no
more than a few devices' gradients are in memory at once. The module is in evaluation mode (no dropout, running
statistics as they are), so that f_k is a function of w alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedcluster.data.dataset import Dataset
from fedcluster.data.partition import Partition
from fedcluster.experiment import Local
from fedcluster.fleet.clustering.clusters import Clusters
from fedcluster.fleet.fleet import Fleet, Floats, Ints
from fedcluster.models.flat_model import FlatModel, Loss
from fedcluster.models.local_sgd import Batches
from fedcluster.reporting import Track
from fedcluster.rng import stream
from fedcluster.training.sketches import Sketch
from fedcluster.training.threads import in_order

MIN_ROWS, ROWS = 32, 10_000  # samples that give per-sample gradients: of each device, and about so many in all
MAX_BYTES = 64 * 2**20  # bytes of per-sample gradients at a time
MAX_CLUSTER_BYTES = 2**30  # bytes for the clusters' own gradients, which make H_cluster exact

PerSample = Callable[[Tensor, Tensor], dict[str, Tensor]]
"""The gradients of single samples (x, y) as rows, by the names of what is trained."""


@dataclass(frozen=True, eq=False)
class Survey:
    """The measurements of one pass, a row for each of `devices`: all of them, or in large fleets a sample. `between` is
    H_cluster without sketching, where all devices were visited and the clusters' gradients fitted into memory."""

    devices: Ints
    losses: Floats  # f_k(w)
    norms: Floats  # ||grad f_k(w)||^2
    variances: Floats  # s_k^2, of one batch of the experiment
    errors: Floats  # their standard errors: 0 where all of a device's samples were measured
    sketches: Floats
    copies: int  # independent sketches side by side in a row
    gradient: float  # ||grad f(w)||^2, of the devices visited
    between: float | None


def survey(
    flat_models: list[FlatModel],
    w: Tensor,
    fleet: Fleet,
    dataset: Dataset,
    partition: Partition,
    devices: Ints,
    local: Local,
    seed: int,
    track: Track,
    clusters: Clusters | None = None,
    what: str = "gradients of the devices",
) -> Survey:
    """Measure these devices, with a thread for each flat model. With `clusters`, and if they are all devices, the
    gradient of each cluster is measured, too, exactly."""
    n, size, sketch = len(devices), flat_models[0].size, Sketch(flat_models[0].size, seed)
    weights = fleet.weights[devices] / fleet.weights[devices].sum()
    losses, norms, variances, errors = (np.zeros(n) for _ in range(4))
    sketches = np.zeros((n, sketch.length), np.float32)
    total = torch.zeros(size, dtype=torch.float64)
    exact = clusters is not None and n == len(fleet) and clusters.count * size * 4 <= MAX_CLUSTER_BYTES
    sums = torch.zeros(clusters.count if clusters and exact else 0, size)
    limit = max(MIN_ROWS, ROWS // n)

    def measure(model: tuple[FlatModel, PerSample], i: int) -> Tensor:
        """Everything of one device but sums over several; the gradient that they need."""
        flat_model, single = model
        k = int(devices[i])
        batches = Batches(dataset, partition.sample_indices(k), local, seed, (0, 0, k))
        losses[i], gradient = loss_and_gradient(flat_model, w, batches)
        norms[i] = float(gradient.double().square().sum())
        sketches[i] = sketch(gradient).numpy()
        if local.batch != "full":
            rows = sample_rows(batches.rows, limit, seed, "variance", k)
            apart = square_deviations(single, batches, rows, flat_model.named(gradient, partial=True))
            apart *= batch_variance(local, len(batches.rows))
            variances[i] = apart.mean()
            if len(rows) < len(batches.rows):
                errors[i] = apart.std(ddof=1) * np.sqrt((1 - len(rows) / len(batches.rows)) / len(rows))
        return gradient.cpu()

    models = [(flat_model, single_gradients(flat_model, w, dataset)) for flat_model in flat_models]
    for i, gradient in enumerate(in_order(measure, track(range(n), what, "devices"), models)):
        total.add_(gradient, alpha=float(weights[i]))
        if clusters is not None and exact:
            sums[clusters.assignment[devices[i]]].add_(gradient, alpha=float(weights[i]))
    between = None
    if clusters is not None and exact:
        shares = clusters.weights(fleet)
        between = sum(
            float(q * (mine.double() / q - total).square().sum()) for q, mine in zip(shares, sums, strict=True)
        )
    gradient_norm = float(total.square().sum())
    return Survey(devices, losses, norms, variances, errors, sketches, sketch.copies, gradient_norm, between)


def loss_and_gradient(flat_model: FlatModel, w: Tensor, batches: Batches) -> tuple[float, Tensor]:
    """f_k(w) and grad f_k(w) over all of the device's data."""
    flat_model.load(w)
    flat_model.module.eval()
    loss, total, rows = 0.0, torch.zeros_like(flat_model.gradient), len(batches.rows)
    for x, y in batches.whole():
        flat_model.gradient.zero_()
        value = flat_model.objective(flat_model.module, x.to(flat_model.device), y.to(flat_model.device))
        value.backward()  # type: ignore[no-untyped-call]
        loss += float(value.detach()) * len(y) / rows
        total.add_(flat_model.gradient, alpha=len(y) / rows)
    return loss, total


def square_deviations(single: PerSample, batches: Batches, rows: Ints, mean: dict[str, Tensor]) -> Floats:
    """||grad f(w; sample) - grad f_k(w)||^2 of these rows, some at a time."""
    size, device = sum(tensor.numel() for tensor in mean.values()), next(iter(mean.values())).device
    deviations, several = np.zeros(len(rows)), max(1, MAX_BYTES // (4 * size))
    for start in range(0, len(rows), several):
        x, y = batches.gather(rows[start : start + several])
        for name, gradients in single(x.to(device), y.to(device)).items():
            apart = torch.linalg.vector_norm(gradients.sub_(mean[name]).flatten(1), dim=1)
            deviations[start : start + several] += apart.double().square().cpu().numpy()
    return deviations


def batch_variance(local: Local, n: int) -> float:
    """The variance of a batch's mean, as a multiple of that of one of n samples: 1/b with replacement, and without it,
    as in a shuffled pass, (n - b) / (b (n - 1))."""
    assert local.batch != "full"
    if local.epochs is None:
        return 1 / local.batch
    b = min(local.batch, n)
    return (n - b) / (b * (n - 1)) if n > 1 else 0.0


def sample_rows(rows: Ints, limit: int, seed: int, role: str, device: int) -> Ints:
    """All of a device's rows, or so many of them drawn without replacement."""
    if len(rows) <= limit:
        return rows
    return rows[stream(seed, role, device=device).choice(len(rows), limit, replace=False, shuffle=False)]


def single_gradients(flat_model: FlatModel, w: Tensor, dataset: Dataset) -> PerSample:
    """Gradients of many samples at once by torch.func; one after the other for a module that torch.func cannot take,
    such as one with an autograd function of its own."""
    loss, trained, fixed = Loss(flat_model.module, flat_model.objective), *flat_model.parts(w)
    one = torch.func.grad(lambda weights, x, y: loss.at(weights | fixed, x[None], y[None]))
    several = torch.func.vmap(one, in_dims=(None, 0, 0))

    def vectorized(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        gradients: dict[str, Tensor] = several(trained, x, y)
        return gradients

    def one_by_one(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        rows = []
        for i in range(len(y)):
            flat_model.compute_gradient(x[i : i + 1], y[i : i + 1])
            rows.append(flat_model.gradient.clone())
        named = [flat_model.named(row, partial=True) for row in rows]
        return {name: torch.stack([row[name] for row in named]) for name in trained}

    flat_model.load(w)
    flat_model.module.eval()
    try:
        vectorized(dataset.inputs(dataset.x_train[:2]).to(w.device), dataset.y_train[:2].to(w.device))
    except Exception:  # a module may do anything
        return one_by_one
    return vectorized


def gradient_sketches(
    flat_models: list[FlatModel],
    w: Tensor,
    dataset: Dataset,
    partition: Partition,
    local: Local,
    seed: int,
    track: Track,
) -> Floats:
    """Only the sketches: what clusters are made from with clusters.features = "gradients"."""
    sketch = Sketch(flat_models[0].size, seed)

    def measure(flat_model: FlatModel, k: int) -> Tensor:
        _, gradient = loss_and_gradient(
            flat_model, w, Batches(dataset, partition.sample_indices(k), local, seed, (0, 0, k))
        )
        return sketch(gradient)

    sketches = np.zeros((len(partition), sketch.length), np.float32)
    tracked = track(range(len(partition)), "gradients of the devices", "devices")
    for k, row in enumerate(in_order(measure, tracked, flat_models)):
        sketches[k] = row.numpy()
    return sketches
