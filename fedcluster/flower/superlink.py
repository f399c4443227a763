"""Flower's SuperLink as a child of ours: on loopback, with the fleet's keys, ours to run the training in.

Isolation `process` means that whoever has the secret runs the ServerApp: this process does, so that its display, its
exit code and its interruption are those of the command that the user started.
"""

import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from warnings import catch_warnings, simplefilter

import httpx
from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import SubStatus
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from fedcluster.errors import LostServer

START = 120.0  # seconds that a SuperLink may take to start
HEARTBEAT = 5.0
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
APP = Path(__file__).with_name("app")


class SuperLink:
    """`folder` has the certificates; None: no TLS and no keys, on loopback."""

    def __init__(self, folder: Path | None, keys: dict[bytes, str] | None, log: Path) -> None:
        self.folder, self.keys, self.log = folder, keys, log
        self.host, self.port = "127.0.0.1", free_port()
        self.secret = secrets.token_bytes(32)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def authority(self) -> bytes | None:
        return None if self.folder is None else (self.folder / "ca.crt").read_bytes()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Started, its devices registered; ended when we are done, and also when we are killed."""
        with TemporaryDirectory(prefix="fedcluster-") as private, self.log.open("ab") as log:
            secret = Path(private, "secret")
            secret.touch(mode=0o600)
            secret.write_bytes(self.secret)
            words = ["--host", self.host, "--port", str(self.port), "--isolation", "process"]
            words += ["--superexec-auth-secret-file", str(secret), "--disable-runtime-dependency-installation"]
            if self.folder is None:
                words += ["--insecure"]
            else:
                files = ("certfile", "server.crt"), ("keyfile", "server.key"), ("ca-certfile", "ca.crt")
                words += [word for option, name in files for word in (f"--ssl-{option}", str(self.folder / name))]
                words += ["--enable-supernode-auth"]
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fedcluster.flower.superlink", str(os.getpid()), *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | QUIET | {"FLWR_HOME": private},
            )
            try:
                self.wait()
                self.register()
                yield
            finally:
                self.process.terminate()
                try:
                    self.process.wait(10)
                except subprocess.TimeoutExpired:
                    self.process.kill()
                    self.process.wait()

    def wait(self) -> None:
        until = time.monotonic() + START
        while time.monotonic() < until and self.process.poll() is None:
            with suppress(OSError), socket.create_connection((self.host, self.port), timeout=1):
                return
            time.sleep(0.1)
        raise LostServer(f"Flower's SuperLink does not start: see {self.log}")

    @property
    def gone(self) -> bool:
        return self.process.poll() is not None

    def register(self) -> None:
        with self.control() as control:
            for key, device in (self.keys or {}).items():
                control.RegisterNode(RegisterNodeRequest(public_key=key, name=device))

    def control(self) -> ControlHttpClient:
        return ControlHttpClient.from_server_address(self.address, self.folder is None, self.authority, [])

    @contextmanager
    def run(self) -> Iterator[HttpGrid]:
        """A run of our app, of which we are the ServerApp."""
        with catch_warnings():
            simplefilter("ignore", DeprecationWarning)  # of a library of Flower's
            content = build_fab_from_disk(APP)
        with self.control() as control:
            started = control.StartRun(StartRunRequest(fab=fab_to_proto(Fab(sha256(content).hexdigest(), content, {}))))
        grid = HttpGrid(self.address, self.folder is None, self.authority, token=self.claim(started.run_id))
        grid._retry_invoker.max_tries = 3  # the SuperLink is our child: when it does not answer, it is gone
        task = grid._runtime_client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
        TaskIdentity.node_id = task.context.node_id
        grid.set_run(run_from_proto(task.run))
        over, status = threading.Event(), SubStatus.FAILED
        threading.Thread(target=beat, args=(grid, over), daemon=True).start()
        try:
            yield grid
            status = SubStatus.COMPLETED
        finally:
            over.set()
            with suppress(httpx.HTTPError, RuntimeError):
                grid._retry_invoker.max_tries = 1
                grid._runtime_client.PushTaskOutput(PushTaskOutputRequest(sub_status=status))
            grid.close()

    def claim(self, run: int) -> str:
        """The token of the ServerApp's task, which only the holder of the secret gets."""
        signed = SuperExecAuthHttpInterceptor(
            master_secret=self.secret, protected_methods=["/flwr.proto.Runtime/AcquireTask"]
        )
        wanted = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
        insecure = self.folder is None
        with RuntimeHttpClient.from_server_address(self.address, insecure, self.authority, [signed]) as client:
            until = time.monotonic() + START
            while time.monotonic() < until:
                answer: Any = client.AcquireTask(wanted)
                if answer.HasField("task") and answer.task.run_id == run:
                    return str(answer.token)
                time.sleep(0.1)
        raise LostServer(f"Flower's SuperLink does not hand out the training: see {self.log}")


def beat(grid: HttpGrid, over: threading.Event) -> None:
    """The SuperLink gives up an app from which it does not hear."""
    while not over.wait(HEARTBEAT):
        with suppress(httpx.HTTPError, RuntimeError):
            grid._runtime_client.SendTaskHeartbeat(SendTaskHeartbeatRequest())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """`flower-superlink`, for as long as the process that started it lives."""
    from flwr.supercore.app_utils import start_parent_process_monitor
    from flwr.superlink.cli import flower_superlink

    start_parent_process_monitor(int(sys.argv[1]))
    sys.argv = ["flower-superlink", *sys.argv[2:]]
    flower_superlink()


if __name__ == "__main__":
    main()
