"""A server that may open few files, crowded by clients without a key while its devices train: no device is kept out,
and the run ends with the same model."""

import resource
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from flwr.app import Message

import fedcluster
from fedcluster.flower import listener
from fedcluster.flower.certificates import private_key
from fedcluster.flower.messages import pack
from fedcluster.flower.node import FleetConnection, connect
from fedcluster.runs.progress import Display
from tests.crowd import Crowd
from tests.federation import Federation, until

pytestmark = pytest.mark.xdist_group("federation")

DESCRIPTORS = 256  # of the server: so many connections would do to exhaust them
EXPERIMENT = fedcluster.Experiment(
    rounds=4,
    fleet={"devices": 2, "samples": 40},
    clusters={"count": 2, "participation": 1.0},
    model={"name": "logistic"},
    local={"steps": 5, "batch": 10, "lr": 0.05},
)


@contextmanager
def device(federation: Federation, name: str) -> Iterator[FleetConnection]:
    """A connection with a device's key, to do what no device does."""
    key = private_key(federation.folder / f"certificates/devices/{name}.key")
    authority = federation.folder / "certificates/ca.crt"
    with connect(federation.server, authority, (key, key.public_key()), registered=True) as connection:
        yield connection


def answer_for_another(federation: Federation) -> int:
    """Answer with device 0's key what device 1 was asked; returns the status of the response."""
    with device(federation, "0") as own, device(federation, "1") as another:
        message = None
        while message is None:
            message = another.receive()
        try:
            own.send(Message(pack({"registration": "of another"}), reply_to=message))
        except httpx.HTTPStatusError as error:
            return error.response.status_code
        return 200


def status_of_large_headers(federation: Federation) -> int:
    trusted = ssl.create_default_context(cafile=federation.folder / "certificates/ca.crt")
    headers = {f"h{k}": "x" * 60_000 for k in range(20)}
    with httpx.Client(base_url=f"https://{federation.server}", verify=trusted) as client:
        try:
            return client.post("/v1/fleet/pull-messages", headers=headers).status_code
        except httpx.TransportError:  # it has hung up before we have said it all
            return 431


def test_clients_without_a_key_keep_no_device_out(tmp_path: Path) -> None:
    with Federation(tmp_path, EXPERIMENT) as federation:
        server = federation.serve("out", nodes=2)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (64, DESCRIPTORS))
        until(lambda: "listening for devices" in federation.log("out"))
        assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (DESCRIPTORS, DESCRIPTORS)
        assert answer_for_another(federation) == 403
        assert status_of_large_headers(federation) == 431
        with Crowd(federation.port, size=DESCRIPTORS + 40, most=1000) as crowd:
            assert crowd.full.wait(600)
            until(lambda: f"no request within {listener.HEADER_SECONDS:g} s" in federation.log("out"))
            for k in range(2):
                federation.join(k)
            said = federation.finish(server, "out")
    fedcluster.run(EXPERIMENT, tmp_path / "run", display=Display())
    assert federation.model("out") == (tmp_path / "run/model.safetensors").read_bytes()
    assert all(turn["missing"] == [] for turn in federation.lines("out"))
    assert "proxy: refused device 0 at 127.0.0.1: a request in the name of another node" in said
    assert "Traceback" not in said
