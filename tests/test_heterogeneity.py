"""Heterogeneity, sketches, variances and smoothness against values known by hand or by brute force."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedcluster import fleet as fleets
from fedcluster import heterogeneity
from fedcluster.clusters import Clusters
from fedcluster.dataset import Dataset
from fedcluster.display import Display
from fedcluster.experiment import Fleet, Local
from fedcluster.layers import normalise
from fedcluster.learner import Learner
from fedcluster.local import Batches
from fedcluster.models import AlexNet, Logistic
from fedcluster.sketches import Sketch, estimated
from fedcluster.smoothness import hessian_product, largest_curvature, smoothness
from fedcluster.survey import loss_and_gradient, mean_square_deviation, single_gradients, survey
from tests.conftest import blobs


class Mean(nn.Module):
    """w, which is to be close to every sample: f(w; x) = 1/2 sum_i a_i (w_i - x_i)^2."""

    a: Tensor

    def __init__(self, size: int, curvature: list[float] | None = None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size))
        self.register_buffer("a", torch.tensor(curvature or [1.0] * size))

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (self.a * (self.w - x) ** 2).sum(1)


def mean_distance(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    value: Tensor = module(x).mean()
    return value


def three_devices() -> tuple[Dataset, fleets.Fleet]:
    """Device 0 holds (0, 0) and (2, 0), device 1 holds (1, 3), device 2 holds (5, 0)."""
    x = np.array([[0, 0], [2, 0], [1, 3], [5, 0]], np.float32)
    data = Dataset(x, [0, 0, 0, 0], x[:1], [0], device_train=np.array([0, 0, 1, 2]))
    return data, fleets.build(Fleet(partition="natural"), data, 0)


def test_everything_by_hand_on_three_devices() -> None:
    """At w = 0, grad f_k = -mean of device k: g_0 = (-1, 0), g_1 = (-1, -3), g_2 = (-5, 0), p = (1/2, 1/4, 1/4)."""
    data, fleet = three_devices()
    learner = Learner(Mean(2), objective=mean_distance)
    clusters = Clusters(np.array([0, 1, 1]), 2)
    found = survey(learner, learner.w.clone(), data, fleet, Local(batch=3), 0, Display(), clusters)
    # f = 1/2 (0 + 4 + 10 + 25) / 4, g = (-2, -3/4)
    assert fleet.weights @ found.losses == pytest.approx(39 / 8)
    assert found.norms == pytest.approx([1, 10, 25])
    assert found.gradient == pytest.approx(4 + 9 / 16)
    # s_k^2 of a batch of three: a third of the variance of one sample, which is 1 on device 0 and 0 elsewhere
    assert found.variances == pytest.approx([1 / 3, 0, 0])
    # H_device = (1 + 9/16) / 2 + (1 + 81/16) / 4 + (9 + 9/16) / 4; clusters have g = (-1, 0) and (-3, -3/2)
    assert fleet.weights @ found.norms - found.gradient == pytest.approx(4.6875)
    assert found.between == pytest.approx(0.5 * (1 + 9 / 16) + 0.5 * (1 + 9 / 16))
    cut, errors = estimated(found.sketches, found.copies, fleet.weights, clusters)
    assert [cut.device, cut.cluster, cut.within] == pytest.approx([4.6875, 1.5625, 3.125])
    assert errors["cluster"].error == 0  # two numbers need no sketch
    # q = (1/2, 1/2): 2 * (1/2)^2 * 1/3
    assert heterogeneity.variance_term(found.variances, fleet.weights, clusters) == pytest.approx(1 / 6)


@settings(max_examples=80, deadline=None)
@given(
    devices=st.integers(1, 40),
    count=st.integers(1, 8),
    size=st.integers(1, 6),
    scale=st.floats(1e-3, 1e3),
    seed=st.integers(0, 999),
)
def test_the_parts_add_up_and_clusters_differ_no_more_than_devices(
    devices: int, count: int, size: int, scale: float, seed: int
) -> None:
    rng, count = np.random.default_rng(seed), min(count, devices)
    vectors = scale * rng.normal(size=(devices, size)) + rng.normal(size=size) * 100
    weights = rng.dirichlet(np.ones(devices))
    clusters = Clusters(rng.permutation(np.arange(devices) % count), count)
    cut = heterogeneity.split(vectors, weights, clusters)
    mean = weights @ vectors
    assert cut.device == pytest.approx(sum(p * ((v - mean) ** 2).sum() for p, v in zip(weights, vectors, strict=True)))
    assert cut.within + cut.cluster == pytest.approx(cut.device)
    assert cut.cluster <= cut.device * (1 + 1e-9)
    assert cut.by_cluster.sum() == pytest.approx(cut.within)


def test_what_cohorts_add_is_the_mean_over_all_cohorts() -> None:
    """Every pair that can be drawn from a cluster of five, against the formula."""
    from itertools import combinations

    rng = np.random.default_rng(0)
    vectors, weights = rng.normal(size=(10, 3)), np.full(10, 0.1)
    clusters = Clusters(np.repeat([0, 1], 5), 2)
    expected = 0.0
    for mine in clusters.members:
        pairs = [vectors[list(pair)].mean(axis=0) for pair in combinations(mine, 2)]
        expected += 0.5 * np.mean([((pair - vectors[mine].mean(axis=0)) ** 2).sum() for pair in pairs])
    cut = heterogeneity.split(vectors, weights, clusters)
    assert heterogeneity.sampling_term(cut.by_cluster, clusters, np.array([2, 2])) == pytest.approx(expected)
    assert heterogeneity.sampling_term(cut.by_cluster, clusters, np.array([5, 5])) == 0


@pytest.mark.parametrize("rank", [1, 50])
def test_sketches_are_right_on_average_and_know_their_error(rank: int) -> None:
    """Gradients of 20,000 numbers that differ in one direction, the worst case, and in many."""
    rng = np.random.default_rng(1)
    directions = rng.normal(size=(rank, 20_000)).astype(np.float32)
    gradients = rng.normal(size=(60, rank)).astype(np.float32) @ directions + rng.normal(size=20_000) * 5
    weights, clusters = rng.dirichlet(np.full(60, 5)), Clusters(np.arange(60) % 6, 6)
    exact = heterogeneity.split(gradients, weights, clusters)
    wrong, within = [], 0
    for seed in range(12):
        sketch = Sketch(20_000, seed)
        rows = np.stack([sketch(torch.tensor(g, dtype=torch.float32)).numpy() for g in gradients])
        cut, errors = estimated(rows, sketch.copies, weights, clusters)
        assert rows.shape[1] == sketch.length < 20_000 / 8
        assert cut.within + cut.cluster == pytest.approx(cut.device)
        wrong.append(cut.cluster / exact.cluster - 1)
        within += abs(cut.cluster - exact.cluster) <= 3 * errors["cluster"].error
        assert errors["cluster"].error < 0.1 * exact.cluster
    assert np.std(wrong) < 1.5 * (2 / (8 * 256)) ** 0.5  # the bound in the docstring, with room for twelve draws
    assert abs(np.mean(wrong)) < 0.03
    assert within >= 10


def natural() -> tuple[Dataset, fleets.Fleet]:
    data = Dataset(**blobs())
    return data, fleets.build(Fleet(partition="natural"), data, 0)


def test_a_survey_of_a_real_model_against_all_gradients_at_once() -> None:
    data, fleet = natural()
    torch.manual_seed(0)
    learner = Learner(Logistic((5,), 3))
    clusters = Clusters(np.array([0, 1, 2, 0, 1, 2, 0]), 3)
    w = learner.w.clone()
    found = survey(learner, w, data, fleet, Local(batch=4), 0, Display(), clusters)
    gradients = []
    for k in range(len(fleet)):
        weights = w.clone().requires_grad_()
        named = {
            f"linear.{name}": view for name, view in zip(("weight", "bias"), (weights[:15], weights[15:]), strict=True)
        }
        x, y = data.x_train[fleet.draw(k)], data.y_train[fleet.draw(k)]
        scores = x @ named["linear.weight"].view(3, 5).T + named["linear.bias"]
        loss = nn.functional.cross_entropy(scores, y)
        gradients.append(torch.autograd.grad(loss, weights)[0].numpy())
        assert found.losses[k] == pytest.approx(loss.item(), rel=1e-5)
    exact = heterogeneity.split(np.array(gradients), fleet.weights, clusters)
    assert found.between == pytest.approx(exact.cluster, rel=1e-4)
    assert fleet.weights @ found.norms - found.gradient == pytest.approx(exact.device, rel=1e-4)


def test_the_variance_of_a_batch_against_every_batch_there_is() -> None:
    """All 4^3 batches of three that can be drawn, with replacement, from a device of four samples."""
    data, _ = natural()
    rows = np.arange(4)
    learner = Learner(Logistic((5,), 3))
    w, local = learner.w.clone(), Local(batch=3)
    batches = Batches(data, rows, local, 0, (0, 0, 0))
    _, mean = loss_and_gradient(learner, w, batches)
    squares = []
    for chosen in product(rows, repeat=3):
        _, gradient = loss_and_gradient(learner, w, Batches(data, np.array(chosen), local, 0, (0, 0, 0)))
        squares.append(float((gradient - mean).square().sum()))
    single = single_gradients(learner, w, data)
    found = mean_square_deviation(single, batches, rows, learner.named(mean, partial=True)) / 3
    assert found == pytest.approx(np.mean(squares), rel=1e-4)


def test_a_model_that_torch_func_cannot_take_gives_the_same_one_by_one() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 1, 8, 8)).astype(np.float32)
    data = Dataset(x, np.arange(6) % 3, x, np.arange(6) % 3)
    learner = Learner(AlexNet((1, 8, 8), 3))
    w = learner.w.clone()
    single = single_gradients(learner, w, data)
    assert single.__name__ == "in_turn"
    assert single_gradients(Learner(Logistic((1, 8, 8), 3)), torch.zeros(195), data).__name__ == "at_once"
    rows = np.arange(6)
    batches = Batches(data, rows, Local(), 0, (0, 0, 0))
    _, mean = loss_and_gradient(learner, w, batches)
    total = torch.zeros_like(mean)
    for gradients in [single(data.x_train[[i]], data.y_train[[i]]) for i in range(6)]:
        total += torch.cat([tensor.reshape(-1) for tensor in gradients.values()]) / 6
    assert torch.allclose(total, mean, atol=1e-6)


def test_smoothness_of_a_quadratic() -> None:
    data, fleet = three_devices()
    learner = Learner(Mean(2, [3.0, 7.5]), objective=mean_distance)
    assert smoothness(learner, learner.w.clone(), data, fleet, Local(), 0, Display()) == pytest.approx(7.5, rel=1e-3)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_eigenvalue_of_either_sign(sign: int) -> None:
    rng = np.random.default_rng(3)
    basis, _ = np.linalg.qr(rng.normal(size=(40, 40)))
    values = np.append(rng.uniform(-8, 8, 39), 9.0) * sign
    matrix = torch.tensor(basis @ np.diag(values) @ basis.T)
    start = torch.tensor(rng.normal(size=40))
    assert largest_curvature(lambda v: matrix @ v, start) == pytest.approx(9.0, rel=1e-3)
    assert largest_curvature(lambda v: 0 * v, start) == 0


def test_products_with_the_hessian_against_differences_of_gradients() -> None:
    """On a model with running statistics too, which are not trained and have no part in H."""
    rng = np.random.default_rng(0)
    x, y = torch.tensor(rng.normal(size=(6, 4)), dtype=torch.float32), torch.arange(6) % 3
    torch.manual_seed(0)
    learner = Learner(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)))
    learner.module.eval()
    w, v = learner.w.clone(), torch.tensor(rng.normal(size=learner.size), dtype=torch.float32)
    v /= v.norm()

    def gradient(step: float) -> Tensor:
        point = w.clone()
        point[: learner.size] += step * v
        learner.load(point)
        learner.differentiate(x, y)
        return learner.gradient.clone()

    expected = (gradient(0.01) - gradient(-0.01)) / 0.02
    found = hessian_product(learner, w, [(x[:2], y[:2]), (x[2:], y[2:])])(v)
    assert torch.allclose(found, expected, atol=2e-3 * float(expected.abs().max()))


def test_the_normalisation_can_be_differentiated_twice() -> None:
    """AlexNet's own, whose backward pass is written by hand."""
    torch.manual_seed(0)
    x = (30 * torch.randn(1, 12, 2, 1, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradgradcheck(normalise, (x,))
