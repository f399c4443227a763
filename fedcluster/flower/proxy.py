"""The gate: the one door of the server that is open to the network.

Flower's SuperLink serves devices (fleet), operators (control) and apps (runtime) on one port and asks only devices who
they are: whoever reaches the port may register nodes, start code on the server, or take the training's place. So the
SuperLink listens on loopback, and the gate in front of it lets through what devices need and nothing else: the paths of
the fleet, from keys that belong to a device, in that device's own name, in sizes that a device can have reason to send.

It also spares everybody the asking: a device's question whether there is a message for it is answered when there is
one, and the server is told when an answer has come.
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
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from google.protobuf.message import DecodeError

from fedcluster.flower.listener import OWN, Answer, Listener, Request, raise_descriptor_limit
from fedcluster.flower.transport import Notifier, printable

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
PASSED = ("content-type", "accept")  # headers, besides Flower's own
SMALL = 2**20  # bytes of any request but an object
HOLD = 5.0  # seconds that a question may wait for its answer
LONGEST = 0.5  # seconds until the server looks by itself
SKEW = 300.0  # seconds by which clocks may differ, as at the SuperLink
SAME = 30.0  # seconds in which the same remark is made once,
REMARKS = 50  # and so many in all
LINKS = OWN // 4  # connections to the SuperLink


class Proxy(Notifier):
    """`keys` says whose key is whose; None: anyone, for tests on loopback. `allowance` is how many bytes of objects a
    device may upload for every message that it was given."""

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
        self.bells: dict[int, asyncio.Event] = {}  # of nodes that are waiting
        self.came = threading.Event()
        self.said: dict[str, float] = {}
        outside: ssl.SSLContext | None = None
        self.inside: ssl.SSLContext | bool = False
        if folder is not None:
            outside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            outside.minimum_version = ssl.TLSVersion.TLSv1_2
            outside.options |= ssl.OP_NO_RENEGOTIATION
            outside.load_cert_chain(folder / "server.crt", folder / "server.key")
            self.inside = ssl.create_default_context(cafile=folder / "ca.crt")
        self.listener = Listener(address, outside, self, raise_descriptor_limit(), len(keys or {}))
        self.loop, self.over = asyncio.new_event_loop(), asyncio.Event()
        self.thread = threading.Thread(target=self.work, name="gate", daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.loop.call_soon_threadsafe(self.over.set)
        self.thread.join()
        self.loop.close()
        self.listener.socket.close()

    @property
    def port(self) -> int:
        return self.listener.port

    def work(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self.run())

    async def run(self) -> None:
        scheme, (host, port) = "https" if self.inside else "http", self.superlink
        async with httpx.AsyncClient(
            base_url=f"{scheme}://{host}:{port}",
            verify=self.inside,
            timeout=30,
            limits=httpx.Limits(max_connections=LINKS, max_keepalive_connections=LINKS),
            headers={"accept-encoding": "identity"},
            trust_env=False,
        ) as self.link:
            await self.listener.run(self.over.wait())

    def say(self, text: str) -> None:
        """Remarks in moderation: those who are refused try again and again, and may do it on purpose."""
        now, text = time.monotonic(), printable(text)
        self.said = {old: at for old, at in self.said.items() if now - at < SAME}
        if text not in self.said and len(self.said) < REMARKS:
            self.said[text] = now
            self.speak(f"gate: {text}")

    def ring(self, nodes: Iterable[int]) -> None:
        self.loop.call_soon_threadsafe(self.deliver, list(nodes))

    def deliver(self, nodes: list[int]) -> None:
        self.mail.update(nodes)
        for node in nodes:
            if node in self.bells:
                self.bells.pop(node).set()

    def wait(self) -> None:
        self.came.wait(LONGEST)
        self.came.clear()

    async def hold(self, node: int) -> None:
        """Keep a node's question until there is something for it, or for a while: the SuperLink may know better."""
        if node not in self.mail:
            notifier = self.bells.setdefault(node, asyncio.Event())
            with suppress(TimeoutError):
                async with asyncio.timeout(HOLD):
                    await notifier.wait()
            self.bells.pop(node, None)

    def admit(self, request: Request) -> bytes | Answer:
        """By its header alone: who it is, what it wants, and how much it wants to send."""
        key, who = self.caller(request)
        refusal = self.refusal(key, request)
        if refusal is None:
            return key
        status, why = refusal
        self.say(f"refused {who}: {why}")
        return Answer(status)

    def caller(self, request: Request) -> tuple[bytes, str]:
        """The key that it shows, which the SuperLink checks, and how to name it."""
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
        path, size = request.path, request.size
        open_paths = PATHS | STRANGERS if self.keys is None else PATHS
        if request.method != "POST" or path not in open_paths:
            wanted = repr(path[:80]) if request.method == "POST" else f"{request.method[:20]} {path[:80]!r}"
            return 403, f"{wanted} is not open to devices"
        if self.keys is not None and key not in self.keys:
            return 403, "not signed with the key of a device"
        if size is None:
            return 411, "a request without a length"
        if path != FLEET + "push-object":
            return (413, f"a request of {size:,} bytes") if size > SMALL else None
        if not self.spend(key, size):
            return 413, f"an upload of more than {self.allowance:,} bytes"
        return None

    def spend(self, key: bytes, size: int) -> bool:
        left = self.left.get(key, 0) - size
        self.left[key] = max(left, 0)
        return left >= 0

    async def serve(self, key: bytes, request: Request, body: bytes, gone: Callable[[], bool]) -> Answer | None:
        asks, node = request.path == FLEET + "pull-messages", 0
        try:
            if asks:
                node = int(PullMessagesRequest.FromString(body).node.node_id)
            elif request.path == FLEET + "push-messages" and forged(PushMessagesRequest.FromString(body)):
                self.say(f"refused {self.caller(request)[1]}: an answer in the name of another node")
                return Answer(403)
        except DecodeError:
            return Answer(400)
        if asks:
            await self.hold(node)
            if gone():  # the SuperLink would count the message as delivered
                return None
            self.mail.discard(node)  # before the SuperLink looks, so that what comes meanwhile is not forgotten
        answer = await self.forward(request, body)
        if asks and answer.status == 200 and answer.content:
            self.mail.add(node)  # perhaps there is more
            self.left[key] = self.allowance  # it was given a message and may answer
        elif request.path == FLEET + "push-object":
            self.came.set()
        return (
            Answer(403, answer.content, answer.kind) if answer.status == 401 else answer
        )  # at 401 nodes end themselves

    async def forward(self, request: Request, body: bytes) -> Answer:
        """Pass the request on. One that meets a connection which the SuperLink is just closing is passed on again."""
        headers = {name: value for name, value in request.headers.items() if name in PASSED or "flwr" in name}
        for _ in range(2):
            try:
                response = await self.link.post(request.path, content=body, headers=headers)
                return Answer(response.status_code, response.content, response.headers.get("content-type", ""))
            except httpx.TimeoutException:
                break
            except httpx.TransportError:
                continue
        return Answer(502)


def signed(key: bytes, headers: dict[str, str]) -> bool:
    """Whether the caller has the private half. The SuperLink asks the same, but we count and name callers first."""
    stamp = headers.get("flwr-timestamp", "")
    try:
        age = (datetime.now(UTC) - datetime.fromisoformat(stamp)).total_seconds()
        signature = b64decode(headers.get("flwr-signature", ""), validate=True)
        return abs(age) < SKEW and verify_signature(bytes_to_public_key(key), stamp.encode("ascii"), signature)
    except (NotBase64, ValueError, TypeError):
        return False


def forged(request: PushMessagesRequest) -> bool:
    """Whether a node sends messages of others. The SuperLink compares the node with the key, but not with the senders
    of the messages, and goes by those."""
    return any(message.metadata.src_node_id != request.node.node_id for message in request.messages_list)
