"""The theorem as arithmetic, and its bound in a simulation in which every constant is known."""

import math

import numpy as np
import pytest

from fedcluster.analysis.bound import Bound, Constants
from fedcluster.analysis.heterogeneity import split, variance_term
from fedcluster.fleet.clustering.clusters import Clusters


def test_the_formulas() -> None:
    constants = Constants(gap=3.0, L=2.0, H=0.5, V=0.25, G2=4.0)
    assert constants.C == 2 * 3 + 4 * 2 * 0.75 == 12
    bound = Bound(M=5, E=2, T=10, constants=constants)
    assert bound.value == pytest.approx(2 * 12 / 10)  # err_nc: 2 C / sqrt(TME)
    assert bound.rate == pytest.approx(0.1)
    first, second = bound.conditions
    assert (first.value, first.limit, first.holds) == (10, 12 / 64, False)
    assert first.factor == pytest.approx(10 * 64 / 12)
    assert (second.value, second.limit, second.holds) == (4 * 1.6, 10, True)
    for epsilon in (0.5, 0.1):  # the least T that is enough
        T = bound.rounds_to(epsilon)
        assert Bound(5, 2, T, constants).value <= epsilon < Bound(5, 2, T - 1, constants).value
    assert bound.rounds_to(0.5) == math.ceil(4 * 12**2 / (5 * 2 * 0.5**2))
    assert bound.rounds_to(1e6) == 7  # what the second condition asks for anyway
    flat = Bound(1, 1, 1, Constants(1.0, 0.0, 0.0, 0.0, 0.0))
    assert all(condition.holds for condition in flat.conditions)


def test_a_condition_holds_only_if_it_does_at_the_worst_end_of_every_range() -> None:
    low = Constants(gap=10.0, L=0.05, H=1.0, V=1.0, G2=1.0)
    assert Bound(5, 10, 100, low).conditions[0].holds  # 50 <= 20.4 / 0.4
    steeper = Bound(5, 10, 100, Constants(gap=10.0, L=0.1, H=1.0, V=1.0, G2=1.0), low)
    assert steeper.conditions[0].limit == pytest.approx(20.8 / 0.8)
    assert not steeper.conditions[0].holds
    # more heterogeneity makes C larger and the condition easier: it counts only as far as it is sure
    high = Constants(gap=0.0, L=1.0, H=100.0, V=0.0, G2=1.0)
    unsure = Bound(5, 10, 100, high, Constants(gap=0.0, L=1.0, H=10.0, V=0.0, G2=1.0))
    assert unsure.conditions[0].limit == pytest.approx(40 / 8)
    assert unsure.value == pytest.approx(2 * high.C / math.sqrt(5000))


@pytest.mark.parametrize(("M", "E", "spread"), [(1, 1, 1.0), (2, 1, 1.0), (4, 1, 0.3), (2, 2, 0.3)])
def test_the_bound_holds_where_every_constant_is_known(M: int, E: int, spread: float) -> None:
    """f_k(w) = a/2 ||w - b_k||^2 with noisy gradients a (w - b_k) + s z, z standard normal / sqrt(d).

    So grad f_k - grad f = a (b - b_k) whatever w is: H is a constant, L = a and s_k = s. G^2 is the largest mean
    square of a device's gradient seen on the way. The rate is the theorem's, and so is T, large enough for its
    conditions, which are checked. Algorithm 1 in a few lines, averaged over repetitions.
    """
    rng = np.random.default_rng(M + 10 * E)
    n, d, a, s, T = 8, 3, 0.05, 0.2, 400
    centres = rng.normal(size=(n, d)) * spread
    p = rng.dirichlet(np.full(n, 5.0))
    clusters = Clusters(np.arange(n) % M, M)
    q = np.bincount(clusters.assignment, weights=p)
    best = p @ centres
    W0 = best + np.array([20.0, 0, 0])
    H = split(a * centres, p, clusters).cluster
    V = variance_term(np.full(n, s**2), p, clusters)
    rate, repetitions = 1 / math.sqrt(T * M * E), 20
    total, G2 = 0.0, 0.0
    for _ in range(repetitions):
        W = W0
        for _ in range(T):
            total += ((a * (W - best)) ** 2).sum() / (T * repetitions)
            for K in rng.permutation(M):
                mine = clusters.members[K]
                w = np.repeat(W[None], len(mine), axis=0)
                for _ in range(E):
                    exact = a * (w - centres[mine])
                    G2 = max(G2, float((exact**2).sum(axis=1).max()) + s**2)
                    w = w - rate * (exact + s * rng.normal(size=w.shape) / math.sqrt(d))
                W = (p[mine] / q[K]) @ w
    gap = a / 2 * 400.0  # f(W_0) - inf f
    bound = Bound(M, E, T, Constants(gap, a, H, V, G2))
    assert all(condition.holds for condition in bound.conditions)
    assert 0.02 * bound.value < total <= bound.value  # it holds, and is not vacuous


def test_the_simulation_above_can_fail() -> None:
    """At a hundredth of C the bound would not have held: the test is not one that everything passes."""
    constants = Constants(gap=10.0, L=0.05, H=0.0, V=0.0, G2=1.0)
    T, W, total, rate = 400, 20.0, 0.0, 1 / math.sqrt(400)
    for _ in range(T):
        total += (0.05 * W) ** 2 / T
        W -= rate * 0.05 * W
    assert Bound(1, 1, T, constants).value / 100 < total <= Bound(1, 1, T, constants).value
