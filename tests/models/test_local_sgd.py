"""Local training as torch does it: the same optimizers, weight decay, clipping, and passes over a device's data."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedcluster
from fedcluster.analysis import analyze
from fedcluster.errors import BadExperiment
from fedcluster.experiment import Local, load
from fedcluster.fleet.schedule import mean_steps, samples_used, steps_of
from fedcluster.models import optimizers
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.local_sgd import Batches, local_sgd
from fedcluster.rng import stream
from fedcluster.runs.progress import Display
from fedcluster.training import setup as prepare
from fedcluster.training.survey import batch_variance
from tests.conftest import Here, blobs
from tests.runs.test_resume import Remember

DATA = fedcluster.Dataset(**blobs())  # 7 devices, 5 features, 3 classes
SIZES = np.bincount(blobs()["device_train"])

TORCH: list[tuple[dict[str, Any], Any]] = [
    ({}, lambda p: torch.optim.SGD(p, 0.1)),
    ({"weight_decay": 0.2}, lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.2)),
    (
        {"optimizer": "momentum", "momentum": 0.9, "weight_decay": 0.2},
        lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.2),
    ),
    (
        {"optimizer": "momentum", "momentum": 0.9, "weight_decay": 0.2, "nesterov": True},
        lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.2, nesterov=True),
    ),
    ({"optimizer": "adam", "weight_decay": 0.2}, lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.2)),
    ({"optimizer": "adamw"}, lambda p: torch.optim.AdamW(p, 0.1)),
    (
        {"optimizer": "adamw", "weight_decay": 0.2, "betas": (0.8, 0.95), "eps": 1e-3},
        lambda p: torch.optim.AdamW(p, 0.1, (0.8, 0.95), 1e-3, weight_decay=0.2),
    ),
]


def named(keys: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in keys.items()) or "sgd"


@pytest.mark.parametrize(("keys", "theirs"), TORCH, ids=[named(keys) for keys, _ in TORCH])
def test_every_step_is_torchs(keys: dict[str, Any], theirs: Any) -> None:
    torch.manual_seed(0)
    options = Local(lr=0.1, **keys)
    w, gradients = torch.randn(50), torch.randn(20, 50)
    parameter = nn.Parameter(w.clone())
    expected, found = theirs([parameter]), optimizers.optimizer(options, 0.1)
    for g in gradients:
        parameter.grad = g.clone()
        expected.step()
        found.step(w, g.clone())
        torch.testing.assert_close(w, parameter.detach(), rtol=2e-6, atol=2e-7)
        if options.optimizer in ("sgd", "momentum"):
            assert torch.equal(w, parameter.detach())


@pytest.mark.parametrize("most", [0.3, 100.0])
def test_clipping_is_torchs(most: float) -> None:
    torch.manual_seed(0)
    g = torch.randn(3, 40)
    rows = g.clone()
    optimizers.clip_norm_(rows, most)
    for row, gradient in zip(rows, g, strict=True):
        parts = [nn.Parameter(torch.zeros(10)), nn.Parameter(torch.zeros(6, 5))]
        for part, piece in zip(parts, gradient.split([10, 30]), strict=True):
            part.grad = piece.clone().view(part.shape)
        torch.nn.utils.clip_grad_norm_(parts, most)
        expected = torch.cat([part.grad.reshape(-1) for part in parts if part.grad is not None])
        torch.testing.assert_close(row, expected, rtol=1e-6, atol=1e-7)


def network(shape: tuple[int, ...], classes: int) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(shape[0], 8), nn.ReLU(), nn.Linear(8, classes))


def in_torch(options: Local, device: int, module: nn.Module, rows: Any) -> Tensor:
    """A device's turn as anybody would write it with torch."""
    kinds: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, options.lr, weight_decay=options.decay),
        "momentum": lambda p: torch.optim.SGD(
            p, options.lr, options.momentum, weight_decay=options.decay, nesterov=options.nesterov
        ),
        "adamw": lambda p: torch.optim.AdamW(p, options.lr, options.betas, options.eps, options.decay),
    }
    step = kinds[options.optimizer](module.parameters())
    rng = stream(5, "batch", 1, 2, device)
    batch = options.batch if isinstance(options.batch, int) else len(rows)
    for _ in range(options.epochs or 0):
        order = rows[rng.permutation(len(rows))]
        for start in range(0, len(rows), batch):
            at = torch.from_numpy(order[start : start + batch])
            step.zero_grad()
            loss: Any = nn.functional.cross_entropy(module(DATA.inputs(DATA.x_train[at])), DATA.y_train[at])
            loss.backward()
            if options.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), options.clip_norm)
            step.step()
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


@pytest.mark.parametrize("batch", [4, 1000])
@pytest.mark.parametrize(
    "keys",
    [
        {},  # compiled, where it can be
        {"weight_decay": 0.1, "clip_norm": 0.2},
        {"optimizer": "momentum", "nesterov": True, "weight_decay": 0.1, "clip_norm": 0.5},
        {"optimizer": "adamw", "lr": 0.01, "eps": 1e-3},
    ],
    ids=named,
)
def test_a_turn_of_epochs_is_torchs(keys: dict[str, Any], batch: int) -> None:
    """Shuffled passes over a device's samples, with a short last batch."""
    options = Local(**{"lr": 0.1} | keys, epochs=3, batch=batch)
    rows = np.flatnonzero(blobs()["device_train"] == 2)
    assert batch == 1000 or len(rows) % batch
    batches = Batches(DATA, rows, options, 5, (1, 2, 2))
    flat_model = FlatModel(network((5,), 3))
    found = local_sgd(flat_model, flat_model.w.clone(), batches)
    with torch.enable_grad():
        expected = in_torch(options, 2, network((5,), 3), rows)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


def test_a_short_last_batch_stays_in_the_compiled_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    flat_model = FlatModel(network((5,), 3))
    if flat_model.network is None:
        pytest.skip("no compiler here")
    monkeypatch.setattr(FlatModel, "compute_gradient", None)
    rows = np.flatnonzero(blobs()["device_train"] == 2)
    batches = Batches(DATA, rows, Local(epochs=2, batch=4), 0, (0, 0, 2))
    assert torch.isfinite(local_sgd(flat_model, flat_model.w.clone(), batches)).all()


@pytest.mark.parametrize(("batch", "steps"), [(4, [4, 4, 4, 4, 1]), (17, [17]), (30, [17]), ("full", [17])])
def test_every_pass_sees_every_sample_once(batch: Any, steps: list[int]) -> None:
    rows = np.arange(100, 117)
    batches = Batches(DATA, rows, Local(epochs=3, batch=batch), 0, (4, 1, 2))
    drawn = [row for part in batches.drawn() for row in part]
    assert [len(batch) for batch in drawn] == steps * 3
    assert batches.steps == len(drawn) == steps_of(batches.options, 0, 4, 2, 17)
    passes = np.concatenate(drawn).reshape(3, 17)
    assert (np.sort(passes) == rows).all()
    if batch != "full":
        assert not (passes[0] == passes[1]).all()
    again = Batches(DATA, rows, Local(epochs=3, batch=batch), 0, (4, 1, 2))
    assert (np.concatenate(again.drawn(), axis=None) == np.concatenate(drawn)).all()


def test_steps_and_samples_of_a_turn() -> None:
    epochs = Local(epochs=2, batch=10)
    assert [steps_of(epochs, 0, 0, 0, n) for n in (1, 10, 11, 25)] == [2, 2, 4, 6]
    assert samples_used(epochs, 0, 0, 0, 25) == 50
    assert samples_used(Local(steps=3, batch=10), 0, 0, 0, 25) == 30
    assert samples_used(Local(steps=3, batch="full"), 0, 0, 0, 25) == 75
    assert mean_steps(epochs, np.array([1, 11, 25])) == 4
    assert mean_steps(Local(steps=(2, 7)), np.array([5])) == 4.5


def experiment(**keys: Any) -> fedcluster.Experiment:
    plain: dict[str, Any] = {
        "rounds": 3,
        "data": {"name": DATA},
        "fleet": {"partition": "natural"},
        "clusters": {"count": 2, "participation": 1.0},
        "model": {"name": network},
        "local": {"epochs": 2, "batch": 4, "lr": 0.1},
    }
    return fedcluster.Experiment(**plain | keys)


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("algorithm", ["fedavg", "fednova", "scaffold", "vrl_sgd", "mime"])
def test_epochs_with_workers_stacks_and_resume(algorithm: str, tmp_path: Path) -> None:
    described = experiment(algorithm={"name": algorithm})
    alone = fedcluster.run(described, tmp_path / "alone", display=Display())
    workers = fedcluster.run(described, display=Display(), workers=2)
    assert torch.equal(vector(alone.model), vector(workers.model))
    stacked = fedcluster.run(described, display=Display(), cohorts="stacked")
    torch.testing.assert_close(vector(stacked.model), vector(alone.model), rtol=2e-4, atol=2e-5)

    class Interrupt(fedcluster.Callback):
        def on_round_end(self, line: Any, state: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedcluster.run(described, tmp_path / "again", display=Display(), callbacks=[Interrupt()])
    again = fedcluster.run(described, tmp_path / "again", resume=True, display=Display())
    assert torch.equal(vector(alone.model), vector(again.model))


def test_centralized_training_spends_the_samples_of_the_epochs() -> None:
    display = Remember()
    setup = prepare.prepare(experiment(method="centralized"), display.say)
    spent = 2 * SIZES.sum()
    assert setup.algorithm.local.steps == round(spent / 60)
    assert setup.algorithm.local.epochs is None
    fedcluster.run(experiment(method="centralized"), display=Display())


def test_the_analysis_counts_steps_and_the_variance_of_shuffled_batches() -> None:
    found = analyze.analyze(experiment())
    assert mean_steps(Local(epochs=2, batch=4), SIZES) == found.clustered.E
    assert any("this experiment shuffles" in remark for remark in found.remarks)
    rng = np.random.default_rng(0)
    x = rng.standard_normal(9)
    means = [rng.permutation(x)[:4].mean() for _ in range(40_000)]
    assert np.var(means) == pytest.approx(batch_variance(Local(epochs=1, batch=4), 9) * x.var(), rel=0.03)
    assert batch_variance(Local(batch=4), 9) == 1 / 4
    assert batch_variance(Local(epochs=1, batch=30), 9) == 0


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"local": {"steps": 3, "epochs": 2}}, "local has both steps and epochs: give one of them"),
        ({"local": {"epochs": 0}}, "local.epochs = 0 is not allowed"),
        ({"local": {"nesterov": True}}, 'local.nesterov = true needs optimizer = "momentum"'),
        (
            {"local": {"nesterov": True, "optimizer": "momentum", "momentum": 0.0}},
            "and a momentum above 0",
        ),
        ({"local": {"weight_decay": -1.0}}, "local.weight_decay = -1.0 is not allowed"),
        ({"local": {"clip_norm": 0.0}}, "local.clip_norm = 0.0 is not allowed"),
        *(
            (
                {"algorithm": {"name": name}, "local": {"clip_norm": 1.0}},
                f'local.clip_norm = 1.0 is not allowed with algorithm = "{name}": ',
            )
            for name in ("scaffold", "fedl", "fedsvrg", "pr_spider", "vrl_sgd", "mime", "mimelite")
        ),
        (
            {"algorithm": {"name": "mime"}, "local": {"optimizer": "momentum", "nesterov": True}},
            'local.nesterov = true is not allowed with algorithm = "mime": ',
        ),
        (
            {"algorithm": {"name": "mime"}, "local": {"optimizer": "adamw"}},
            'local.optimizer = "adamw" is not allowed with algorithm = "mime": use sgd or momentum or adam',
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(BadExperiment) as error:
        fedcluster.Experiment(**keys)
    assert said in str(error.value)


def test_epochs_given_later_take_the_place_of_steps(tmp_path: Path, here: Here) -> None:
    (tmp_path / "e.toml").write_text("[local]\nsteps = 5\n")
    described = load(tmp_path / "e.toml", ["local.epochs=2"])
    assert (described.local.steps, described.local.epochs) == (None, 2)
    assert described.to_dict()["local"].keys().isdisjoint({"steps"})
    again = described.override(local={"steps": 7})
    assert (again.local.steps, again.local.epochs) == (7, None)
    assert fedcluster.Experiment().override(**{"local.epochs": 3}).local.steps is None
    with pytest.raises(BadExperiment, match="both steps and epochs"):
        described.override(local={"steps": 7, "epochs": 2})
    code, _, said = here("run", tmp_path / "e.toml", "-o", "local.steps=3", "-o", "local.epochs=3")
    assert (code, "both steps and epochs" in said) == (2, True)


def test_too_many_epochs_are_refused_before_anything_is_drawn() -> None:
    fleet = {"partition": "iid", "devices": 4, "samples": 300}
    described = experiment(local={"epochs": 10**6}, fleet=fleet, data={"name": "digits"}, model={"name": "logistic"})
    with pytest.raises(BadExperiment, match=r"local.epochs times a device's samples is .* at most"):
        fedcluster.run(described, display=Display())
