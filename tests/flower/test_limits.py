"""The limits of a device, which the server cannot change."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import fedcluster
from fedcluster.errors import BadData, BadExperiment
from fedcluster.flower.device import Device, Identity
from fedcluster.flower.limits import Limits, data_size, read_limits
from tests.conftest import blobs
from tests.federation import Federation
from tests.flower.test_flower import plan
from tests.forked import CONTEXT


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.savez(tmp_path / "own.npz", **blobs())
    return tmp_path


def device(path: Path, text: str) -> Device:
    (path / "limits.toml").write_text(text)
    return Device(Identity("3", str(path / "own.npz"), limits=str(path / "limits.toml")))


@pytest.mark.parametrize(
    ("limits", "local", "algorithm", "why"),
    [
        (
            "least_batch = 8",
            {"steps": 3, "batch": 7},
            "fedavg",
            "batches of 7 samples, and this device takes at least 8",
        ),
        ("least_batch = 999", {"steps": 3, "batch": "full"}, "fedavg", "batches of 94 samples"),
        ("least_batch = 999", {"steps": 3, "batch": 1000}, "fedavg", "batches of 94 samples"),
        ("least_batch = 16", {"epochs": 1, "batch": 40}, "fedavg", "batches of 14 samples"),  # the last one
        ("least_steps = 4", {"steps": 3, "batch": 8}, "fedavg", "3 steps, and this device takes at least 4"),
        ("least_steps = 4", {"steps": [3, 9], "batch": 8}, "fedavg", "3 steps"),
        ("least_steps = 4", {"epochs": 1, "batch": 40}, "fedavg", "3 steps"),
        ("least_steps = 2", {"steps": 3, "batch": 8}, "mime", "mime sends a gradient, which is what one step says"),
    ],
)
def test_training_beyond_the_limits_is_refused(
    path: Path, limits: str, local: dict[str, object], algorithm: str, why: str
) -> None:
    text = plan(local=local, algorithm={"name": algorithm})
    with pytest.raises(BadExperiment, match=why):
        device(path, limits).prepare(text)
    device(path, "").prepare(text)


def test_training_within_the_limits_is_the_same(path: Path) -> None:
    text = plan(local={"steps": 4, "batch": 8})
    sent = []
    for limits in ("", "least_batch = 8\nleast_steps = 4\nmost_seconds = 60\nmost_megabytes = 4000"):
        one = device(path, limits)
        received = {"model": torch.zeros(18)}
        with one.limits.enforced():
            update, _ = one.prepare(text).train_device(0, (0, 0, 3), received, None)
        sent.append(one.limits.protect(update, received)["model"])
    assert torch.equal(*sent)


def test_an_update_is_clipped_around_the_model_and_noise_is_new_each_time() -> None:
    received = {"model": torch.full((10_000,), 3.0)}
    update = {"model": received["model"] + 0.5, "variate": torch.full((100,), 0.01)}
    clipped = Limits(clip=2.0).protect(update, received)
    assert float((clipped["model"] - received["model"]).norm()) == pytest.approx(2.0, rel=1e-4)
    assert torch.equal(clipped["variate"], update["variate"])
    noisy = Limits(noise=0.1)
    one, other = (noisy.protect(update, received)["model"] for _ in range(2))
    assert not torch.equal(one, other)
    assert float((one - update["model"]).std()) == pytest.approx(0.1, rel=0.05)


def test_training_that_takes_too_long_is_stopped() -> None:
    began = time.monotonic()

    def train() -> None:
        with Limits(most_seconds=0.2).enforced():
            while time.monotonic() < began + 30:
                torch.zeros(10).add_(1)

    with pytest.raises(BadExperiment, match=r"more than the 0\.2 s that this device allows"):
        train()
    assert time.monotonic() < began + 20
    with Limits(most_seconds=0.05).enforced():
        pass
    time.sleep(0.1)  # the time of training is over, and nothing is stopped


def test_a_time_limit_that_cannot_be_kept_is_refused() -> None:
    def train() -> None:
        with Limits(most_seconds=1.0).enforced():
            pass

    with ThreadPoolExecutor(1) as pool, pytest.raises(BadExperiment, match="not in the main thread"):
        pool.submit(train).result()


def allocate(answer: Path) -> None:
    limits = Limits(most_megabytes=200)
    limits.limit_memory()
    torch.zeros(10**7)
    try:
        with limits.enforced():
            torch.zeros(10**9)
    except BadExperiment as error:
        answer.write_text(str(error))


def test_training_that_takes_too_much_memory_is_stopped(tmp_path: Path) -> None:
    """In a process of its own, because the limit stays."""
    process = CONTEXT.Process(target=allocate, args=(tmp_path / "answer",))
    process.start()
    process.join()
    expected = "training takes more than the 200 MB that this device allows (most_megabytes)"
    assert (tmp_path / "answer").read_text() == expected
    assert data_size() > 0


@pytest.mark.parametrize(
    ("text", "kind", "why"),
    [
        ("least_bach = 3", BadExperiment, "least_bach is not a key; did you mean least_batch"),
        ("clip = 0.0", BadExperiment, "clip = 0.0 is not allowed"),
        ("least_batch = ", BadExperiment, "not valid TOML"),
        (None, BadData, "cannot read .* .No such file"),
    ],
)
def test_a_file_of_limits_is_checked(tmp_path: Path, text: str | None, kind: type[Exception], why: str) -> None:
    if text is not None:
        (tmp_path / "limits.toml").write_text(text)
    with pytest.raises(kind, match=why):
        read_limits(str(tmp_path / "limits.toml"))


def test_limits_are_shown() -> None:
    assert Limits(
        least_batch=16, least_steps=5, clip=1.0, noise=0.1, most_seconds=60, most_megabytes=2000
    ).describe() == (
        "limits of this device: batches of at least 16 samples, at least 5 steps, updates clipped to 1, noise of 0.1, "
        "at most 60 s, at most 2,000 MB"
    )
    assert Limits().describe() == (
        "limits of this device: none on what an update says: if the server asks for one step on one sample, it can "
        "compute the sample (--limits)"
    )


SIX = fedcluster.Experiment(
    rounds=1,
    fleet={"devices": 6, "samples": 40},
    clusters={"count": 6, "participation": 1.0},
    model={"name": "logistic"},
    local={"steps": 3, "batch": 10, "lr": 0.1},
)


@pytest.mark.xdist_group("federation")
def test_devices_of_a_federation_keep_to_their_limits_whatever_the_server_asks_for(tmp_path: Path) -> None:
    """Every device is a cluster of its own, so that a cycle moves the model by the update of one device."""
    limits = {
        1: "clip = 0.001",
        2: "noise = 1.0",
        3: "least_steps = 4",
        4: "unmasked = false",
        5: "most_seconds = 1e-6",
    }
    with Federation(tmp_path, SIX) as federation:
        federation.join(0)
        for k, text in limits.items():
            (tmp_path / f"{k}.toml").write_text(text)
            federation.join(k, "--limits", f"{k}.toml")
        output = federation.finish(federation.serve("run"), "run")
        lines = {line["cohort"][0]: line for line in federation.lines("run")}
        shown = {k: " ".join(federation.log(f"device-{k}").split()) for k in limits}
    assert lines[0]["moved"] > 0.01
    assert lines[1]["moved"] == pytest.approx(0.001, rel=1e-3)
    assert lines[2]["moved"] == pytest.approx(np.sqrt(650), rel=0.2)  # noise on 64 x 10 weights and 10 biases
    for k, (shows, refuses) in {
        3: ("at least 4 steps", "asks for 3 steps, and this device takes at least 4 (least_steps)"),
        4: ("no updates without secure aggregation", "under secure aggregation only (limits: unmasked)"),
        5: ("at most 1e-06 s", "more than the 1e-06 s that this device allows (most_seconds)"),
    }.items():
        assert lines[k]["missing"] == [k]
        assert not lines[k]["changed"]
        assert shows in shown[k]
        assert refuses in shown[k]
        assert refuses in " ".join(output.split())
    assert "updates clipped to 0.001" in shown[1]
    assert "noise of 1" in shown[2]
