"""The gate: the one door of the server that is open to the network.

Flower's SuperLink serves devices (fleet), operators (control) and apps (runtime) on one port and asks only devices who
they are: whoever reaches the port may register nodes, start code on the server, or take the training's place. So the
SuperLink listens on loopback, and the gate in front of it lets through what devices need and nothing else: the paths of
the fleet, from keys that belong to a device, in sizes that a device can have reason to send.

It also spares everybody the asking: a device's question whether there is a message for it is answered when there is
one, and the server is told when an answer has come.
"""

import http.client
import ssl
import threading
import time
from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from google.protobuf.message import DecodeError

from fedcluster.flower.post import Bell

FLEET = "/v1/fleet/"
PATHS = frozenset(
    FLEET + name
    for name in (
        "activate-node",
        "deactivate-node",
        "send-node-heartbeat",
        "pull-messages",
        "push-messages",
        "get-run",
        "get-fab",
        "push-object",
        "pull-object",
        "confirm-message-received",
    )
)
STRANGERS = frozenset(FLEET + name for name in ("register-node", "unregister-node"))  # let in where nobody has a key
SMALL = 2**20  # bytes of any request but an object
HOLD = 5.0  # seconds that a question may wait for its answer
LONGEST = 0.5  # seconds until the server looks by itself
IDLE = 120.0  # seconds that a connection may be silent
SKEW = 300.0  # seconds by which clocks may differ, as at the SuperLink
SAME = 30.0  # seconds in which the same remark is made once,
REMARKS = 50  # and so many in all
CONNECTIONS = 2048  # at a time
HANDSHAKE = 10.0  # seconds


class Gate(ThreadingHTTPServer, Bell):
    """`keys` says whose key is whose; None: anyone, for tests on loopback. `allowance` is how many bytes of objects a
    device may upload for every message that it was given."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        superlink: tuple[str, int],
        folder: Path | None,
        keys: dict[bytes, str] | None,
        say: Callable[[str], None],
    ) -> None:
        self.superlink, self.keys, self.speak = superlink, keys, say
        self.allowance = SMALL
        self.left: dict[bytes, int] = {}
        self.mail: set[int] = set()  # nodes for which there is something
        self.came = threading.Event()
        self.news = threading.Condition()
        self.said: dict[str, float] = {}
        self.lock, self.room = threading.Lock(), threading.Semaphore(CONNECTIONS)
        self.outside: ssl.SSLContext | None = None
        self.inside: ssl.SSLContext | None = None
        if folder is not None:
            self.outside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.outside.minimum_version = ssl.TLSVersion.TLSv1_2
            self.outside.load_cert_chain(folder / "server.crt", folder / "server.key")
            self.inside = ssl.create_default_context(cafile=folder / "ca.crt")
        super().__init__(address, Handler)

    def open(self) -> None:
        threading.Thread(target=self.serve_forever, name="gate", daemon=True).start()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In the connection's own thread, so that nobody's handshake keeps others waiting."""
        if not self.room.acquire(blocking=False):
            self.say(f"refused a connection from {client_address[0]}: there are {CONNECTIONS:,} already")
            return
        try:
            if self.outside is not None:
                request.settimeout(HANDSHAKE)
                request = self.outside.wrap_socket(request, server_side=True)
            request.settimeout(IDLE)
        except (OSError, ValueError) as error:
            self.say(f"refused a connection from {client_address[0]} ({reason(error)})")
        else:
            with suppress(OSError):  # whoever goes away in the middle is gone
                super().finish_request(request, client_address)
        finally:
            self.room.release()

    def say(self, text: str) -> None:
        """Remarks in moderation: those who are refused try again and again, and may do it on purpose."""
        now = time.monotonic()
        with self.lock:
            self.said = {old: at for old, at in self.said.items() if now - at < SAME}
            if text in self.said or len(self.said) >= REMARKS:
                return
            self.said[text] = now
        self.speak(f"gate: {text}")

    def renew(self, key: bytes) -> None:
        """The device was given a message: it may answer."""
        with self.lock:
            self.left[key] = self.allowance

    def spend(self, key: bytes, size: int) -> bool:
        with self.lock:
            left = self.left.get(key, 0) - size
            self.left[key] = max(left, 0)
        return left >= 0

    def ring(self, nodes: Iterable[int]) -> None:
        with self.news:
            self.mail |= set(nodes)
            self.news.notify_all()

    def wait(self) -> None:
        self.came.wait(LONGEST)
        self.came.clear()

    def hold(self, body: bytes) -> int:
        """Keep a node's question until there is something for it, or for a while: the SuperLink may know better."""
        try:
            node = int(PullMessagesRequest.FromString(body).node.node_id)
        except DecodeError:
            return 0
        with self.news:
            self.news.wait_for(lambda: node in self.mail, HOLD)
        return node

    def handle_error(self, request: Any, client_address: Any) -> None:
        self.say(f"a request from {client_address[0]} could not be served")


def reason(error: Exception) -> str:
    """Why a handshake failed, in the words that tell a plain connection from a distrusted certificate."""
    text = str(getattr(error, "reason", None) or error).replace("_", " ").lower()
    if "unknown ca" in text or "certificate" in text:
        return f"it does not trust our certificate: {text}"
    if "http request" in text or "wrong version" in text:
        return "it does not speak TLS"
    return text


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Gate
    link: http.client.HTTPConnection | None = None

    def do_POST(self) -> None:
        key, who = self.caller()
        size = self.length()
        refusal = self.refusal(key, who, size)
        if refusal is not None:
            status, why = refusal
            self.server.say(f"refused {who}: {why}")
            self.answer(status, b"", close=True)
            return
        body = self.rfile.read(size)
        if len(body) < (size or 0):
            self.close_connection = True
            return
        asks = self.path == FLEET + "pull-messages"
        node = self.server.hold(body) if asks else 0
        try:
            status, kind, content = self.forward(body)
        except (OSError, http.client.HTTPException):
            self.answer(502, b"")
            return
        if asks and status == 200:
            if content:
                self.server.renew(key)
            else:
                self.server.mail.discard(node)
        elif self.path == FLEET + "push-object":
            self.server.came.set()
        self.answer(403 if status == 401 else status, content, kind)  # at 401 Flower's nodes end themselves

    def refuse(self) -> None:
        _, who = self.caller()
        self.server.say(f"refused {who}: {self.command} {self.path[:80]!r} is not open to devices")
        self.answer(403, b"", close=True)

    do_GET = do_PUT = do_DELETE = do_HEAD = do_OPTIONS = do_PATCH = refuse

    def caller(self) -> tuple[bytes, str]:
        """The key that it shows, which the SuperLink checks, and how to name it."""
        address = str(self.client_address[0])
        try:
            key = b64decode(self.headers.get("flwr-public-key", ""), validate=True)
        except (NotBase64, ValueError):
            return b"", address
        if self.server.keys is None:
            return key, address
        if key in self.server.keys and self.signed(key):
            return key, f"device {self.server.keys[key]} at {address}"
        return b"", f"key {sha256(key).hexdigest()[:12]} at {address}" if key else address

    def signed(self, key: bytes) -> bool:
        """Whether the caller has the private half. The SuperLink asks the same, but we count and name callers first."""
        stamp = self.headers.get("flwr-timestamp", "")
        try:
            age = (datetime.now(UTC) - datetime.fromisoformat(stamp)).total_seconds()
            signature = b64decode(self.headers.get("flwr-signature", ""), validate=True)
            return abs(age) < SKEW and verify_signature(bytes_to_public_key(key), stamp.encode("ascii"), signature)
        except (NotBase64, ValueError, TypeError):
            return False

    def length(self) -> int | None:
        raw = self.headers.get("content-length", "")
        return int(raw) if raw.isascii() and raw.isdigit() and len(raw) < 16 else None

    def refusal(self, key: bytes, who: str, size: int | None) -> tuple[int, str] | None:
        server = self.server
        if self.path not in PATHS and not (server.keys is None and self.path in STRANGERS):
            return 403, f"{self.path[:80]!r} is not open to devices"
        if server.keys is not None and key not in server.keys:
            return 403, "not signed with the key of a device"
        if size is None:
            return 411, "a request without a length"
        if self.path != FLEET + "push-object":
            return (413, f"a request of {size:,} bytes") if size > SMALL else None
        if not server.spend(key, size):
            return 413, f"an upload of more than {server.allowance:,} bytes"
        return None

    def forward(self, body: bytes) -> tuple[int, str, bytes]:
        """Pass the request on. A connection that the SuperLink has closed meanwhile is opened once more."""
        headers = {name: value for name, value in self.headers.items() if name.lower() in PASSED or "flwr" in name}
        for fresh in (False, True):
            if self.link is None or fresh:
                self.link = self.connect()
            try:
                self.link.request("POST", self.path, body, headers)
                response = self.link.getresponse()
                return response.status, response.getheader("content-type", ""), response.read()
            except (OSError, http.client.HTTPException):
                self.link.close()
                if fresh:
                    raise
        raise AssertionError("unreachable")

    def connect(self) -> http.client.HTTPConnection:
        host, port = self.server.superlink
        if self.server.inside is None:
            return http.client.HTTPConnection(host, port, timeout=30)
        return http.client.HTTPSConnection(host, port, timeout=30, context=self.server.inside)

    def answer(self, status: int, content: bytes, kind: str = "", close: bool = False) -> None:
        self.send_response_only(status)
        if kind:
            self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        if close:
            self.send_header("connection", "close")
            self.close_connection = True
        self.end_headers()
        self.wfile.write(content)

    def finish(self) -> None:
        if self.link is not None:
            self.link.close()
        super().finish()

    def log_message(self, format: str, *words: Any) -> None:
        """What is worth saying is said above."""


PASSED = ("content-type", "accept")
