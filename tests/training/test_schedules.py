"""Learning-rate schedules, and clusters of unequal weight."""

import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedcluster
from fedcluster.algorithms import FedAvg
from fedcluster.errors import BadExperiment
from fedcluster.experiment import Experiment
from fedcluster.fleet.schedule import Cycle
from fedcluster.models.flat_model import Objective
from fedcluster.models.schedules import Rates
from fedcluster.runs.progress import Display
from tests.runs.test_resume import essence, stop_and_resume

M, T, E, LR = 4, 10, 20, 0.2


def rates(cycle: int = 0, server: bool = False, **schedule: Any) -> list[float]:
    """Of all rounds, in one of their cycles."""
    section = "server" if server else "local"
    experiment = Experiment(rounds=T, **{section: {"lr": LR, "schedule": schedule}})
    found = Rates(experiment, M)
    nobody = np.zeros(0, np.int64)
    if server:
        return [found.server(j, cycle) for j in range(T)]
    cycles = [Cycle(j, cycle, 0, nobody, nobody, nobody) for j in range(T)]
    return [LR * float(found.local(one)["rate_factor"]) for one in cycles]


@pytest.mark.parametrize("server", [False, True])
def test_shapes(server: bool) -> None:
    found = {
        "constant": rates(server=server, name="constant"),
        "step": rates(server=server, name="step", every=3, factor=0.5),
        "exponential": rates(server=server, name="exponential", factor=0.9),
        "cosine": rates(server=server, name="cosine", floor=0.1),
        "inverse_sqrt": rates(server=server, name="inverse_sqrt"),
        "warmup": rates(server=server, name="exponential", factor=0.9, warmup=4),
        "decay": rates(server=server, name="constant", cycle_decay=0.5, cycle=3),
    }
    expected = {
        "constant": [1.0] * T,
        "step": [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125],
        "exponential": [0.9**j for j in range(T)],
        "cosine": [0.1 + 0.45 * (1 + math.cos(math.pi * j / T)) for j in range(T)],
        "inverse_sqrt": [(j + 1) ** -0.5 for j in range(T)],
        "warmup": [0.2, 0.4, 0.6, 0.8] + [0.9**j for j in range(T - 4)],
        "decay": [0.125] * T,
    }
    for name, factors in expected.items():
        assert found[name] == pytest.approx([LR * factor for factor in factors]), name


def test_the_theorems_rate_does_not_depend_on_lr() -> None:
    assert rates(name="theorem") == pytest.approx([(T * M * E) ** -0.5] * T)


def halves(round: int, cycle: int) -> float:
    return 0.5 if cycle else 1.0


def test_a_function_is_a_schedule() -> None:
    assert rates(name=halves) == pytest.approx([LR] * T)
    assert rates(name=f"{__name__}:halves", cycle=1) == pytest.approx([LR / 2] * T)


SMALL = Experiment(
    rounds=4,
    fleet={"devices": 12, "samples": 20},
    clusters={"count": 3, "participation": 0.5},
    model={"name": "logistic"},
    local={"steps": 4, "batch": 5, "lr": 0.1},
)
COSINE = {"local.schedule.name": "cosine", "local.schedule.cycle_decay": 0.8, "server.schedule.name": "inverse_sqrt"}


def test_every_executor_and_a_resumed_run_have_the_same_rates(tmp_path: Path) -> None:
    described = SMALL.override(**COSINE)
    fedcluster.run(described, tmp_path / "one", display=Display())
    fedcluster.run(described, tmp_path / "two", display=Display(), workers=2)
    stop_and_resume(described, tmp_path / "stopped", after=5)
    assert essence(tmp_path / "one") == essence(tmp_path / "two") == essence(tmp_path / "stopped")


@pytest.mark.parametrize("algorithm", ["ghbm", "local_ghbm", "fedhbm", "scaffold", "vrl_sgd", "mime", "fedl"])
def test_a_rate_that_falls_to_0_stops_the_model(algorithm: str) -> None:
    """Rates below float32's are 0: 0.1, then 1e-39 and 1e-77. Nothing is divided by them."""
    described = SMALL.override(**{"local.schedule": {"name": "exponential", "factor": 1e-38}})
    models = []
    for rounds in (1, 4):
        result = fedcluster.run(described.override(rounds=rounds, **{"algorithm.name": algorithm}), display=Display())
        models.append(torch.cat([tensor.flatten() for tensor in result.model.state_dict().values()]))
    assert result.history[-1]["refused"] == 0
    assert torch.isfinite(models[0]).all()
    assert torch.equal(*models)


def test_a_constant_schedule_is_none_at_all(tmp_path: Path) -> None:
    """The factor is sent, so that a rate that float32 does not have is what it was, to the bit."""
    plain = SMALL.override(**{"local.lr": 0.1})
    with_schedule = plain.override(**{"local.schedule.name": "constant", "server.schedule.name": "constant"})
    models = [fedcluster.run(one, display=Display()).model.state_dict() for one in (plain, with_schedule)]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_the_schedule_is_in_the_file() -> None:
    described = SMALL.override(**COSINE)
    again = Experiment(**tomllib.loads(described.to_toml()))
    assert again.digest() == described.digest() != SMALL.digest()
    other = described.override(**{"local.schedule.name": "exponential", "local.schedule.factor": 0.5})
    assert dict(other.local.schedule or {}) == {"name": "exponential", "warmup": 0, "cycle_decay": 1.0, "factor": 0.5}


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ({"name": "cosin"}, "use one of constant, step, exponential, cosine"),
        ({"name": "step"}, "every"),
        ({"name": "cosine", "flor": 0.1}, "did you mean floor"),
        ({"name": "exponential", "factor": 1.5}, "less than or equal to 1"),
    ],
)
def test_mistakes_are_named(schedule: dict[str, Any], said: str) -> None:
    with pytest.raises(BadExperiment, match=said):
        Experiment(local={"schedule": schedule})


def fails(round: int, cycle: int) -> float:
    return 1 / cycle


def nothing(round: int, cycle: int) -> None: ...


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"local.schedule.name": fails}, r"fails\(0, 0\) fails \(ZeroDivisionError: division by zero\)"),
        ({"server.schedule.name": nothing}, r"nothing\(0, 0\) must give a number, .* but gave None"),
        ({"local.schedule.name": lambda round: 1.0}, r"\(round, cycle\) -> factor"),
        ({"local.schedule.name": lambda round, cycle: math.nan}, "gives the rate nan in round 1"),
        ({"server.schedule.name": "theorem"}, r"use it in \[local.schedule\]"),
        ({"local.schedule.name": "theorem", "local.epochs": 1}, "needs local.steps"),
        ({"clusters.order": "balanced", "clusters.method": "redrawn"}, "draws clusters anew in every round"),
    ],
)
def test_what_a_run_finds_wrong_is_named(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(BadExperiment, match=said):
        fedcluster.run(SMALL.override(**keys), display=Display())


# Unequal clusters


class Point(nn.Module):
    """One number w, whatever the sample."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.3]))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.expand(len(x), 2)


class Quadratics(FedAvg):
    """f_k(w) = 1/2 (w - y_k)^2"""

    def objective(self, loss: Objective) -> Objective:
        return half_square_distance


def half_square_distance(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = 0.5 * (module(x)[:, 0] - y).square().mean()
    return loss


def fixed_point(tmp_path: Path, weighting: str, lr: float) -> float:
    """Nine devices with y = 0 in one cluster, one with y = 1 in the other."""
    data: dict[str, Any] = {
        "x_train": np.ones((20, 1), np.float32),
        "y_train": np.repeat([0, 1], [18, 2]),
        "x_test": np.ones((2, 1), np.float32),
        "y_test": np.array([0, 1]),
        "device_train": np.repeat(np.arange(10), 2),
    }
    (tmp_path / "clusters.csv").write_text("device,cluster\n" + "".join(f"{k},{int(k == 9)}\n" for k in range(10)))
    cycling = {"method": "file", "path": str(tmp_path / "clusters.csv"), "participation": 1.0, "order": "cyclic"}
    described = Experiment(
        rounds=200,
        data={"name": fedcluster.Dataset(**data)},
        fleet={"partition": "natural"},
        clusters=cycling | {"weighting": weighting},
        model={"name": Point},
        algorithm={"name": Quadratics},
        local={"steps": 5, "batch": "full", "lr": lr},
        accept={"norm_bound": "off"},
    )
    model = fedcluster.run(described, display=Display()).model
    return float(model.state_dict()["w"])


@pytest.mark.parametrize(("weighting", "optimum"), [("cluster", 0.5), ("sample", 0.1)])
def test_the_fixed_point_of_two_quadratics(weighting: str, optimum: float, tmp_path: Path) -> None:
    """A cycle maps W to y + a_K (W - y), a_K = (1 - lr s_K)^5, s_K = 1 or M q_K. After cluster 1's cycle, the fixed
    point of a round is (1 - a_1) / (1 - a_0 a_1); it tends to the optimum with the rate."""
    scales = (1.0, 1.0) if weighting == "cluster" else (1.8, 0.2)
    for lr, within in ((0.1, 0.15), (0.01, 0.02)):
        a_0, a_1 = ((1 - lr * scale) ** 5 for scale in scales)
        exact = (1 - a_1) / (1 - a_0 * a_1)
        assert fixed_point(tmp_path, weighting, lr) == pytest.approx(exact, abs=1e-4)
        assert exact == pytest.approx(optimum, abs=within)


def test_with_equal_clusters_weighting_changes_no_bit(tmp_path: Path) -> None:
    """Seven equal clusters: in floating point the sum of their weights is not 1."""
    plain = SMALL.override(fleet={"devices": 14, "samples": 20}, **{"clusters.count": 7})
    models = [
        fedcluster.run(plain.override(**{"clusters.weighting": one}), display=Display()).model.state_dict()
        for one in ("cluster", "sample")
    ]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
