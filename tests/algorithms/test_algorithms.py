"""Every algorithm against an independent reading of its paper, and against what it must equal."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import fedcluster
from fedcluster.errors import BadExperiment, BudgetExceeded
from fedcluster.models import flat_model as flat_models
from fedcluster.rng import stream
from fedcluster.runs.progress import Display
from tests.conftest import algorithm_and_local, blobs
from tests.reference_algorithms import ALGORITHMS, Array, Index, Problem, relu_network, simulate, softmax_regression
from tests.runs.test_resume import essence

LOCAL: dict[str, Any] = {
    "optimizer": "sgd",
    "lr": 0.1,
    "momentum": 0.5,
    "betas": [0.9, 0.99],
    "eps": 1e-3,
    "mu": 0.3,
    "beta": 0.5,
    "eta": 0.7,
    "option": "II",
    "reset": "never",
    "batch": 6,
}
CLUSTERS = [[0, 3, 5], [1], [2, 4, 6]]
ALL = [list(range(7))]
ROUNDS = 3
HIDDEN = 4


def network(shape: tuple[int, ...], classes: int) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(shape[0], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, classes))


def softmax(shape: tuple[int, ...], classes: int) -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(shape[0], classes))


def experiment(
    folder: Path,
    algorithm: str,
    clusters: list[list[int]] = CLUSTERS,
    model: Any = softmax,
    server: dict[str, Any] | None = None,
    rounds: int = ROUNDS,
    **local: Any,
) -> fedcluster.Experiment:
    steps = {} if "epochs" in local else {"steps": 4}
    with (folder / "clusters.csv").open("w", newline="") as file:
        rows = [(device, cluster) for cluster, devices in enumerate(clusters) for device in devices]
        csv.writer(file).writerows([("device", "cluster"), *rows])
    return fedcluster.Experiment(
        rounds=rounds,
        data={"name": fedcluster.Dataset(**blobs())},
        fleet={"partition": "natural"},
        clusters={"method": "file", "path": str(folder / "clusters.csv"), "order": "cyclic", "participation": 1.0},
        model={"name": model},
        **algorithm_and_local(LOCAL | steps | {"algorithm": algorithm} | local),
        server=server or {},
    )


def ours(described: fedcluster.Experiment, **how: Any) -> NDArray[Any]:
    model = fedcluster.run(described, display=Display(), **how).model
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double().numpy()


def reference(described: fedcluster.Experiment, clusters: list[list[int]]) -> NDArray[np.float64]:
    data, local = blobs(), described.local
    mine = [data["device_train"] == k for k in range(7)]

    def batches(j: int, cycle: int, k: int) -> list[NDArray[np.int64]]:
        size, steps = int(mine[k].sum()), local.epochs or local.steps
        if isinstance(steps, tuple):
            steps = int(stream(0, "steps", round=j, device=k).integers(steps[0], steps[1] + 1))
        assert steps is not None
        if local.batch == "full":
            return [np.arange(size)] * steps
        if local.epochs:
            rng, found = stream(0, "batch", j, cycle, k), list[NDArray[np.int64]]()
            for _ in range(local.epochs):
                found += np.split(rng.permutation(size), range(local.batch, size, local.batch))
            return found
        return list(stream(0, "batch", j, cycle, k).integers(size, size=(steps, local.batch)))

    plain = softmax_regression if described.model.name is softmax else relu_network(HIDDEN)

    def gradient(w: Array, x: Array, y: Index, beta: float = 0.0) -> Array:
        """Of the loss with its L2 term: coupled weight decay is a part of the problem."""
        return plain(w, x, y, beta) + (0.0 if local.optimizer == "adamw" else local.weight_decay or 0.0) * w

    module = described.model.name((5,), 3)
    problem = Problem(
        x=[data["x_train"][m].astype(np.float64) for m in mine],
        y=[data["y_train"][m] for m in mine],
        clusters=clusters,
        rounds=described.rounds,
        start=torch.cat([p.detach().flatten() for p in module.parameters()]).double().numpy(),
        gradient=gradient,
        batches=batches,
    )
    return simulate(
        problem,
        str(described.algorithm.name),
        local.model_dump() | dict(described.algorithm),
        described.server.model_dump(),
    )


ROWS: list[tuple[str, dict[str, Any]]] = [
    *(("fedavg", {"optimizer": name}) for name in ("sgd", "momentum", "adam")),
    *(("fedprox", {"optimizer": name}) for name in ("sgd", "momentum", "adam")),
    *(("scaffold", {"option": option, "reset": reset}) for option in ("I", "II") for reset in ("never", "round")),
    ("scaffold", {"option": "I", "optimizer": "adam"}),
    ("fednova", {"steps": [2, 7]}),
    ("fednova", {"steps": [2, 7], "optimizer": "momentum"}),
    *(("mime", {"optimizer": name}) for name in ("sgd", "momentum", "adam")),
    *(("mimelite", {"optimizer": name}) for name in ("sgd", "momentum", "adam")),
    *((name, {"optimizer": "adam", "statistics": "fixed", "eps": 0.1}) for name in ("mime", "mimelite")),
    *(("fedl", {"optimizer": name}) for name in ("sgd", "momentum")),
    ("fedmax", {}),
    ("fedmax", {"model": network}),
    ("fedmax", {"model": network, "optimizer": "momentum"}),
    ("vrl_sgd", {}),
    ("vrl_sgd", {"steps": [1, 5]}),
    *(("fedsvrg", {"optimizer": name}) for name in ("sgd", "momentum", "adam")),
    ("pr_spider", {}),
    ("fedavg", {"steps": [2, 7]}),
    *((name, {"epochs": 2}) for name in ALGORITHMS),
    ("scaffold", {"epochs": 2, "option": "I"}),
    ("fednova", {"epochs": 2, "optimizer": "momentum"}),
    *((name, {"weight_decay": 0.3}) for name in ALGORITHMS),
    *((name, {"weight_decay": 0.3, "optimizer": "momentum"}) for name in ("scaffold I", "fednova", "mime", "fedl")),
    *((name, {"weight_decay": 0.3, "optimizer": "adam"}) for name in ("fedavg", "mimelite", "fedsvrg")),
    *((name, {"weight_decay": 0.3, "optimizer": "adamw"}) for name in ("fedavg", "fedprox", "scaffold I", "fedsvrg")),
    *((name, {"nesterov": True, "optimizer": "momentum"}) for name in ("fedavg", "scaffold I", "fedl", "fedsvrg")),
    ("fednova", {"nesterov": True, "optimizer": "momentum", "epochs": 2, "weight_decay": 0.3}),
    ("fedmax", {"model": network, "nesterov": True, "optimizer": "momentum"}),
    ("fedmax", {"model": network, "weight_decay": 0.3, "optimizer": "adamw"}),
    ("fedprox", {"nesterov": True, "optimizer": "momentum"}),
    *((name, {"clip_norm": 0.2}) for name in ("fedavg", "fedprox", "fednova", "fedmax")),
    *((name, {"clip_norm": 0.2, "weight_decay": 0.3, "optimizer": "adamw"}) for name in ("fedavg", "fedprox")),
]


def named(algorithm: str, local: dict[str, Any]) -> str:
    return " ".join([algorithm, *(f"{key}={getattr(value, '__name__', value)}" for key, value in local.items())])


@pytest.mark.parametrize("clusters", [CLUSTERS, ALL], ids=["M=3", "M=1"])
@pytest.mark.parametrize("batch", [6, "full"])
@pytest.mark.parametrize(("algorithm", "local"), ROWS, ids=[named(*row) for row in ROWS])
def test_agrees_with_numpy(
    algorithm: str, local: dict[str, Any], batch: Any, clusters: list[list[int]], tmp_path: Path
) -> None:
    if algorithm == "scaffold I":
        algorithm, local = "scaffold", local | {"option": "I"}
    lr = 0.02 if local.get("optimizer") in ("adam", "adamw") else 0.1  # Adam's first steps magnify rounding
    described = experiment(tmp_path, algorithm, clusters, **local, batch=batch, lr=lr)
    np.testing.assert_allclose(ours(described), reference(described, clusters), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "fednova", "mime", "fedl", "vrl_sgd", "pr_spider"])
@pytest.mark.parametrize("optimizer", ["none", "avgm", "adagrad", "adam", "yogi"])
def test_server_optimizers_agree_with_numpy(algorithm: str, optimizer: str, tmp_path: Path) -> None:
    server = {"optimizer": optimizer, "lr": 0.5, "betas": [0.8, 0.95], "tau": 1e-2}
    described = experiment(tmp_path, algorithm, server=server)
    np.testing.assert_allclose(ours(described), reference(described, CLUSTERS), rtol=2e-5, atol=2e-6)


IDENTITIES: dict[str, dict[str, Any]] = {
    "fedprox with mu = 0": {"algorithm": "fedprox", "mu": 0.0},
    "fednova with equal steps": {"algorithm": "fednova"},
    "fedmax with no weight": {"algorithm": "fedmax", "beta": 0.0, "model": network},
    "avgm without momentum": {"algorithm": "fedavg", "server": {"optimizer": "avgm", "betas": [0.0, 0.9], "lr": 1.0}},
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_equals_fedavg(name: str, tmp_path: Path) -> None:
    keys = dict(IDENTITIES[name])
    plain = experiment(tmp_path, "fedavg", model=keys.get("model", softmax))
    np.testing.assert_allclose(ours(experiment(tmp_path, **keys)), ours(plain), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_begins_as_fedavg(option: str, tmp_path: Path) -> None:
    first = [[k for cluster in CLUSTERS for k in cluster]]  # one cluster, one round: one cycle
    plain = experiment(tmp_path, "fedavg", first, rounds=1)
    scaffold = experiment(tmp_path, "scaffold", first, rounds=1, option=option)
    np.testing.assert_allclose(ours(scaffold), ours(plain), rtol=1e-6, atol=1e-7)
    assert not np.allclose(ours(scaffold.override(rounds=2)), ours(plain.override(rounds=2)), rtol=1e-4), (
        "from the second cycle on the variates count"
    )


def test_vrl_sgd_with_one_step_is_averaged_sgd(tmp_path: Path) -> None:
    """One step a turn and everybody in it: drifts cancel in the average, whatever they are."""
    data, described = blobs(), experiment(tmp_path, "vrl_sgd", ALL, rounds=5, steps=1, batch="full")
    start = torch.cat([p.detach().flatten() for p in softmax((5,), 3).parameters()]).double().numpy()
    w = start
    for _ in range(5):
        w = w - LOCAL["lr"] * softmax_regression(w, data["x_train"].astype(np.float64), data["y_train"])
    np.testing.assert_allclose(ours(described), w, rtol=2e-5, atol=2e-6)


KEEPING = ["scaffold", "vrl_sgd", "mime", "fedl", "ghbm", "fedhbm"]


@pytest.mark.parametrize("algorithm", KEEPING)
def test_a_resumed_run_is_the_same(algorithm: str, tmp_path: Path) -> None:
    """What server and devices keep is in the checkpoint, to the bit."""
    described = small(algorithm)
    fedcluster.run(described, tmp_path / "whole", display=Display())

    class Stop(Display):
        def round(self, line: dict[str, Any]) -> None:
            if line["round"] == 3:
                raise KeyboardInterrupt

    from fedcluster.training import checkpoints

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "SAVE_EVERY", 0.0)
        patch.setattr(checkpoints, "SAVE_SHARE", 0)
        with pytest.raises(KeyboardInterrupt):
            fedcluster.run(described, tmp_path / "stopped", display=Stop())
    fedcluster.run(described, tmp_path / "stopped", resume=True, display=Display())
    assert essence(tmp_path / "stopped") == essence(tmp_path / "whole")


def small(algorithm: str, **keys: Any) -> fedcluster.Experiment:
    return fedcluster.Experiment(
        rounds=6,
        fleet={"devices": 30, "samples": 40},
        clusters={"count": 2, "participation": 0.4},
        model={"name": "mlp"},
        local={"algorithm": algorithm, "steps": 4, "batch": 10, "lr": 0.05} | keys,
        server={"optimizer": "adam", "lr": 0.01},
    )


@pytest.mark.parametrize("algorithm", KEEPING)
def test_workers_change_nothing(algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedcluster.training.executors import processes as workers

    monkeypatch.setattr(workers, "WORTH_STARTING", 0.0)
    monkeypatch.setattr(workers, "may_fork", lambda: False)

    class Wait(Display):
        def begin(self, rounds: int, cycles: int, done: int) -> None:
            (crew,) = crews
            crew.start_all()

    crews: list[workers.Workers] = []
    real = workers.Workers.__init__

    def init(self: workers.Workers, *arguments: Any) -> None:
        real(self, *arguments)
        crews.append(self)

    monkeypatch.setattr(workers.Workers, "__init__", init)
    fedcluster.run(small(algorithm), tmp_path / "one", display=Display())
    fedcluster.run(small(algorithm), tmp_path / "two", display=Wait(), workers=2)
    assert essence(tmp_path / "one") == essence(tmp_path / "two")


def test_only_devices_that_took_part_keep_anything(tmp_path: Path) -> None:
    from safetensors import safe_open

    described = small("scaffold").override(**{"rounds": 1, "clusters.participation": 0.2})
    fedcluster.run(described, tmp_path / "run", display=Display())
    (checkpoint,) = (tmp_path / "run" / "checkpoint").glob("*.safetensors")
    with safe_open(checkpoint, framework="pt") as tensors:
        known = tensors.get_tensor("devices")
        assert tensors.get_slice("device/variate").get_shape()[0] == len(known) == 6


def test_a_device_that_went_astray_keeps_what_it_had(tmp_path: Path) -> None:
    """Its update is refused, and its control variate is not poisoned."""
    data = blobs()
    data["x_train"][data["device_train"] == 2] *= 1e20
    described = experiment(tmp_path, "scaffold").override(**{"data.name": fedcluster.Dataset(**data)})
    assert np.isfinite(ours(described)).all()


@pytest.mark.parametrize(
    ("algorithm", "down", "up", "vectors"),
    [
        ("fedavg", 1, 1, (1, 1)),
        ("scaffold", 1, 1, (2, 2)),
        ("mimelite", 1, 1, (1, 1)),  # plain SGD has no statistics that a gradient could renew
        ("mime", 2, 2, (2, 2)),
        ("fedsvrg", 2, 2, (2, 2)),
        ("pr_spider", 2, 2, (2, 2)),
        ("vrl_sgd", 2, 1, (2, 1)),
    ],
)
def test_every_message_is_on_the_ledger(
    algorithm: str, down: int, up: int, vectors: tuple[int, int], tmp_path: Path
) -> None:
    said: list[str] = []

    class Listen(Display):
        def say(self, text: str) -> None:
            said.append(text)

    last = fedcluster.run(experiment(tmp_path, algorithm), display=Listen()).history[-1]
    turns = 7 * ROUNDS
    assert (last["downloads"], last["uploads"], last["device_updates"]) == (down * turns, up * turns, turns)
    assert (last["bytes_down"], last["bytes_up"]) == (vectors[0] * 18 * 4 * turns, vectors[1] * 18 * 4 * turns)
    exceeds = (down, up) != (1, 1)
    assert any("more than the budget" in text for text in said) == exceeds
    if exceeds:
        with pytest.raises(BudgetExceeded, match=f"{algorithm} needs 2 downloads"):
            fedcluster.run(experiment(tmp_path, algorithm), display=Listen(), strict_budget=True)
    else:
        fedcluster.run(experiment(tmp_path, algorithm), display=Listen(), strict_budget=True)


@pytest.mark.parametrize(
    ("local", "said"),
    [
        ({"algorithm": "fedprox", "mu": -1.0}, "algorithm.mu = -1.0 is not allowed"),
        ({"steps": [30, 10]}, "local.steps = [30, 10] is not allowed: a range is [least, most]"),
        ({"algorithm": "vrl_sgd", "optimizer": "adam"}, 'local.optimizer = "adam" is not allowed with algorithm = '),
        ({"algorithm": "fednova", "optimizer": "adam"}, "use sgd or momentum"),
        ({"algorithm": "scaffold", "optimizer": "momentum"}, 'algorithm = "scaffold" and option = "II": use sgd'),
        ({"algorithm": "scaffold", "option": "III"}, "algorithm.option"),
        ({"algorithm": "scafold"}, "use one of fedavg, fedprox, scaffold"),
        ({"algorithm": "fedmax", "beta": float("inf")}, "algorithm.beta"),
    ],
)
def test_bad_options_are_named(local: dict[str, Any], said: str) -> None:
    with pytest.raises(BadExperiment) as refused:
        fedcluster.Experiment(local=local)
    assert said in str(refused.value)


def test_the_servers_defaults_follow_its_optimizer() -> None:
    def rates(**server: Any) -> tuple[float, tuple[float, float]]:
        found = fedcluster.Experiment(server=server).server
        return found.lr, found.betas

    assert rates() == rates(optimizer="avgm") == (1.0, (0.9, 0.99))
    assert rates(optimizer="adam") == rates(optimizer="yogi") == (0.03, (0.9, 0.99))
    assert rates(optimizer="adagrad") == (0.03, (0.0, 0.99))
    assert rates(optimizer="adagrad", lr=1.0, betas=[0.5, 0.9]) == (1.0, (0.5, 0.9))
    base = fedcluster.Experiment(server={"tau": 0.01})
    changed = base.override(**{"server.optimizer": "adagrad"}).server
    assert (changed.lr, changed.betas, changed.tau) == (0.03, (0.0, 0.99), 0.01)
    assert base.override(server={"optimizer": "adam"}).override(server={"optimizer": "none"}).server.lr == 1.0
    assert fedcluster.Experiment(**fedcluster.Experiment(server={"optimizer": "adam"}).to_dict()).server.lr == 0.03


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_without_an_optimizer_the_servers_rate_scales_the_movement(algorithm: str, tmp_path: Path) -> None:
    """SCAFFOLD's global step size; 1 is the average itself, to the bit."""
    plain, scaled = (experiment(tmp_path, algorithm, ALL, rounds=1, server=server) for server in ({}, {"lr": 2.0}))
    start = torch.cat([p.detach().flatten() for p in softmax((5,), 3).parameters()]).double().numpy()
    np.testing.assert_allclose(ours(scaled) - start, 2 * (ours(plain) - start), rtol=1e-5, atol=1e-6)
    assert (ours(experiment(tmp_path, algorithm, ALL, server={"lr": 1.0})) == ours(plain.override(rounds=ROUNDS))).all()


def test_bad_server_options_are_named() -> None:
    with pytest.raises(BadExperiment, match=r"server\.optimizer = 'sgd' is not allowed"):
        fedcluster.Experiment(server={"optimizer": "sgd"})
    with pytest.raises(BadExperiment, match=r"server\.tau"):
        fedcluster.Experiment(server={"optimizer": "adam", "tau": 0.0})


def test_the_catalogue_names_every_algorithm(here: Any) -> None:
    _, said, _ = here("algorithms")
    for name in ("scaffold", "fednova", "mimelite", "pr_spider", "Karimireddy", "Konečný", "yogi"):
        assert name in said


def with_dropout(shape: tuple[int, ...], classes: int) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(shape[0], 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, classes))


@pytest.mark.parametrize("algorithm", ["mime", "fedsvrg"])
@pytest.mark.parametrize("cohorts", ["sequential", "stacked"])
def test_with_dropout_the_first_step_is_that_of_the_pooled_gradient(
    algorithm: str, cohorts: str, tmp_path: Path
) -> None:
    """g(W) - g(W) + c = c when both gradients have the same mask; PR-SPIDER's first step is c by definition."""
    plain = experiment(tmp_path, "pr_spider", model=with_dropout, steps=1)
    found = ours(experiment(tmp_path, algorithm, model=with_dropout, steps=1), cohorts=cohorts)
    np.testing.assert_allclose(found, ours(plain), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 3)),
        lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=None), nn.Dropout(), nn.Linear(8, 3)),
    ],
    ids=["dropout", "counter"],
)
def test_a_gradient_at_the_same_point_is_the_same(make: Any) -> None:
    torch.manual_seed(0)
    asked, plain = flat_models.FlatModel(make()), flat_models.FlatModel(make())
    plain.load(asked.w)
    data = [(torch.randn(6, 4), torch.randint(3, (6,))) for _ in range(5)]
    gradients: list[torch.Tensor] = []
    for flat_model in (asked, plain):
        flat_model.module.train()
        torch.manual_seed(1)
        for number, (x, y) in enumerate(data):
            flat_model.compute_gradient(x, y)
            if flat_model is plain:
                assert torch.equal(flat_model.gradient, gradients[number])
                continue
            gradients.append(flat_model.gradient.clone())
            elsewhere = flat_model.gradient_at(flat_model.w[: flat_model.size] + 1)
            assert torch.equal(flat_model.gradient_at(flat_model.w[: flat_model.size]), flat_model.gradient)
            assert not torch.equal(elsewhere, flat_model.gradient)
    assert torch.equal(asked.w, plain.w), "running statistics are those of the steps alone"
