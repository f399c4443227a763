"""A federation on loopback for tests: a server and devices, each in its own process."""

import json
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np

import fedcluster
from fedcluster.data import sources
from fedcluster.fleet import fleet
from fedcluster.flower import certificates
from fedcluster.flower.superlink import free_port
from tests.conftest import until as until
from tests.forked import Forked

ROOT = Path(__file__).parents[1]
Process: TypeAlias = "subprocess.Popen[bytes] | Forked"


def write_devices(experiment: fedcluster.Experiment, folder: Path) -> None:
    """The samples of each device of the simulated fleet, in that device's own file."""
    dataset = sources.open_dataset(experiment.data)
    _, partition = fleet.build(experiment.fleet, dataset, experiment.seed)
    x, y = dataset.x_train.numpy(), dataset.y_train.numpy()
    for k in range(len(partition)):
        rows = partition.sample_indices(k)
        np.savez(folder / f"{k}.npz", x_train=x[rows], y_train=y[rows], x_test=x[:1], y_test=y[:1])


class Federation:
    """A folder with certificates and device files, and the processes that use them, which end with it."""

    def __init__(self, folder: Path, experiment: fedcluster.Experiment) -> None:
        self.folder, self.experiment, self.port = folder, experiment, free_port()
        self.devices: dict[str, Process] = {}
        self.others: list[Process] = []
        count = experiment.fleet.devices
        assert count is not None
        certificates.make(folder / "certificates", count, ["127.0.0.1", "localhost"])
        write_devices(experiment, folder)

    @property
    def server(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self, name: str, *words: Any, **environment: str) -> Process:
        """A fedcluster command; its output goes to NAME.log."""
        return self.module("fedcluster", name, *words, **environment)

    def module(self, module: str, name: str, *words: Any, **environment: str) -> Process:
        """`python -m module words`, forked from a process that has imported fedcluster already, to save the time."""
        process = Forked(module, [*map(str, words)], self.folder, environment, self.folder / f"{name}.log")
        self.others.append(process)
        return process

    def run(self, name: str, *words: Any, **environment: str) -> Process:
        """Any command in a new process."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*map(str, words)],
                cwd=self.folder,
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.others.append(process)
        return process

    def join(self, device: int | str, *words: Any) -> None:
        own = ["--device", device, "--data", f"{device}.npz", "--certificates", "certificates"]
        self.devices[str(device)] = self.start(f"device-{device}", "join", "--server", self.server, *own, *words)

    def serve(self, out: str, *words: Any, experiment: fedcluster.Experiment | None = None, **options: Any) -> Process:
        file = self.folder / f"{out}.toml"
        file.write_text((experiment or self.experiment).to_toml())
        given = {"nodes": len(self.devices), "wait": 600, "deadline": 300} | options
        spread = [word for name, value in given.items() for word in (f"--{name}", value)]
        return self.start(
            out, "serve", file, "--listen", self.server, "--certificates", "certificates", "--out", out, *spread, *words
        )

    def finish(self, server: Process, out: str, seconds: float = 1200) -> str:
        """Wait for the server to succeed, and return what it printed."""
        try:
            code = server.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{out} has not finished:\n{self.log(out)[-3000:]}") from None
        assert code == 0, self.log(out)[-3000:]
        return self.log(out)

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def lines(self, out: str, file: str = "cycles.jsonl") -> list[dict[str, Any]]:
        path = self.folder / out / file
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def model(self, out: str) -> bytes:
        return (self.folder / out / "model.safetensors").read_bytes()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self.others:
            process.kill()
        for process in self.others:
            process.wait()


def kill(process: Process) -> None:
    process.kill()
    process.wait()
