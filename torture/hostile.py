"""What hostile clients do to a federation's server, one act at a time. All of it goes to loopback, and ends."""

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.supercore.protobuf.client import ProtobufRequestContext

from fedcluster.flower._compat import (
    ActivateNodeRequest,
    ConfirmMessageReceivedRequest,
    FleetHttpClient,
    Node,
    NodeAuthHttpInterceptor,
    PullMessagesRequest,
    PullObjectRequest,
    PushMessagesRequest,
    PushObjectRequest,
    SendNodeHeartbeatRequest,
    generate_key_pairs,
    public_key_to_bytes,
)
from fedcluster.flower.certificates import private_key
from fedcluster.flower.proxy import FLEET, PATHS

Rng = np.random.Generator
CONNECTIONS = 200  # of one act
LOST = (httpx.HTTPError, OSError)


class Hostile:
    """Knows the server and its authority; has the keys of two registered devices, with which it does as it likes."""

    def __init__(self, port: int, certificates: Path, names: tuple[str, str]) -> None:
        self.port, self.authority = port, certificates / "ca.crt"
        self.keys = [private_key(certificates / f"devices/{name}.key") for name in names]
        self.anyone = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.anyone.check_hostname, self.anyone.verify_mode = False, ssl.CERT_NONE

    def line(self, rng: Rng, tls: bool = True) -> socket.socket:
        source = "127.0.0.1" if rng.random() < 0.5 else f"127.0.2.{rng.integers(1, 250)}"
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=5, source_address=(source, 0))
        try:
            return self.anyone.wrap_socket(plain) if tls else plain
        except OSError:
            plain.close()
            raise

    def hold(self, rng: Rng, tls: bool) -> None:
        with ExitStack() as held:
            for _ in range(CONNECTIONS):
                with suppress(OSError):
                    held.enter_context(self.line(rng, tls))
            time.sleep(float(rng.random()))

    def idle(self, rng: Rng) -> None:
        self.hold(rng, tls=True)

    def unshaken(self, rng: Rng) -> None:
        self.hold(rng, tls=False)

    def headers(self, rng: Rng) -> None:
        """Megabytes of them, from several at a time."""
        with ExitStack() as held, suppress(OSError):
            lines = [held.enter_context(self.line(rng)) for _ in range(8)]
            for line in lines:
                line.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: x\r\n")
            for number in range(100):
                for line in lines:
                    line.sendall(b"h%d: " % number + b"x" * 60_000 + b"\r\n")

    def garbage(self, rng: Rng) -> None:
        for tls in (True, False):
            with suppress(OSError), self.line(rng, tls) as line:
                line.sendall(rng.bytes(int(rng.integers(1, 5000))))
                line.recv(1000)

    def drip(self, rng: Rng) -> None:
        """A header that never ends."""
        with suppress(OSError), self.line(rng) as line:
            line.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\n")
            for _ in range(5):
                line.sendall(b"a: b\r\n")
                time.sleep(0.2)

    def unknown_key(self, rng: Rng) -> None:
        private, public = generate_key_pairs()
        with self.client(private) as client, suppress(*LOST):
            client.ActivateNode(ActivateNodeRequest(public_key=public_key_to_bytes(public), heartbeat_interval=10))
            raise AssertionError("a stranger got in")

    def slow_upload(self, rng: Rng) -> None:
        """A body that is announced and comes in drops."""
        with self.client(self.keys[0]) as client, suppress(*LOST):
            content = PushObjectRequest(node=self.activate(client, 0), object_content=b"x" * 10_000).SerializeToString()

            def drops() -> Iterator[bytes]:
                for k in range(5):
                    time.sleep(0.2)
                    yield content[k : k + 1]

            self.post(client, FLEET + "push-object", drops(), {"content-length": str(len(content))})

    def another_name(self, rng: Rng) -> None:
        """An answer with one device's key and another node as its sender."""
        with self.client(self.keys[0]) as client, suppress(*LOST):
            node = self.activate(client, 0)
            request = PushMessagesRequest(node=node)
            request.messages_list.add().metadata.src_node_id = int(rng.integers(1, 2**62))
            client.PushMessages(request)
            raise AssertionError("an answer in another's name was taken")

    def mutated(self, rng: Rng) -> None:
        """Requests of a device with bits flipped, cut short or meant for another of the fleet's paths."""
        with self.client(self.keys[1]) as client:
            with suppress(*LOST):
                self.activate(client, 1)
            node = Node(node_id=int(rng.integers(1, 2**62)))
            bodies: list[Any] = [
                PullMessagesRequest(node=node),
                PushMessagesRequest(node=node, clientapp_runtime_list=[0.0]),
                SendNodeHeartbeatRequest(node=node, heartbeat_interval=1e300),
                PushObjectRequest(node=node, run_id=1, object_id="0" * 64, object_content=b"x" * 1000),
                PullObjectRequest(node=node, run_id=1, object_id="../../etc/passwd"),
                ConfirmMessageReceivedRequest(node=node, run_id=1, message_object_id="\x00"),
            ]
            for path in rng.permutation(sorted(PATHS)):
                body = bytearray(bodies[rng.integers(len(bodies))].SerializeToString())
                for _ in range(int(rng.integers(0, 8))):
                    body[rng.integers(len(body))] = rng.integers(256)
                body = body[: rng.integers(1, len(body) + 1)]
                with suppress(*LOST):
                    self.post(client, str(path), bytes(body))

    def client(self, key: ec.EllipticCurvePrivateKey) -> FleetHttpClient:
        signer = NodeAuthHttpInterceptor(key, key.public_key())
        return FleetHttpClient.from_server_address(
            f"127.0.0.1:{self.port}", False, self.authority.read_bytes(), [signer]
        )

    def activate(self, client: FleetHttpClient, number: int) -> Node:
        public = public_key_to_bytes(self.keys[number].public_key())
        return Node(node_id=client.ActivateNode(ActivateNodeRequest(public_key=public, heartbeat_interval=10)).node_id)

    def post(
        self, client: FleetHttpClient, path: str, body: bytes | Iterator[bytes], headers: dict[str, str] | None = None
    ) -> None:
        """Signed as the client signs, whatever the body is."""
        request = client._client.build_request("POST", client._base_url + path, content=body, headers=headers)
        context = ProtobufRequestContext("", PullMessagesRequest(), request)
        client._interceptors[0].intercept(context, lambda context: client._client.send(request))

    @property
    def acts(self) -> list[Callable[[Rng], None]]:
        return [
            self.idle,
            self.unshaken,
            self.headers,
            self.garbage,
            self.drip,
            self.unknown_key,
            self.slow_upload,
            self.another_name,
            self.mutated,
        ]
