"""Comparisons are fair, and report what the runs show."""

from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

import fedcluster
from fedcluster.analysis.compare import Outcome
from fedcluster.analysis.tuning import TUNING_SEEDS
from fedcluster.cli.tables import verdict
from fedcluster.runs.metrics import read_lines

SMALL = fedcluster.Experiment(
    rounds=2,
    fleet={"devices": 12, "samples": 20},
    clusters={"count": 3, "participation": 0.5},
    model={"name": "logistic"},
    local={"steps": 3, "batch": 5, "lr": 0.1},
)


@pytest.mark.parametrize(("lr", "fedavg"), [("paper", 0.3), ("equal", 0.1)])
def test_rates_and_budgets(lr: str, fedavg: float) -> None:
    result = fedcluster.compare(SMALL, seeds=2, lr=lr)
    outcomes = {outcome.method: outcome for outcome in result.outcomes}
    assert outcomes["fedavg"].lr == pytest.approx(fedavg)
    assert outcomes["fedcluster"].lr == outcomes["centralized"].lr == 0.1
    last = {method: outcome.histories[0][-1] for method, outcome in outcomes.items()}
    for key in ("device_updates", "bytes_up", "bytes_down"):
        assert last["fedavg"][key] == last["fedcluster"][key]
    assert last["fedcluster"]["aggregations"] == 3 * last["fedavg"]["aggregations"]
    for seed in range(2):  # the same start, by the same yardstick
        assert len({outcome.histories[seed][0]["train_loss"] for outcome in result.outcomes}) == 1
    assert all(rounds is not None for outcome in result.outcomes for rounds in outcome.rounds_to(result.target))


@pytest.mark.parametrize(
    ("local", "batch", "rate"),
    [
        ({"steps": 3}, 15, 0.3),
        ({"steps": [2, 4]}, 15, 0.3),
        ({"epochs": 2}, "full", 0.2),
        ({"batch": "full"}, "full", 0.3),
    ],
)
def test_minibatch_sgd_takes_one_step_on_as_many_samples(local: dict[str, Any], batch: Any, rate: float) -> None:
    experiment = SMALL.override(local=local, rounds=1)
    result = fedcluster.compare(experiment, ["fedcluster", "minibatch"], seeds=1)
    ours, theirs = (outcome.histories[0][-1] for outcome in result.outcomes)
    assert result.outcomes[1].lr == pytest.approx(rate)
    for key in ("device_updates", "bytes_up", "bytes_down", "aggregations"):
        assert ours[key] == theirs[key]
    by_hand = experiment.override(**{"local.steps": 1, "local.batch": batch, "local.lr": result.outcomes[1].lr})
    assert by_hand.local.epochs is None
    assert fedcluster.run(by_hand).history[-1]["train_loss"] == theirs["train_loss"]


def test_fedcluster_plus_has_momentum_over_a_round() -> None:
    experiment = SMALL.override(rounds=4)
    result = fedcluster.compare(experiment, ["fedcluster", "fedcluster+"], seeds=1)
    ours, theirs = (outcome.histories[0][-1] for outcome in result.outcomes)
    assert (ours["bytes_up"], ours["bytes_down"]) == (theirs["bytes_up"], theirs["bytes_down"])
    by_hand = fedcluster.run(experiment.override(**{"server.optimizer": "round_momentum"})).history[-1]
    assert ours["train_loss"] != theirs["train_loss"] == by_hand["train_loss"]


@pytest.mark.parametrize(
    ("devices", "count", "participation", "updates"),
    [
        (20, 10, 0.1, 10),  # two devices a cluster, of which one takes part: FedAvg gets ten as well
        (24, 8, 0.5, 12),  # one and a half a cluster
        (12, 3, 0.5, 6),
    ],
)
def test_every_method_has_the_same_device_updates(devices: int, count: int, participation: float, updates: int) -> None:
    fleet = {"devices": devices, "samples": 20}
    experiment = SMALL.override(fleet=fleet, clusters={"count": count, "participation": participation}, rounds=1)
    result = fedcluster.compare(experiment, ["fedavg", "fedcluster"], seeds=1)
    assert [outcome.histories[0][-1]["device_updates"] for outcome in result.outcomes] == [updates, updates]
    assert not any("budgets differ" in text for text in verdict(result))
    assert result.x == "rounds"
    raised = "FedAvg's participation is 0.5, not 0.1, so that it has as many device updates a round as FedCluster."
    assert (raised in verdict(result)) == (devices == 20)


def some_left_out(fleet: Any, rng: Any, options: Any) -> Any:
    """Three clusters of some devices: how many depends on the seed."""
    clusters = np.arange(len(fleet)) % 3
    clusters[rng.choice(len(fleet), int(rng.integers(1, 7)), replace=False)] = -1
    return clusters


def test_budgets_are_equal_on_every_seed_where_clusters_differ() -> None:
    keys = {"fleet": {"devices": 30, "samples": 20}, "clusters": {"method": some_left_out, "count": 3}}
    experiment = SMALL.override(**keys, rounds=1)
    result = fedcluster.compare(experiment, ["fedavg", "fedcluster"], seeds=3)
    updates = [[lines[-1]["device_updates"] for lines in outcome.histories] for outcome in result.outcomes]
    assert updates[0] == updates[1]
    assert len(set(updates[0])) > 1


def test_unequal_budgets_are_said_and_compared_over_updates() -> None:
    """Clusters of 5 and 6 devices, drawn with replacement, so that rounds differ in their cohorts."""
    clusters = {"count": 4, "participation": 0.3, "order": "random"}
    experiment = SMALL.override(fleet={"devices": 23, "samples": 20}, clusters=clusters, rounds=3)
    result = fedcluster.compare(experiment, ["fedavg", "fedcluster"], seeds=2)
    fedavg, ours = (one.updates for one in result.outcomes)
    assert fedavg != ours
    assert f"Device updates over all seeds: FedAvg {fedavg}, FedCluster {ours}." in verdict(result)[0]
    assert result.x == "updates"
    chosen = fedcluster.compare(experiment, ["fedavg", "fedcluster"], seeds=2, x="rounds")
    assert chosen.x == "rounds"
    assert "Compare over updates (--x updates)" in verdict(chosen)[0]


def test_tuned_rates_come_from_other_seeds_and_skip_what_diverges(tmp_path: Path) -> None:
    experiment = SMALL.override(**{"local.lr": 1e29, "model.name": "mlp"})
    with pytest.raises(fedcluster.FedClusterError, match=r"tune-fedavg-1e.23-.* diverges, and so does every higher"):
        fedcluster.compare(experiment, ["fedavg"], seeds=1, lr="tuned")
    result = fedcluster.compare(SMALL, ["fedcluster"], seeds=1, lr="tuned", out=tmp_path / "out")
    losses: dict[float, list[float]] = {}
    for folder in (tmp_path / "out").glob("tune-*"):
        method, rate, seed = folder.name.removeprefix("tune-").split("-", 2)
        assert method == "fedcluster"
        assert int(seed.removeprefix("seed")) in TUNING_SEEDS
        losses.setdefault(float(rate), []).append(read_lines(folder / "metrics.jsonl")[-1]["train_loss"])
    assert {len(found) for found in losses.values()} == {len(TUNING_SEEDS)}
    best = min(losses, key=lambda rate: fmean(losses[rate]))
    assert result.outcomes[0].lr == best
    assert min(losses) < best < max(losses)


def test_several_processes_find_the_same(tmp_path: Path) -> None:
    one = fedcluster.compare(SMALL, ["fedcluster", "fedavg"], seeds=2, workers=1)
    two = fedcluster.compare(SMALL, ["fedcluster", "fedavg"], seeds=2, workers=2)
    for a, b in zip(one.outcomes, two.outcomes, strict=True):
        assert [[x["train_loss"] for x in h] for h in a.histories] == [
            [x["train_loss"] for x in h] for h in b.histories
        ]


def test_rounds_to_a_loss() -> None:
    curve = [{"round": n, "train_loss": loss} for n, loss in enumerate([2.0, 1.0, 1.2, 0.5])]
    outcome = Outcome("fedavg", 0.1, 1, [curve, curve[:2]])
    assert outcome.rounds_to(0.9) == [3, None]
    assert outcome.rounds_to(1.0) == [1, 1]
    assert outcome.final("train_loss")[0] == 0.75
