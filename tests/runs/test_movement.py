"""How far a cycle moved the model, and the cosine with the movement before it."""

import numpy as np
import pytest
import torch

from fedcluster.runs.movement import WEIGHTS, measure, sample


def test_norm_and_cosine_are_those_of_the_movements() -> None:
    w = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32))
    moved, cosine, last = measure(w[0], w[1], None)
    assert moved == pytest.approx(float(np.linalg.norm(w[1] - w[0])))
    assert cosine is None
    moved, cosine, last = measure(w[1], w[2], last)
    a, b = (w[1] - w[0]).double(), (w[2] - w[1]).double()
    assert cosine == pytest.approx(float(a @ b / (a.norm() * b.norm())))
    assert last is not None
    assert measure(w[2], w[1], last)[1] == pytest.approx(-1)


def test_a_cycle_that_moves_nothing_or_diverges_is_passed_over() -> None:
    w, last = torch.ones(4), torch.tensor([1.0, 0, 0, 0])
    assert measure(w, w, last) == (0.0, None, last)
    assert measure(w, w * torch.inf, last) == (0.0, None, last)


def test_a_large_model_is_sampled() -> None:
    """The cosine of a sample is near that of all weights, and a checkpoint holds no more than the sample."""
    w = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 10 * WEIGHTS + 1)).astype(np.float32))
    start = torch.zeros(w.shape[1])
    _, _, last = measure(start, w[0], None)
    assert last is not None
    assert len(last) == len(sample(start)) <= WEIGHTS
    assert measure(start, w[0] + w[1], last)[1] == pytest.approx(0.5**0.5, abs=0.01)
