"""Devices of a federation train on other tasks as the simulation does, to the bit: the plan says what is learned."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedcluster.flower.device import Device, Identity
from fedcluster.flower.registry import Registry
from fedcluster.flower.setup import learned, plan_for
from fedcluster.models.tasks import build
from fedcluster.training import setup as prepare
from fedcluster.training.executors.in_process import InProcess
from tests.models.test_tasks import LABELS, NUMBERS, TOKENS, X, dataset, experiment

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "regression": ((X, NUMBERS), {"task": {"loss": "huber"}}),
    "multilabel": ((X, LABELS), {"metrics": ["map"]}),
    "next_token": ((TOKENS[:, :-1], TOKENS[:, 1:]), {"model": {"name": "lstm"}, "local": {"steps": 2, "batch": 4}}),
}


@pytest.mark.parametrize("task", CASES)
def test_devices_train_as_in_simulation(task: str, tmp_path: Path) -> None:
    (x, y), keys = CASES[task]
    data = dataset(x, y)
    described = experiment(data, **keys)
    simulated = prepare.prepare(described)
    plan, registry = plan_for(simulated, None), Registry(described)
    sent = simulated.algorithm.broadcast(simulated.start)
    for k in range(5):
        own = {name: getattr(data, f"{name}_train")[data.device_train == k].numpy() for name in ("x", "y")}
        file = {f"{name}_{split}": values for name, values in own.items() for split in ("train", "test")}
        np.savez(tmp_path / f"{k}.npz", **file)
        device = Device(Identity(str(k), str(tmp_path / f"{k}.npz")))
        assert registry.register(device.registration()) is None
        assert isinstance(simulated.executor, InProcess)
        ours, _ = simulated.executor.train_device(0, (0, 0, k), sent, None)
        theirs, _ = device.prepare(plan).train_device(0, (0, 0, k), sent, None)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert not torch.equal(ours["model"], sent["model"])
    registry.admit(0, print)
    assert learned(registry.spec, build(described, registry.spec.target)) == simulated.spec
