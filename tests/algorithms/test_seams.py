"""A user's own aggregator and transforms: what they are given, in every executor, and what is refused."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedcluster
from fedcluster.algorithms import FedAvg, UpdateTransform
from fedcluster.algorithms.aggregation.mean import Mean
from fedcluster.experiment import NonNegative, Section
from fedcluster.runs.progress import Display
from fedcluster.state import Aggregate, Tensors

KEYS: dict[str, Any] = {
    "rounds": 2,
    "fleet": {"devices": 12, "samples": 20},
    "clusters": {"count": 3, "participation": 0.5},
    "model": {"name": "logistic"},
    "local": {"steps": 3, "batch": 5, "lr": 0.1},
}


def weights(options: dict[str, Any] | None = None, **keys: Any) -> Tensor:
    model = fedcluster.run(fedcluster.Experiment(**KEYS | keys), display=Display(), **options or {}).model
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


class Median:
    """The median of the models. It has no `reduce`."""

    class Options(Section):
        shift: NonNegative = 0.0

    def __init__(self, spec: Tensors, options: Options, rng: object) -> None:
        self.options, self.messages = options, list[Tensors]()

    def accumulate(self, message: Tensors, weight: float, device: int) -> None:
        self.messages.append({name: tensor.clone() for name, tensor in message.items()})

    def finish(self) -> Aggregate | None:
        if not self.messages:
            return None
        stacked = {name: torch.stack([one[name] for one in self.messages]) for name in self.messages[0]}
        found = {name: rows.median(dim=0).values + self.options.shift for name, rows in stacked.items()}
        return Aggregate(found, 1.0)


class Halved(Mean):
    """Half of the mean: an aggregator that ranks can reduce."""

    def finish(self) -> Aggregate | None:
        found = super().finish()
        return found and Aggregate({name: tensor / 2 for name, tensor in found.message.items()}, found.weight)


class Noise(UpdateTransform):
    """Noise on the device, a factor on the server, and a shift of the aggregate."""

    def on_device(self, upload: Tensors, received: Tensors, rng: Any) -> Tensors:
        noise = torch.from_numpy(rng.normal(size=len(upload["model"]))).float()
        return {"model": upload["model"] + 0.01 * noise}

    def on_server(self, upload: Tensors, received: Tensors, rng: Any) -> Tensors:
        return {"model": received["model"] + 0.5 * (upload["model"] - received["model"])}

    def on_aggregate(self, aggregate: Tensors, received: Tensors, rng: Any) -> Tensors:
        return {"model": aggregate["model"] + 0.001 * float(rng.random())}


class Shrink(FedAvg):
    """An algorithm with an option of its own."""

    class Options(Section):
        factor: NonNegative = 1.0

    def combine(self, state: Any, aggregate: Aggregate, cycle: Any) -> Any:
        shrunk = {name: tensor * self.options.factor for name, tensor in aggregate.message.items()}
        return super().combine(state, Aggregate(shrunk, aggregate.weight), cycle)


class Dithered(FedAvg):
    """A device adds numbers to its model, and the server, which is not sent them, subtracts the same ones."""

    @staticmethod
    def dither(rng: Any, model: Tensor) -> Tensor:
        return torch.from_numpy(rng.integers(-8, 9, len(model)) / 8).float()

    def train(self, flat_model: Any, received: Tensors, batches: Any, device_state: Tensors) -> Tensors:
        model = super().train(flat_model, received, batches, device_state)["model"]
        return {"model": model + self.dither(self.rng(*batches.place), model)}

    def contribution(self, state: Any, update: Any, cycle: Any) -> tuple[Tensors, float]:
        dither = self.dither(self.rng(cycle.round, cycle.cycle, update.device), update.message["model"])
        return {"model": update.message["model"] - dither}, update.weight


class Forgetful(Dithered):
    def contribution(self, state: Any, update: Any, cycle: Any) -> tuple[Tensors, float]:
        return update.message, update.weight


@pytest.mark.parametrize("workers", [1, 2])
def test_server_and_devices_draw_the_same_from_the_algorithms_own_stream(workers: int) -> None:
    plain, dithered, forgetful = (
        weights({"workers": workers}, algorithm={"name": f"{__name__}:{name}"})
        for name in ("FedAvg", "Dithered", "Forgetful")
    )
    torch.testing.assert_close(dithered, plain, rtol=1e-4, atol=1e-5)
    assert (forgetful - plain).abs().max() > 0.01


def test_an_aggregator_of_ones_own_aggregates_and_has_options() -> None:
    plain = weights(aggregation={"name": Median})
    assert not torch.equal(plain, weights())
    assert torch.equal(plain, weights(aggregation={"name": f"{__name__}:Median"}))
    assert not torch.equal(plain, weights(aggregation={"name": Median, "shift": 0.5}))
    with pytest.raises(fedcluster.FedClusterError, match=r"aggregation.shift = -1.0 is not allowed"):
        fedcluster.Experiment(aggregation={"name": Median, "shift": -1.0})


def test_an_algorithm_of_ones_own_has_options() -> None:
    assert torch.equal(weights(algorithm={"name": Shrink}), weights())
    shrunk = weights(algorithm={"name": Shrink, "factor": 0.0})
    assert not shrunk.any()
    with pytest.raises(fedcluster.FedClusterError, match=r"algorithm.facto is not a key; did you mean factor\?"):
        fedcluster.Experiment(algorithm={"name": Shrink, "facto": 0.0})


@pytest.mark.parametrize("options", [{"workers": 2}, {"cohorts": "stacked"}], ids=["workers", "stacked"])
def test_transforms_draw_the_same_in_every_executor(options: dict[str, Any]) -> None:
    alone, elsewhere = (weights(given, transforms=[f"{__name__}:Noise"]) for given in ({}, options))
    assert not torch.equal(alone, weights())
    if "workers" in options:
        assert torch.equal(alone, elsewhere)
    else:
        torch.testing.assert_close(alone, elsewhere, rtol=1e-4, atol=1e-5)  # stacked steps round differently


def test_a_transform_that_is_none_is_refused() -> None:
    with pytest.raises(fedcluster.FedClusterError, match="does not derive from fedcluster"):
        weights(transforms=["builtins:dict"])


def torchrun(folder: Path, *keys: str) -> "subprocess.CompletedProcess[str]":
    experiment = fedcluster.Experiment(**KEYS)
    (folder / "experiment.toml").write_text(experiment.to_toml())
    overrides = [word for key in keys for word in ("-o", key)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "fedcluster"]
    return subprocess.run(
        [*command, "run", str(folder / "experiment.toml"), "--out", str(folder / "out"), *overrides],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def test_ranks_refuse_an_aggregator_without_reduce(tmp_path: Path) -> None:
    done = torchrun(tmp_path, f"aggregation.name={__name__}:Median")
    assert "has no method reduce" in done.stderr
    assert "Traceback" not in done.stderr.split("has no method reduce")[0]
    assert not (tmp_path / "out/model.safetensors").exists()


def test_ranks_agree_with_one_process(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"aggregation": {"name": f"{__name__}:Halved"}, "transforms": [f"{__name__}:Noise"]}
    done = torchrun(tmp_path, f"aggregation.name={__name__}:Halved", f"transforms=['{__name__}:Noise']")
    assert done.returncode == 0, done.stderr
    fedcluster.run(fedcluster.Experiment(**KEYS | keys), tmp_path / "alone", display=Display())
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "alone")]
    assert models[0] == models[1]


class Unequal(FedAvg):
    """A fault: every rank combines in its own way."""

    def combine(self, state: Any, aggregate: Aggregate, cycle: Any) -> Any:
        moved = {name: tensor + 0.001 * int(os.environ["RANK"]) for name, tensor in aggregate.message.items()}
        return super().combine(state, Aggregate(moved, aggregate.weight), cycle)


def test_ranks_whose_states_differ_stop(tmp_path: Path) -> None:
    done = torchrun(tmp_path, f"algorithm.name={__name__}:Unequal")
    assert "a model after round 1 with digest" in done.stderr
    assert not (tmp_path / "out/model.safetensors").exists()
