"""Momentum over a round, GHBM and its relatives, and orders of clusters, against an independent reading in NumPy:
softmax regression, unequal clusters, partial participation."""

import csv
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

import fedcluster
from fedcluster.algorithms import past_models
from fedcluster.errors import BadExperiment
from fedcluster.rng import stream
from fedcluster.runs.progress import Display
from fedcluster.state import State
from fedcluster.training.setup import prepare
from tests.algorithms.test_algorithms import softmax
from tests.conftest import blobs
from tests.reference_algorithms import softmax_regression
from tests.reference_momentum import Cohorts, pair_balance, train
from tests.runs.test_resume import essence, stop_and_resume

CLUSTERS = [[0, 3, 5, 7, 9], [1, 8], [2, 4, 6]]
DATA = blobs(devices=10)
LR, STEPS, BATCH = 0.1, 4, 6


def experiment(folder: Path, rounds: int = 6, clusters: Any = CLUSTERS, **sections: Any) -> fedcluster.Experiment:
    with (folder / "clusters.csv").open("w", newline="") as file:
        rows = [(device, cluster) for cluster, devices in enumerate(clusters) for device in devices]
        csv.writer(file).writerows([("device", "cluster"), *rows])
    cycling = {"method": "file", "path": str(folder / "clusters.csv"), "participation": 0.6}
    return fedcluster.Experiment(
        rounds=rounds,
        data={"name": fedcluster.Dataset(**DATA)},
        fleet={"partition": "natural"},
        clusters=cycling | sections.pop("clusters_keys", {}),
        model={"name": softmax},
        local={"steps": STEPS, "batch": BATCH, "lr": LR},
        **sections,
    )


def run(described: fedcluster.Experiment, out: Path) -> NDArray[np.float64]:
    model = fedcluster.run(described, out, display=Display()).model
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double().numpy()


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "cycles.jsonl").read_text().splitlines()]


def cohorts(out: Path, M: int = len(CLUSTERS)) -> Cohorts:
    by_cycle = [line["cohort"] for line in lines(out)]
    return [by_cycle[first : first + M] for first in range(0, len(by_cycle), M)]


ROWS = {k: np.flatnonzero(DATA["device_train"] == k) for k in range(10)}


def batches(j: int, K: int, k: int) -> list[Any]:
    return list(ROWS[k][stream(0, "batch", j, K, k).integers(len(ROWS[k]), size=(STEPS, BATCH))])


def gradient(k: int, w: NDArray[np.float64], batch: Any) -> NDArray[np.float64]:
    return softmax_regression(w, DATA["x_train"][batch].astype(np.float64), DATA["y_train"][batch])


def start() -> NDArray[np.float64]:
    return torch.cat([p.detach().flatten() for p in softmax((5,), 3).parameters()]).double().numpy()


def read_again(method: str, who: Cohorts, **keys: Any) -> list[NDArray[np.float64]]:
    return train(method, who, start(), gradient, batches, {k: len(ROWS[k]) for k in ROWS}, LR, **keys)


SLIDING = {"optimizer": "round_momentum", "memory": "sliding"}
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sliding": ({"server": SLIDING}, {}),
    "sliding, beta 0.8": ({"server": SLIDING | {"betas": [0.8, 0.9]}}, {"beta": 0.8}),
    "held": ({"server": {"optimizer": "round_momentum"}}, {}),
    "amplified": ({"server": {"optimizer": "amplified", "lr": 1.3}}, {"beta": 1.3}),
    "ghbm": ({"algorithm": {"name": "ghbm", "beta": 0.5}}, {}),
    "ghbm, tau 5": ({"algorithm": {"name": "ghbm", "beta": 0.5, "tau": 5}}, {"tau": 5}),
    "ghbm and sliding, tau 5": (  # two rings
        {"algorithm": {"name": "ghbm", "beta": 0.5, "tau": 5}, "server": SLIDING},
        {"tau": 5},
    ),
    "local_ghbm": ({"algorithm": {"name": "local_ghbm", "beta": 0.5}}, {}),
    "fedhbm": ({"algorithm": {"name": "fedhbm", "beta": 0.5}}, {}),
}


@pytest.mark.parametrize("order", ["cyclic", "reshuffle", "random"])
@pytest.mark.parametrize("method", METHODS)
def test_agrees_with_numpy(method: str, order: str, tmp_path: Path) -> None:
    sections, keys = METHODS[method]
    ours = run(experiment(tmp_path, clusters_keys={"order": order}, **sections), tmp_path / "run")
    theirs = read_again(method.split(",")[0], cohorts(tmp_path / "run"), **keys)
    np.testing.assert_allclose(ours, theirs[-1], rtol=2e-5, atol=2e-6)
    plain = read_again("none", cohorts(tmp_path / "run"))
    assert not np.allclose(theirs[-1], plain[-1], rtol=1e-3), "the method does something"


@pytest.mark.parametrize("name", ["ghbm", "local_ghbm", "fedhbm"])
def test_gradients_are_clipped_and_decayed_and_the_momentum_is_not(name: str, tmp_path: Path) -> None:
    local = {"local.clip_norm": 0.1, "local.weight_decay": 0.2}
    described = experiment(tmp_path, algorithm={"name": name, "beta": 0.5}).override(**local)
    ours = run(described, tmp_path / "run")

    def clipped(j: int, w: NDArray[np.float64], batch: Any) -> NDArray[np.float64]:
        g = gradient(j, w, batch)
        return g * min(1.0, 0.1 / float(np.linalg.norm(g))) + 0.2 * w

    weight: dict[int, float] = {k: len(ROWS[k]) for k in ROWS}
    theirs = train(name, cohorts(tmp_path / "run"), start(), clipped, batches, weight, LR, beta=0.5)
    np.testing.assert_allclose(ours, theirs[-1], rtol=2e-5, atol=2e-6)


def test_ghbm_with_tau_1_is_fedcm(tmp_path: Path) -> None:
    """Xu et al.: FedCM: Federated Learning with Client-level Momentum, 2021. Local steps w <- w - eta v with

        v = alpha g + (1 - alpha) D_t,    D_{t+1} = (W_t - W_{t+1}) / (eta E),    D_0 = 0

    are those of ghbm with lr = alpha eta and beta = 1 - alpha."""
    alpha = 0.3
    eta = LR / alpha
    described = experiment(tmp_path, algorithm={"name": "ghbm", "beta": 1 - alpha, "tau": 1})
    ours = run(described, tmp_path / "run")
    W, D = start(), np.zeros_like(start())
    for j, cycles in enumerate(cohorts(tmp_path / "run")):
        for K, cohort in enumerate(cycles):
            total, new = sum(len(ROWS[k]) for k in cohort), np.zeros_like(W)
            for k in cohort:
                w = W
                for batch in batches(j, K, k):
                    w = w - eta * (alpha * gradient(k, w, batch) + (1 - alpha) * D)
                new = new + len(ROWS[k]) / total * w
            W, D = new, (W - new) / (eta * STEPS)
    np.testing.assert_allclose(ours, W, rtol=2e-5, atol=2e-6)


NOTHING: dict[str, dict[str, Any]] = {
    "sliding, beta = 0": {"server": SLIDING | {"betas": [0.0, 0.9]}},
    "held, beta = 0": {"server": {"optimizer": "round_momentum", "betas": [0.0, 0.9]}},
    "amplified by 1": {"server": {"optimizer": "amplified", "lr": 1.0}},
    "ghbm with beta = 0": {"algorithm": {"name": "ghbm", "beta": 0.0}},
    "local_ghbm with beta = 0": {"algorithm": {"name": "local_ghbm", "beta": 0.0}},
    "fedhbm with beta = 0": {"algorithm": {"name": "fedhbm", "beta": 0.0}},
}


@pytest.mark.parametrize("name", NOTHING)
def test_without_momentum_it_is_fedcluster_to_the_bit(name: str, tmp_path: Path) -> None:
    described = experiment(tmp_path, **NOTHING[name])
    plain = run(experiment(tmp_path), tmp_path / "plain")
    np.testing.assert_array_equal(run(described, tmp_path / "it"), plain)


def test_the_ring_holds_a_round_of_models_and_no_more(tmp_path: Path) -> None:
    run(experiment(tmp_path, server=SLIDING), tmp_path / "run")
    (newest, *_) = sorted((tmp_path / "run" / "checkpoint").glob("*.safetensors"), reverse=True)
    kept = {name: tensor for name, tensor in load_file(newest).items() if name.startswith("server/")}
    assert sorted(kept) == ["server/past.3.0", "server/past.3.1", "server/past.3.2"]
    models = read_again("sliding", cohorts(tmp_path / "run"))
    for place, tensor in enumerate(kept.values()):
        np.testing.assert_allclose(tensor, models[5 * 3 + place], rtol=2e-5, atol=2e-6)


def test_more_models_than_fit_into_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedcluster.training.setup.total_memory", lambda: 2 * 3 * 18 * 4 - 1)  # 18 weights
    prepare(experiment(tmp_path, server=SLIDING | {"memory": "held"}))
    with pytest.raises(BadExperiment, match=r"the server would keep .* in 3 tensors"):
        prepare(experiment(tmp_path, server=SLIDING))


@pytest.mark.parametrize("method", ["sliding", "held", "amplified", "ghbm"])
def test_rounds_begin_and_end_although_cycles_fail(method: str, tmp_path: Path) -> None:
    """Half of the devices drop out, and with them some of the first and of the last cycles of rounds."""
    sections, keys = METHODS[method]
    timed = {"dropout": 0.5, "over_select": 1.0}
    ours = run(experiment(tmp_path, 12, clock=timed, **sections), tmp_path / "run")
    who = cohorts(tmp_path / "run")
    assert not all(who[j][0] for j in range(12))
    assert not all(who[j][-1] for j in range(12))
    np.testing.assert_allclose(ours, read_again(method, who, **keys)[-1], rtol=2e-5, atol=2e-6)


def test_scaffolds_variates_are_reset_although_the_first_cycle_fails(tmp_path: Path) -> None:
    class Watch(fedcluster.Callback):
        def on_cycle_end(self, line: dict[str, Any], state: State) -> None:
            if line["failed"] and line["cycle"] == 0:
                found.append(bool(state.server["variate"].any()))

    found: list[bool] = []
    scaffold = {"name": "scaffold", "reset": "round"}
    described = experiment(tmp_path, 12, algorithm=scaffold, clock={"dropout": 0.5, "over_select": 1.0})
    fedcluster.run(described, display=Display(), callbacks=[Watch()])
    assert found
    assert not any(found)


# Orders


def test_a_cycle_that_fails_counts_as_one_of_the_last_cycles() -> None:
    state = State(torch.zeros(2), server=past_models.initial(torch.zeros(2), 2), cycles=2)
    for t in range(4):
        state = replace(state, model=torch.full((2,), float(t)), round=t // 2, cycle=t % 2)
        assert past_models.past(state.server, t, 2)[0] == max(0, t - 2)
        state = past_models.step(state, state)  # a cycle that changes nothing


def test_orders(tmp_path: Path) -> None:
    found = {}
    for order in ("cyclic", "once", "reshuffle", "random", "balanced"):
        out = tmp_path / order
        described = experiment(tmp_path, 12, [[k] for k in range(10)], clusters_keys={"order": order})
        run(described.override(**{"clusters.participation": 1.0}), out)
        by_cycle = [line["cluster"] for line in lines(out)]
        found[order] = [by_cycle[first : first + 10] for first in range(0, len(by_cycle), 10)]
    assert found["cyclic"] == [list(range(10))] * 12
    assert found["once"] == [found["once"][0]] * 12 != found["cyclic"]
    assert len({tuple(order) for order in found["reshuffle"]}) > 10
    for name in ("once", "reshuffle", "random", "balanced"):  # with one device a cluster, nobody can take part twice
        assert all(sorted(order) == list(range(10)) for order in found[name])


def test_in_random_order_clusters_come_with_replacement_and_devices_without(tmp_path: Path) -> None:
    described = experiment(tmp_path, 40, clusters_keys={"order": "random", "participation": 0.34})
    run(described, tmp_path / "run")
    by_round = [lines(tmp_path / "run")[first : first + 3] for first in range(0, 120, 3)]
    assert any(len({line["cluster"] for line in of_round}) < 3 for of_round in by_round)
    for of_round in by_round:
        devices = [device for line in of_round for device in line["cohort"]]
        assert len(devices) == len(set(devices))


@pytest.mark.parametrize("M", [4, 5])
def test_balanced_order_agrees_with_a_reading_that_tries_both_signs(M: int, tmp_path: Path) -> None:
    clusters = [list(range(K, 10, M)) for K in range(M)]
    run(experiment(tmp_path, 8, clusters, clusters_keys={"order": "balanced"}), tmp_path / "run")
    models = read_again("none", cohorts(tmp_path / "run", M))
    taken = [line["cluster"] for line in lines(tmp_path / "run")]
    for j in range(7):
        order = taken[j * M : (j + 1) * M]
        moved = [after - before for before, after in pairwise(models[j * M : (j + 1) * M + 1])]
        assert pair_balance(order, moved) == taken[(j + 1) * M : (j + 2) * M]


# What is kept survives


KEEPING: dict[str, dict[str, Any]] = {
    "sliding": {"server": SLIDING},
    "held": {"server": {"optimizer": "round_momentum"}},
    "amplified": {"server": {"optimizer": "amplified"}},
    "ghbm": {"algorithm": {"name": "ghbm"}},
    "local_ghbm": {"algorithm": {"name": "local_ghbm"}},
    "fedhbm": {"algorithm": {"name": "fedhbm"}},
    "balanced": {"clusters_keys": {"order": "balanced"}},
    "sample": {"clusters_keys": {"weighting": "sample"}},
}


@pytest.mark.parametrize("name", KEEPING)
def test_a_run_stopped_within_a_round_ends_at_the_same_bytes(name: str, tmp_path: Path) -> None:
    described = experiment(tmp_path, **KEEPING[name])
    fedcluster.run(described, tmp_path / "whole", display=Display())
    stop_and_resume(described, tmp_path / "stopped", after=8)
    assert essence(tmp_path / "stopped") == essence(tmp_path / "whole")


@pytest.mark.parametrize("name", KEEPING)
def test_workers_change_nothing(name: str, tmp_path: Path) -> None:
    """Cohorts of up to three devices: four processes are more than there is work for."""
    described = experiment(tmp_path, **KEEPING[name])
    for workers in (1, 2, 4):
        fedcluster.run(described, tmp_path / str(workers), display=Display(), workers=workers)
    assert essence(tmp_path / "1") == essence(tmp_path / "2") == essence(tmp_path / "4")


@pytest.mark.parametrize("name", ["ghbm", "local_ghbm", "fedhbm"])
def test_stacked_cohorts_agree(name: str, tmp_path: Path) -> None:
    described = experiment(tmp_path, **KEEPING[name])
    one = fedcluster.run(described, display=Display()).history[-1]["train_loss"]
    stacked = fedcluster.run(described, display=Display(), cohorts="stacked").history[-1]["train_loss"]
    assert stacked == pytest.approx(one, rel=1e-4)


def test_options_that_do_not_fit_are_named() -> None:
    for sections, said in (
        ({"server": {"memory": "held"}}, 'server.memory = "held"'),
        ({"algorithm": {"name": "ghbm", "tau": 0}}, "algorithm.tau = 0 is not allowed"),
        ({"algorithm": {"name": "fedhbm"}, "local": {"optimizer": "adam"}}, "use sgd"),
        ({"clusters": {"order": "sorted"}}, "clusters.order = 'sorted' is not allowed"),
    ):
        with pytest.raises(BadExperiment, match=said.replace("[", "\\[")):
            fedcluster.Experiment(**sections)
