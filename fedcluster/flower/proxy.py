"""The proxy: the only part of the server that is open to the network.

Flower's SuperLink serves devices (fleet), operators (control) and apps (runtime) on one port, and authenticates devices
only: whoever reaches the port may register nodes, start code on the server, or take over the training. So the SuperLink
listens on loopback, and the proxy in front of it forwards what devices need and nothing else: the paths of the fleet,
from the keys of known devices, in that device's own name, in sizes that a device can have reason to send.

It also replaces polling: a device's request for messages is held until there is one, and the server is notified when a
reply has come. Messages of the mailbox do not pass through the SuperLink at all.
"""

import asyncio
import ssl
import threading
import time
from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
from google.protobuf.message import DecodeError

from fedcluster.flower._compat import (
    ActivateNodeResponse,
    PullMessagesRequest,
    PushMessagesRequest,
    PushMessagesResponse,
    bytes_to_public_key,
    verify_signature,
)
from fedcluster.flower.certificates import trust
from fedcluster.flower.listener import RESERVED_DESCRIPTORS, Listener, Request, Response, raise_descriptor_limit
from fedcluster.flower.mailbox import HEADER, Mailbox
from fedcluster.flower.messages import printable
from fedcluster.flower.transport import Notifier

FLEET = "/v1/fleet/"
ACTIVATE, PULL, PUSH = FLEET + "activate-node", FLEET + "pull-messages", FLEET + "push-messages"
UPLOAD = FLEET + "push-object"
OTHERS = ("deactivate-node", "send-node-heartbeat", "get-run", "get-fab", "pull-object", "confirm-message-received")
PATHS = frozenset({ACTIVATE, PULL, PUSH, UPLOAD, *(FLEET + name for name in OTHERS)})
REGISTRATION = frozenset(FLEET + name for name in ("register-node", "unregister-node"))  # open only without keys
FORWARDED_HEADERS = ("content-type", "accept")  # besides Flower's own
MAX_REQUEST = 2**20  # bytes of a request that is not an upload, and for every device
MAX_SHARE = 2**8  # more: the shares that secure aggregation sends to each
HOLD_SECONDS = 5.0  # for which a request for messages is held
POLL_SECONDS = 0.5  # after which the server looks for replies without notification
MAX_CLOCK_SKEW = 300.0  # seconds, as at the SuperLink
REPEAT_SECONDS = 30.0  # in which the same line is logged once,
MAX_LINES = 50  # and at most so many lines
SUPERLINK_CONNECTIONS = RESERVED_DESCRIPTORS // 4


class Proxy(Notifier):
    """`keys` maps public keys to device ids; None lets anyone in, on loopback only. `max_upload` is how many bytes of
    objects a device may upload per message that it received."""

    def __init__(
        self,
        address: tuple[str, int],
        superlink: tuple[str, int],
        certificates: Path | None,
        keys: dict[bytes, str] | None,
        say: Callable[[str], None],
    ) -> None:
        self.superlink, self.keys, self.say = superlink, keys, say
        self.max_upload = MAX_REQUEST
        self.max_request = MAX_REQUEST + MAX_SHARE * len(keys or {})
        self.mailbox = Mailbox()
        self.upload_left: dict[bytes, int] = {}  # by key
        self.nodes: dict[bytes, int] = {}  # the node id that the SuperLink gave to each key
        self.with_messages: set[int] = set()  # nodes for which there may be a message
        self.held: dict[int, asyncio.Event] = {}  # requests for messages, by node
        self.reply_came = threading.Event()
        self.logged: dict[str, float] = {}
        outside: ssl.SSLContext | None = None
        self.inside: ssl.SSLContext | bool = False
        if certificates is not None:
            outside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            outside.minimum_version = ssl.TLSVersion.TLSv1_2
            outside.options |= ssl.OP_NO_RENEGOTIATION
            outside.load_cert_chain(certificates / "server.crt", certificates / "server.key")
            self.inside = trust(certificates / "ca.crt")
        self.listener = Listener(address, outside, self, raise_descriptor_limit(), len(keys or {}))
        self.loop, self.stopped = asyncio.new_event_loop(), asyncio.Event()
        self.thread = threading.Thread(target=self.run_loop, name="proxy", daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.loop.call_soon_threadsafe(self.stopped.set)
        self.thread.join()
        self.loop.close()
        self.listener.socket.close()

    @property
    def port(self) -> int:
        return self.listener.port

    def run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self.run())

    async def run(self) -> None:
        scheme, (host, port) = "https" if self.inside else "http", self.superlink
        limits = httpx.Limits(max_connections=SUPERLINK_CONNECTIONS, max_keepalive_connections=SUPERLINK_CONNECTIONS)
        async with httpx.AsyncClient(
            base_url=f"{scheme}://{host}:{port}",
            verify=self.inside,
            timeout=30,
            limits=limits,
            headers={"accept-encoding": "identity"},
            trust_env=False,
        ) as self.client:
            await self.listener.run(self.stopped.wait())

    def log(self, text: str) -> None:
        """Log a line unless it repeats, or there are too many: clients that are refused try again, perhaps on
        purpose."""
        now, text = time.monotonic(), printable(text)
        self.logged = {old: at for old, at in self.logged.items() if now - at < REPEAT_SECONDS}
        if text not in self.logged and len(self.logged) < MAX_LINES:
            self.logged[text] = now
            self.say(f"proxy: {text}")

    def notify(self, nodes: Iterable[int]) -> None:
        self.loop.call_soon_threadsafe(self.release, list(nodes))

    def release(self, nodes: list[int]) -> None:
        self.with_messages.update(nodes)
        self.answer_held(nodes)

    def wake(self, nodes: Iterable[int]) -> None:
        """There are messages for these nodes in the mailbox."""
        self.loop.call_soon_threadsafe(self.answer_held, list(nodes))

    def answer_held(self, nodes: list[int]) -> None:
        for node in nodes:
            if node in self.held:
                self.held.pop(node).set()

    def wait(self) -> None:
        self.reply_came.wait(POLL_SECONDS)
        self.reply_came.clear()

    async def hold(self, node: int) -> None:
        """Hold a node's request until there is a message, or for a while: the SuperLink may have one of its own."""
        if node not in self.with_messages and self.mailbox.get(node) is None:
            event = self.held.setdefault(node, asyncio.Event())
            with suppress(TimeoutError):
                async with asyncio.timeout(HOLD_SECONDS):
                    await event.wait()
            self.held.pop(node, None)

    def authorize(self, request: Request) -> bytes | Response:
        key, name = self.identify(request)
        refusal = self.refusal(key, request)
        if refusal is None:
            return key
        status, reason = refusal
        self.log(f"refused {name}: {reason}")
        return Response(status)

    def identify(self, request: Request) -> tuple[bytes, str]:
        """The key that signed the request, empty if none did, and a name for the log."""
        address = request.address
        try:
            key = b64decode(request.headers.get("flwr-public-key", ""), validate=True)
        except (NotBase64, ValueError):
            return b"", address
        if self.keys is None:
            return key, address
        if key in self.keys and signed(key, request.headers):
            return key, f"device {self.keys[key]} at {address}"
        return b"", f"key {sha256(key).hexdigest()[:12]} at {address}" if key else address

    def refusal(self, key: bytes, request: Request) -> tuple[int, str] | None:
        """The status and reason, judged by the header alone."""
        path, size = request.path, request.size
        open_paths = PATHS | REGISTRATION if self.keys is None else PATHS
        if request.method != "POST" or path not in open_paths:
            wanted = repr(path[:80]) if request.method == "POST" else f"{request.method[:20]} {path[:80]!r}"
            return 403, f"{wanted} is not open to devices"
        if self.keys is not None and key not in self.keys:
            return 403, "not signed with the key of a device"
        if size is None:
            return 411, "a request without a length"
        if path != UPLOAD:
            return (413, f"a request of {size:,} bytes") if size > self.max_request else None
        left = self.upload_left.get(key, 0) - size
        self.upload_left[key] = max(left, 0)
        return None if left >= 0 else (413, f"an upload of more than {self.max_upload:,} bytes")

    async def handle(
        self, key: bytes, request: Request, body: bytes, disconnected: Callable[[], bool]
    ) -> Response | None:
        try:
            if self.is_forged(key, request.path, body):
                self.log(f"refused {self.identify(request)[1]}: a request in the name of another node")
                return Response(403)
        except DecodeError:
            return Response(400)
        node = self.nodes.get(key, 0)
        if request.path == PULL:
            await self.hold(node)
            if disconnected():  # the SuperLink would count the message as delivered
                return None
            (self.mailbox.nodes.add if HEADER in request.headers else self.mailbox.nodes.discard)(node)
            if (message := self.mailbox.get(node)) is not None:
                return Response(200, message, request.headers.get("accept", ""))
            self.with_messages.discard(node)  # before the request, so that a message that comes meanwhile is noted
        if request.path == PUSH and self.mailbox.take(node, PushMessagesRequest.FromString(body)):
            self.reply_came.set()
            return Response(200, PushMessagesResponse().SerializeToString(), request.headers.get("accept", ""))
        response = await self.forward(request, body)
        if response.status == 200:
            self.note(key, node, request.path, response.content)
        if response.status == 401:  # a node would end itself
            return Response(403, response.content, response.content_type)
        return response

    def is_forged(self, key: bytes, path: str, body: bytes) -> bool:
        """Whether the request is in another node's name. The SuperLink compares the node with the key, but not the
        senders of its messages; and here a request for messages ends the wait of an earlier one."""
        if path == PULL:
            return bool(PullMessagesRequest.FromString(body).node.node_id != self.nodes.get(key))
        if path == PUSH:
            pushed = PushMessagesRequest.FromString(body)
            names = {pushed.node.node_id, *(message.metadata.src_node_id for message in pushed.messages_list)}
            return names != {self.nodes.get(key)}
        return False

    def note(self, key: bytes, node: int, path: str, content: bytes) -> None:
        """Take notice of a request that succeeded."""
        if path == ACTIVATE:
            self.nodes[key] = ActivateNodeResponse.FromString(content).node_id
        elif path == PULL and content:
            self.with_messages.add(node)  # there may be more
            self.upload_left[key] = self.max_upload  # it has received a message and may answer
        elif path == UPLOAD:
            self.reply_came.set()

    async def forward(self, request: Request, body: bytes) -> Response:
        """Pass the request to the SuperLink; a second time if its connection was just being closed."""
        headers = {
            name: value for name, value in request.headers.items() if name in FORWARDED_HEADERS or "flwr" in name
        }
        for _ in range(2):
            try:
                response = await self.client.post(request.path, content=body, headers=headers)
                return Response(response.status_code, response.content, response.headers.get("content-type", ""))
            except httpx.TimeoutException:
                break
            except httpx.TransportError:
                continue
        return Response(502)


def signed(key: bytes, headers: dict[str, str]) -> bool:
    """Whether the client has the private half of its key. The SuperLink checks this again; here it is for the
    limits."""
    timestamp = headers.get("flwr-timestamp", "")
    try:
        age = (datetime.now(UTC) - datetime.fromisoformat(timestamp)).total_seconds()
        signature = b64decode(headers.get("flwr-signature", ""), validate=True)
        return abs(age) < MAX_CLOCK_SKEW and verify_signature(
            bytes_to_public_key(key), timestamp.encode("ascii"), signature
        )
    except (NotBase64, ValueError, TypeError):
        return False
