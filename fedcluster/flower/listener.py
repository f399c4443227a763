"""The listener: connections and HTTP, and how much of either a caller gets.

Every connection is a coroutine, so that one that says nothing costs little, and every step of it has an end: the TLS
handshake and the header of the first request together, each later header, each body, each answer. Until its first
request has been accepted a connection is a stranger's. Strangers are limited by address and in total, and when there
are too many, the one that has waited longest makes room: an honest device says who it is within milliseconds.
"""

import asyncio
import errno
import ipaddress
import resource
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import h11

FIRST = 10.0  # seconds from connecting to the end of the first header; of a later header, from its first byte
IDLE = 120.0  # seconds between two requests
GRACE = 30.0  # seconds for a body or an answer, and more for a large one:
SLOWEST = 2**14  # bytes a second
HEADER = 2**13  # bytes of a request's header; a node of Flower's needs about 1,000
CHUNK = 2**16
BUFFER = 2**15  # bytes that TLS takes for every connection
STRANGERS = 512  # connections without an accepted request
ADDRESS = 64  # of them from one address, or two for every device where that is more
DEVICE = 8  # connections of one device; it needs two
OWN = 256  # descriptors kept back for the server's own files and its connections to the SuperLink
PAUSE = 1.0  # seconds until the next try when no connection can be accepted

SSLProtocol.max_size = BUFFER  # asyncio's own is 256 KB: 500 silent strangers would take 140 MB instead of 30


def raise_descriptor_limit() -> int:
    """Use all descriptors that this process may have, and return their number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(soft, 10_240) if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


@dataclass(frozen=True)
class Request:
    """What is known of a request before its body; `size` is None where it does not say."""

    address: str
    method: str
    path: str
    headers: dict[str, str]
    size: int | None


@dataclass(frozen=True)
class Answer:
    status: int
    content: bytes = b""
    kind: str = ""


class Host(Protocol):
    def admit(self, request: Request) -> bytes | Answer:
        """Whose request it is, if its body may be read; otherwise what the caller is told before we hang up."""

    async def serve(self, key: bytes, request: Request, body: bytes, gone: Callable[[], bool]) -> Answer | None:
        """The answer; None for a caller who is gone."""

    def say(self, text: str) -> None: ...


@dataclass(eq=False)
class Visitor:
    """A connection. `network` is what its address counts for."""

    address: str
    network: str
    key: bytes | None = None
    close: Callable[[], object] = field(default=lambda: None)


class Room:
    """Who is connected, and who has to leave when another one comes."""

    def __init__(self, most: int, devices: int) -> None:
        self.most, self.most_strangers = most, min(STRANGERS, most // 2)
        self.most_of_address = max(ADDRESS, 2 * devices)
        self.strangers: dict[Visitor, None] = {}  # the first has waited longest
        self.known: dict[bytes, dict[Visitor, None]] = {}
        self.size = 0

    def enter(self, visitor: Visitor) -> bool:
        counts = Counter(one.network for one in self.strangers)
        crowded: str | None = None
        if counts[visitor.network] >= self.most_of_address:
            crowded = visitor.network
        elif len(self.strangers) >= self.most_strangers or self.size >= self.most:
            crowded = counts.most_common(1)[0][0] if counts else None
            if crowded is None:
                return False
        if crowded is not None:
            self.push_out(next(one for one in self.strangers if one.network == crowded))
        self.strangers[visitor] = None
        self.size += 1
        return True

    def know(self, visitor: Visitor, key: bytes) -> None:
        """It is a stranger no longer. A device that has come back pushes out what is left of its old connections."""
        if visitor in self.strangers:
            del self.strangers[visitor]
            own = self.known.setdefault(key, {})
            if len(own) >= DEVICE:
                self.push_out(next(iter(own)))
            self.known.setdefault(key, {})[visitor] = None
            visitor.key = key

    def push_out(self, visitor: Visitor) -> None:
        self.leave(visitor)
        visitor.close()

    def leave(self, visitor: Visitor) -> None:
        own = self.strangers if visitor.key is None else self.known.get(visitor.key, {})
        if visitor in own:
            del own[visitor]
            self.size -= 1
            if visitor.key is not None and not own:
                del self.known[visitor.key]


class Listener:
    """`descriptors` is how many this process may have, `devices` how many are known."""

    def __init__(
        self, address: tuple[str, int], tls: ssl.SSLContext | None, host: Host, descriptors: int, devices: int
    ) -> None:
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        self.socket = socket.create_server(address, family=family, backlog=512)
        self.socket.setblocking(False)
        self.tls, self.host = tls, host
        self.room = Room(descriptors - min(OWN, descriptors // 2), devices)
        self.tasks: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        return int(self.socket.getsockname()[1])

    async def run(self, over: Awaitable[object]) -> None:
        """Serve until it is over."""
        accepting = asyncio.create_task(self.accept())
        try:
            await over
        finally:
            for task in (accepting, *self.tasks):
                task.cancel()
            await asyncio.gather(accepting, *self.tasks, return_exceptions=True)

    async def accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                plain, where = await loop.sock_accept(self.socket)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self.host.say(f"no connection can be accepted ({error.strerror}): trying again")
                    await asyncio.sleep(PAUSE)
                continue
            visitor = Visitor(str(where[0]), network(str(where[0])))
            if not self.room.enter(visitor):
                plain.close()
                self.host.say(f"refused a connection from {visitor.address}: there are {self.room.size:,} already")
                continue
            task = loop.create_task(self.visit(visitor, plain))
            visitor.close = task.cancel
            self.tasks.add(task)
            task.add_done_callback(partial(self.done, plain))

    def done(self, plain: socket.socket, task: "asyncio.Task[None]") -> None:
        """Also of a visit that was cancelled before it had begun."""
        plain.close()
        self.tasks.discard(task)

    async def visit(self, visitor: Visitor, plain: socket.socket) -> None:
        line: Line | None = None
        try:
            async with asyncio.timeout(FIRST):
                line = await connect(visitor.address, plain, self.tls)
                request = await line.request(FIRST)
            await self.converse(visitor, line, request)
        except h11.RemoteProtocolError as error:
            if line is not None and not line.gone():
                self.host.say(f"refused {visitor.address}: not a request that we take ({error})")
                line.refuse(error.error_status_hint)
        except TimeoutError:
            if visitor.key is None:
                self.host.say(f"refused a connection from {visitor.address}: no request within {FIRST:g} s")
        except (OSError, ValueError) as error:
            if line is None:
                self.host.say(f"refused a connection from {visitor.address} ({reason(error)})")
        except asyncio.CancelledError:
            if line is not None:
                line.writer.transport.abort()
        except Exception as error:
            self.host.say(f"a request from {visitor.address} could not be served ({type(error).__name__})")
        try:
            if line is not None:
                await line.close()
        finally:
            self.room.leave(visitor)

    async def converse(self, visitor: Visitor, line: "Line", request: Request | None) -> None:
        while request is not None:
            key = self.host.admit(request)
            if isinstance(key, Answer):
                await line.answer(key, close=True)
                return
            if visitor.key not in (None, key):
                return  # a connection is one device's
            self.room.know(visitor, key)
            body = await line.body(request.size or 0)
            answer = await self.host.serve(key, request, body, line.gone)
            if answer is None or not await line.answer(answer):
                return
            request = await line.request(IDLE)


async def connect(address: str, plain: socket.socket, tls: ssl.SSLContext | None) -> "Line":
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=CHUNK)
    protocol = asyncio.StreamReaderProtocol(reader)
    if tls is None:
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, plain)
    else:
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, plain, ssl=tls, ssl_handshake_timeout=FIRST, ssl_shutdown_timeout=PAUSE
        )
    return Line(address, reader, asyncio.StreamWriter(transport, protocol, reader, loop))


class Line:
    """HTTP/1.1 over a connection, read by h11."""

    def __init__(self, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.address, self.reader, self.writer = address, reader, writer
        self.http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEADER)

    def gone(self) -> bool:
        return self.reader.at_eof() or self.writer.transport.is_closing()

    async def request(self, retry: float) -> Request | None:
        """The next request's header, which has to begin within `patience` seconds; None when there is none."""
        clock = asyncio.get_running_loop().time
        async with asyncio.timeout(retry) as limit:
            while (event := self.http.next_event()) is h11.NEED_DATA:
                self.http.receive_data(await self.reader.read(CHUNK))
                limit.reschedule(min(limit.when() or 0.0, clock() + FIRST))
        if not isinstance(event, h11.Request):
            return None
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
        length = headers.get("content-length", "")
        size = int(length) if length.isascii() and length.isdigit() and len(length) < 16 else None
        return Request(self.address, event.method.decode("latin-1"), event.target.decode("latin-1"), headers, size)

    async def body(self, size: int) -> bytes:
        parts: list[bytes] = []
        async with asyncio.timeout(GRACE + size / SLOWEST):
            while not isinstance(event := self.http.next_event(), h11.EndOfMessage):
                if isinstance(event, h11.Data):
                    parts.append(bytes(event.data))
                else:
                    self.http.receive_data(await self.reader.read(CHUNK))
        return b"".join(parts)

    async def answer(self, answer: Answer, close: bool = False) -> bool:
        """Send an answer, and say whether the connection can go on."""
        headers = [("content-length", str(len(answer.content)))]
        headers += [("content-type", answer.kind)] * bool(answer.kind) + [("connection", "close")] * close
        events = (
            h11.Response(status_code=answer.status, headers=headers),
            h11.Data(answer.content),
            h11.EndOfMessage(),
        )
        async with asyncio.timeout(GRACE + len(answer.content) / SLOWEST):
            for event in events:
                self.writer.write(self.http.send(event) or b"")
            await self.writer.drain()
        if (self.http.our_state, self.http.their_state) != (h11.DONE, h11.DONE):
            return False
        self.http.start_next_cycle()
        return True

    def refuse(self, status: int) -> None:
        """Tell one whose words are not HTTP, if it can still be told."""
        if self.http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.writer.write(f"HTTP/1.1 {status} \r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())

    async def close(self) -> None:
        """Hang up; one who does not hang up too is not waited for."""
        self.writer.close()
        try:
            async with asyncio.timeout(2 * PAUSE):
                await self.writer.wait_closed()
        except (OSError, TimeoutError):
            self.writer.transport.abort()


def network(address: str) -> str:
    """What an address counts for: an IPv6 subscriber has 2^64 of them."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))
    return str(found)


def reason(error: Exception) -> str:
    """Why a handshake failed, in the words that tell a plain connection from a distrusted certificate."""
    text = str(getattr(error, "reason", None) or error).replace("_", " ").lower()
    if "unknown ca" in text or "certificate" in text:
        return f"it does not trust our certificate: {text}"
    if "http request" in text or "wrong version" in text:
        return "it does not speak TLS"
    return text or "it hung up"
