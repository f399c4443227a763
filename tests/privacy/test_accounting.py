"""What rounds spend, against known values, and the refusals of [privacy]."""

import builtins
import math
from collections import Counter
from typing import Any

import pytest

import fedcluster
from fedcluster.errors import BadExperiment
from fedcluster.privacy.accounting import Accountant, Draw
from fedcluster.runs.progress import Display

POISSON = Accountant(1e-5, replace=False, local=False)
KEYS: dict[str, Any] = {
    "rounds": 2,
    "fleet": {"devices": 24, "samples": 20},
    "clusters": {"count": 3, "participation": 0.5, "order": "cyclic"},
    "model": {"name": "logistic"},
    "local": {"steps": 3, "batch": 5, "lr": 0.1},
}


def test_the_reference_value_of_a_sampled_gaussian() -> None:
    """sigma 1.5, q 0.04, 2,250 steps, delta 1e-5: 7.329111 on other orders than ours."""
    assert POISSON.epsilon(1.5, Counter({Draw(0.04): 2250})) == pytest.approx(7.329111, abs=1e-4)


@pytest.mark.parametrize(("z", "rounds"), [(2.0, 10), (5.0, 100), (20.0, 400)])
def test_everybody_in_every_round_is_the_gaussian_mechanism(z: float, rounds: int) -> None:
    """At q = 1 the Renyi divergence is alpha T / (2 z^2); the conversion is that of Canonne, Kamath, Steinke."""
    orders = [1 + x / 1000 for x in range(500, 50_000)]
    least = min(a * rounds / (2 * z**2) + math.log1p(-1 / a) - (math.log(1e-5) + math.log(a)) / (a - 1) for a in orders)
    assert POISSON.epsilon(z, Counter({Draw(1.0): rounds})) == pytest.approx(least, rel=2e-3)


def test_noise_for_a_budget_spends_it_and_no_more() -> None:
    rounds = Counter({Draw(0.1): 50})
    z = POISSON.noise_multiplier(4.0, rounds)
    assert 3.99 < POISSON.epsilon(z, rounds) <= 4.0


def test_epsilon_grows_with_rounds_and_replacing_costs_more_than_removing() -> None:
    spent = [POISSON.epsilon(2.0, Counter({Draw(0.1): rounds})) for rounds in (0, 1, 10, 100)]
    assert spent == sorted(spent)
    assert spent[0] == 0
    fixed = Accountant(1e-5, replace=True, local=False)
    assert fixed.epsilon(2.0, Counter({Draw(0.1, 10, 100): 10})) > spent[2]
    assert POISSON.epsilon(0.0, Counter({Draw(0.1): 1})) == math.inf


def test_the_rate_is_that_of_the_cluster_whose_devices_take_part_most_often() -> None:
    import numpy as np

    sizes = np.array([30, 12, 1000])
    assert POISSON.draw(0.1, sizes) == Draw(0.1)
    assert Accountant(1e-5, replace=True, local=False).draw(0.1, sizes) == Draw(2 / 12, 2, 12)
    assert Accountant(1e-5, replace=True, local=True).draw(0.1, sizes) == Draw(1.0)


GOOD: dict[str, Any] = {"noise_multiplier": 1.0, "delta": 1e-3, "clip": 1.0}
BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"clip": 0.0}, {}, "privacy.clip = 0.0 is not allowed"),
    ({"epsilon": 8.0}, {}, "has both epsilon and noise_multiplier"),
    ({"noise_multiplier": None}, {}, "privacy has delta, but no noise"),
    ({"delta": None}, {}, "privacy has no delta"),
    ({"clip": None}, {}, "privacy has no clip"),
    ({"clip": math.inf}, {}, "privacy.clip = inf is not allowed with noise"),
    ({"delta": 1 / 24}, {}, "is not below 1 / 24"),
    ({"bands": 4, "mechanism": "banded"}, {}, "more than the 3 clusters"),
    ({"bands": 2}, {}, 'an option of mechanism = "banded"'),
    ({"mechanism": "banded"}, {"clusters.order": "reshuffle"}, "needs the same order in every round"),
    ({"mechanism": "banded"}, {"clusters.method": "redrawn"}, "needs clusters that stay the same"),
    ({"mechanism": "banded", "sampling": "fixed"}, {}, 'proven for sampling = "poisson" only'),
    ({"mechanism": "local", "sampling": "poisson"}, {}, "gains nothing"),
    ({"clip": "adaptive", "mechanism": "local"}, {}, "needs noise of the server"),
    ({}, {"clusters.order": "random"}, "a device's cluster may have no cycle in a round, or several"),
    ({}, {"clusters.order": "balanced"}, "it follows from what devices uploaded"),
    ({}, {"clusters.method": "major_class"}, "makes clusters from devices' labels"),
    ({}, {"clusters.overlap": 1}, "the accounting of [privacy] is for cycles one after another"),
    ({}, {"clusters.weighting": "sample"}, "gives away how many samples devices have"),
    ({}, {"algorithm.name": "scaffold"}, "algorithm = scaffold uploads model, variate"),
    ({}, {"algorithm.name": "fednova"}, "weighs or changes uploads"),
    ({}, {"algorithm.name": "mime"}, "uploads gradient and model"),
    ({}, {"accept.norm_bound": 3.0}, "refuses updates by what other devices uploaded"),
    ({"secure_aggregation": True}, {}, "hides the updates that the server has to clip"),
    ({}, {"clock": {}}, "[clock] is not allowed with [privacy]"),
    ({}, {"method": "centralized"}, "has no devices that [privacy] could protect"),
    ({}, {"stop": {"metric": "train_loss", "target": 0.1}}, "is computed from what devices hold"),
    ({}, {"model.name": "tests.golden:Network"}, "running statistics"),
    ({"epsilon": 1e6, "noise_multiplier": None}, {}, "protects nothing"),
]


@pytest.mark.parametrize(("keys", "others", "message"), BAD, ids=[message[:40] for *_, message in BAD])
def test_what_is_refused(keys: dict[str, Any], others: dict[str, Any], message: str) -> None:
    with pytest.raises(BadExperiment) as refused:
        fedcluster.run(fedcluster.Experiment(**KEYS, privacy=GOOD | keys).override(**others), display=Display())
    assert message in str(refused.value)


def test_without_dp_accounting_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *arguments: Any, **keys: Any) -> Any:
        if name.startswith("dp_accounting"):
            raise ImportError(name)
        return real(name, *arguments, **keys)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(BadExperiment, match=r"pip install 'fedcluster\[privacy\]'"):
        Accountant(2e-5, replace=False, local=False).epsilon(3.0, Counter({Draw(0.3): 7}))
