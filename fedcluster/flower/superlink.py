"""Flower's SuperLink as a child process on loopback, with the devices' keys, and a run of our app in it.

With isolation `process`, whoever has the secret runs the ServerApp. This process does, so that display, exit code and
interruption are those of the command that the user started.
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
from warnings import catch_warnings, simplefilter

import httpx

from fedcluster.errors import LostServer
from fedcluster.flower._compat import (
    AcquireTaskRequest,
    ControlHttpClient,
    Fab,
    HttpGrid,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    RegisterNodeRequest,
    RuntimeHttpClient,
    SendTaskHeartbeatRequest,
    StartRunRequest,
    SubStatus,
    SuperExecAuthHttpInterceptor,
    TaskType,
    build_fab_from_disk,
    fab_to_proto,
    flower_superlink,
    run_from_proto,
    runtime_client,
    set_max_tries,
    set_task_identity,
    start_parent_process_monitor,
)

START_SECONDS = 120.0  # for a SuperLink to start
HEARTBEAT_SECONDS = 5.0
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
APP = Path(__file__).with_name("app")


class SuperLink:
    """`folder` has the certificates; None means no TLS and no keys, on loopback. Its output is appended to `log`."""

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
        """Started, with the devices' keys registered. It ends with this process, even if that is killed."""
        with TemporaryDirectory(prefix="fedcluster-") as private, self.log.open("ab") as log:
            secret = Path(private, "secret")
            secret.touch(mode=0o600)
            secret.write_bytes(self.secret)
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fedcluster.flower.superlink", str(os.getpid()), *self.options(secret)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | QUIET | {"FLWR_HOME": private},
            )
            try:
                self.wait_until_open()
                self.register_devices()
                yield
            finally:
                self.process.terminate()
                try:
                    self.process.wait(10)
                except subprocess.TimeoutExpired:
                    self.process.kill()
                    self.process.wait()

    def options(self, secret: Path) -> list[str]:
        words = ["--host", self.host, "--port", str(self.port), "--isolation", "process"]
        words += ["--superexec-auth-secret-file", str(secret), "--disable-runtime-dependency-installation"]
        if self.folder is None:
            return [*words, "--insecure"]
        files = ("certfile", "server.crt"), ("keyfile", "server.key"), ("ca-certfile", "ca.crt")
        words += [word for option, name in files for word in (f"--ssl-{option}", str(self.folder / name))]
        return [*words, "--enable-supernode-auth"]

    def wait_until_open(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            with suppress(OSError), socket.create_connection((self.host, self.port), timeout=1):
                return
            time.sleep(0.1)
        raise LostServer(f"Flower's SuperLink does not start: see {self.log}")

    @property
    def gone(self) -> bool:
        return self.process.poll() is not None

    def register_devices(self) -> None:
        with self.control() as control:
            for key, device in (self.keys or {}).items():
                control.RegisterNode(RegisterNodeRequest(public_key=key, name=device))

    def control(self) -> ControlHttpClient:
        return ControlHttpClient.from_server_address(self.address, self.folder is None, self.authority, [])

    @contextmanager
    def run(self) -> Iterator[HttpGrid]:
        """A run of our app, whose ServerApp is this process."""
        with catch_warnings():
            simplefilter("ignore", DeprecationWarning)  # of a library that Flower uses
            content = build_fab_from_disk(APP)
        with self.control() as control:
            started = control.StartRun(StartRunRequest(fab=fab_to_proto(Fab(sha256(content).hexdigest(), content, {}))))
        grid = HttpGrid(self.address, self.folder is None, self.authority, token=self.acquire(started.run_id))
        set_max_tries(grid, 3)  # the SuperLink is a child process: when it does not answer, it is gone
        task = runtime_client(grid).PullTaskInput(PullTaskInputRequest())
        set_task_identity(task.task_id, task.run.run_id, task.context.node_id)
        grid.set_run(run_from_proto(task.run))
        over, status = threading.Event(), SubStatus.FAILED
        threading.Thread(target=send_heartbeats, args=(grid, over), daemon=True).start()
        try:
            yield grid
            status = SubStatus.COMPLETED
        finally:
            over.set()
            with suppress(httpx.HTTPError, RuntimeError):
                set_max_tries(grid, 1)
                runtime_client(grid).PushTaskOutput(PushTaskOutputRequest(sub_status=status))
            grid.close()

    def acquire(self, run: int) -> str:
        """The token of the ServerApp's task, which only the holder of the secret gets."""
        signed = SuperExecAuthHttpInterceptor(
            master_secret=self.secret, protected_methods=["/flwr.proto.Runtime/AcquireTask"]
        )
        request = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
        insecure = self.folder is None
        with RuntimeHttpClient.from_server_address(self.address, insecure, self.authority, [signed]) as client:
            deadline = time.monotonic() + START_SECONDS
            while time.monotonic() < deadline:
                answer = client.AcquireTask(request)
                if answer.HasField("task") and answer.task.run_id == run:
                    return str(answer.token)
                time.sleep(0.1)
        raise LostServer(f"Flower's SuperLink does not start the run: see {self.log}")


def send_heartbeats(grid: HttpGrid, over: threading.Event) -> None:
    """The SuperLink fails a run whose ServerApp sends no heartbeats."""
    while not over.wait(HEARTBEAT_SECONDS):
        with suppress(httpx.HTTPError, RuntimeError):
            runtime_client(grid).SendTaskHeartbeat(SendTaskHeartbeatRequest())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """`flower-superlink`, for as long as the process that started it lives."""
    start_parent_process_monitor(int(sys.argv[1]))
    sys.argv = ["flower-superlink", *sys.argv[2:]]
    flower_superlink()


if __name__ == "__main__":
    main()
