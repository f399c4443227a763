"""The compiled passes over whole updates find what torch finds."""

import math

import pytest
import torch

from fedcluster.algorithms.aggregation.mean import Mean
from fedcluster.models.kernels import library
from fedcluster.models.kernels.vectors import all_finite, fits
from tests.models.test_network import needs_compiler


@needs_compiler
@pytest.mark.parametrize("size", [1, 8, 1003])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), 3.4e38, 0.0, 1e-45])
def test_one_odd_number_is_found_in_every_place(size: int, odd: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in {0, size // 2, size - 1}:
        vector = torch.full((size,), 3.4e38)  # the sum is not finite
        vector[place] = odd
        assert all_finite(vector) == math.isfinite(odd)
        assert fits(vector)
        with monkeypatch.context() as without:
            without.setattr(library, "load", lambda: None)
            assert all_finite(vector) == math.isfinite(odd)


def mean_of(weighted: list[tuple[float, dict[str, torch.Tensor]]]) -> torch.Tensor:
    mean = Mean(weighted[0][1])
    for weight, message in weighted:
        mean.accumulate(message, weight)
    aggregate = mean.finish()
    assert aggregate is not None
    return aggregate.message["model"]


@needs_compiler
def test_averages_are_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    vectors = [torch.randn(5003) * 10.0 ** torch.randint(-9, 3, (5003,)) for _ in range(7)]
    weighted = [
        (weight, {"model": vector})
        for weight, vector in zip([0.1, 0.3, 1 / 3, 0.05, 1e-6, 0.2, 0.125], vectors, strict=True)
    ]
    fast = mean_of(weighted)
    monkeypatch.setattr(library, "load", lambda: None)
    assert torch.equal(fast, mean_of(weighted))
