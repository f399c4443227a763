import math

import pytest

from fedcluster.analysis.tuning import LOWEST, best_step, last_loss, next_steps, rate
from fedcluster.errors import Diverged


@pytest.mark.parametrize("where", [-9, -2, -1, 0, 1, 2, 7])
def test_the_search_ends_with_a_worse_rate_on_either_side(where: int) -> None:
    tried: dict[int, float] = {}
    while steps := next_steps(tried):
        assert not set(steps) & tried.keys()
        tried |= {step: math.inf if step > where + 1 else abs(step - where) for step in steps}
    assert best_step(tried) == where
    assert {where - 1, where + 1} <= tried.keys()
    assert len(tried) <= 4 + abs(where)


def test_the_search_gives_up_where_every_rate_diverges() -> None:
    tried: dict[int, float] = {}
    while steps := next_steps(tried):
        tried |= dict.fromkeys(steps, math.inf)
    assert min(tried) == LOWEST


def test_of_equals_the_lower_rate() -> None:
    assert best_step({0: 1.0, -1: 1.0, 1: 2.0}) == -1


def test_rates() -> None:
    assert [rate(0.05, step) for step in range(-2, 4)] == [0.005, 0.015, 0.05, 0.15, 0.5, 1.5]


def test_a_run_that_ends_worse_than_it_began_counts_as_diverged() -> None:
    assert last_loss(Diverged("nan")) == math.inf
    assert last_loss([{"train_loss": 2.3}, {"train_loss": 0.1}, {"train_loss": 2.4}]) == math.inf
    assert last_loss([{"train_loss": 2.3}, {"train_loss": 0.1}]) == 0.1
