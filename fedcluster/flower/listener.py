"""The listener: accepts connections, reads HTTP, and limits how much of either a client gets.

Every connection is a coroutine, so an idle one costs little, and every step of it has a time limit: the TLS handshake
and the first request header together, each later header, each body, each response. A connection is unauthenticated
until its first request has been authorized. Unauthenticated connections are limited by address and in total; when there
are too many, the oldest is closed, because an honest device authenticates within milliseconds.

The HTTP itself is parsed by h11. uvicorn uses h11 too, but has no place for these limits: it sees a connection only
after the TLS handshake (which may take 60 s), and has no limit by address, on the time of a first header, a body or a
response.
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

HEADER_SECONDS = 10.0  # from connecting to the end of the first header; of a later header, from its first byte
IDLE_SECONDS = 120.0  # between two requests
BODY_SECONDS = 30.0  # for a body or a response, and more for a large one:
MIN_BYTES_PER_SECOND = 2**14
MAX_HEADER = 2**13  # bytes of a request header; a Flower node needs about 1,000
READ_BYTES = 2**16
TLS_BUFFER = 2**15  # bytes per connection
MAX_UNAUTHENTICATED = 512  # connections
MAX_PER_ADDRESS = 64  # of them from one address, or two per device where that is more
MAX_PER_DEVICE = 8  # connections of one device, which needs two
RESERVED_DESCRIPTORS = 256  # for the server's own files and its connections to the SuperLink
RETRY_SECONDS = 1.0  # before accepting again after running out of descriptors

SSLProtocol.max_size = TLS_BUFFER  # asyncio's default is 256 KB: 500 idle connections would take 140 MB instead of 30


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard limit, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(soft, 10_240) if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


@dataclass(frozen=True)
class Request:
    """A request's header. `size` is its content length, None where there is none."""

    address: str
    method: str
    path: str
    headers: dict[str, str]
    size: int | None


@dataclass(frozen=True)
class Response:
    status: int
    content: bytes = b""
    content_type: str = ""


class Handler(Protocol):
    def authorize(self, request: Request) -> bytes | Response:
        """The client's key, if the request's body may be read; otherwise the response, after which we hang up."""

    async def handle(
        self, key: bytes, request: Request, body: bytes, disconnected: Callable[[], bool]
    ) -> Response | None:
        """The response; None if the client has disconnected."""

    def log(self, text: str) -> None: ...


@dataclass(eq=False)
class Client:
    """A connection. `network` is what its address counts as; `key` is None until it is authenticated."""

    address: str
    network: str
    key: bytes | None = None
    close: Callable[[], object] = field(default=lambda: None)


class ConnectionLimits:
    """The open connections, and which of them is closed when another one arrives."""

    def __init__(self, max_connections: int, devices: int) -> None:
        self.max_connections = max_connections
        self.max_unauthenticated = min(MAX_UNAUTHENTICATED, max_connections // 2)
        self.max_per_address = max(MAX_PER_ADDRESS, 2 * devices)
        self.unauthenticated: dict[Client, None] = {}  # the oldest first
        self.authenticated: dict[bytes, dict[Client, None]] = {}
        self.size = 0

    def add(self, client: Client) -> bool:
        """Make room for the client; False if there is none."""
        counts = Counter(one.network for one in self.unauthenticated)
        crowded: str | None = None
        if counts[client.network] >= self.max_per_address:
            crowded = client.network
        elif len(self.unauthenticated) >= self.max_unauthenticated or self.size >= self.max_connections:
            crowded = counts.most_common(1)[0][0] if counts else None
            if crowded is None:
                return False
        if crowded is not None:
            self.evict(next(one for one in self.unauthenticated if one.network == crowded))
        self.unauthenticated[client] = None
        self.size += 1
        return True

    def authenticate(self, client: Client, key: bytes) -> None:
        """The client has proved who it is. A device that reconnects evicts the oldest of its connections."""
        if client in self.unauthenticated:
            del self.unauthenticated[client]
            own = self.authenticated.setdefault(key, {})
            if len(own) >= MAX_PER_DEVICE:
                self.evict(next(iter(own)))
            self.authenticated.setdefault(key, {})[client] = None
            client.key = key

    def evict(self, client: Client) -> None:
        self.remove(client)
        client.close()

    def remove(self, client: Client) -> None:
        own = self.unauthenticated if client.key is None else self.authenticated.get(client.key, {})
        if client in own:
            del own[client]
            self.size -= 1
            if client.key is not None and not own:
                del self.authenticated[client.key]


class Listener:
    """Listens on `address`, and passes requests to `handler`. `descriptors` is how many files this process may open,
    `devices` how many devices are known."""

    def __init__(
        self, address: tuple[str, int], tls: ssl.SSLContext | None, handler: Handler, descriptors: int, devices: int
    ) -> None:
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        self.socket = socket.create_server(address, family=family, backlog=512)
        self.socket.setblocking(False)
        self.tls, self.handler = tls, handler
        self.limits = ConnectionLimits(descriptors - min(RESERVED_DESCRIPTORS, descriptors // 2), devices)
        self.tasks: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        return int(self.socket.getsockname()[1])

    async def run(self, stopped: Awaitable[object]) -> None:
        """Serve until stopped."""
        accepting = asyncio.create_task(self.accept())
        try:
            await stopped
        finally:
            for task in (accepting, *self.tasks):
                task.cancel()
            await asyncio.gather(accepting, *self.tasks, return_exceptions=True)

    async def accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                plain, peer = await loop.sock_accept(self.socket)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self.handler.log(f"no connection can be accepted ({error.strerror}): trying again")
                    await asyncio.sleep(RETRY_SECONDS)
                continue
            client = Client(str(peer[0]), network_of(str(peer[0])))
            if not self.limits.add(client):
                plain.close()
                self.handler.log(f"refused a connection from {client.address}: all {self.limits.size:,} are in use")
                continue
            task = loop.create_task(self.serve(client, plain))
            client.close = task.cancel
            self.tasks.add(task)
            task.add_done_callback(partial(self.done, plain))

    def done(self, plain: socket.socket, task: "asyncio.Task[None]") -> None:
        """Also called for a task that was cancelled before it started."""
        plain.close()
        self.tasks.discard(task)

    async def serve(self, client: Client, plain: socket.socket) -> None:
        """One connection, from the handshake to its end. Nothing that a client does raises."""
        connection: HttpConnection | None = None
        try:
            async with asyncio.timeout(HEADER_SECONDS):
                connection = await handshake(client.address, plain, self.tls)
                request = await connection.read_request(HEADER_SECONDS)
            await self.serve_requests(client, connection, request)
        except h11.RemoteProtocolError as error:
            if connection is not None and not connection.disconnected():
                self.handler.log(f"refused {client.address}: not a valid request ({error})")
                connection.refuse(error.error_status_hint)
        except TimeoutError:
            if client.key is None:
                self.handler.log(f"refused a connection from {client.address}: no request within {HEADER_SECONDS:g} s")
        except (OSError, ValueError) as error:
            if connection is None:
                self.handler.log(f"refused a connection from {client.address} ({handshake_error(error)})")
        except asyncio.CancelledError:
            if connection is not None:
                connection.writer.transport.abort()
        except Exception as error:
            self.handler.log(f"a request from {client.address} could not be served ({type(error).__name__})")
        try:
            if connection is not None:
                await connection.close()
        finally:
            self.limits.remove(client)

    async def serve_requests(self, client: Client, connection: "HttpConnection", request: Request | None) -> None:
        while request is not None:
            key = self.handler.authorize(request)
            if isinstance(key, Response):
                await connection.send(key, close=True)
                return
            if client.key not in (None, key):
                return  # a connection belongs to one device
            self.limits.authenticate(client, key)
            body = await connection.read_body(request.size or 0)
            response = await self.handler.handle(key, request, body, connection.disconnected)
            if response is None or not await connection.send(response):
                return
            request = await connection.read_request(IDLE_SECONDS)


async def handshake(address: str, plain: socket.socket, tls: ssl.SSLContext | None) -> "HttpConnection":
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=READ_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    if tls is None:
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, plain)
    else:
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, plain, ssl=tls, ssl_handshake_timeout=HEADER_SECONDS, ssl_shutdown_timeout=RETRY_SECONDS
        )
    return HttpConnection(address, reader, asyncio.StreamWriter(transport, protocol, reader, loop))


class HttpConnection:
    """HTTP/1.1 over a stream, parsed by h11."""

    def __init__(self, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.address, self.reader, self.writer = address, reader, writer
        self.http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER)

    def disconnected(self) -> bool:
        return self.reader.at_eof() or self.writer.transport.is_closing()

    async def read_request(self, seconds: float) -> Request | None:
        """The next request header, which must begin within `seconds`; None if the client has disconnected."""
        clock = asyncio.get_running_loop().time
        async with asyncio.timeout(seconds) as limit:
            while (event := self.http.next_event()) is h11.NEED_DATA:
                self.http.receive_data(await self.reader.read(READ_BYTES))
                limit.reschedule(min(limit.when() or 0.0, clock() + HEADER_SECONDS))
        if not isinstance(event, h11.Request):
            return None
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
        length = headers.get("content-length", "")
        size = int(length) if length.isascii() and length.isdigit() and len(length) < 16 else None
        return Request(self.address, event.method.decode("latin-1"), event.target.decode("latin-1"), headers, size)

    async def read_body(self, size: int) -> bytes:
        parts: list[bytes] = []
        async with asyncio.timeout(BODY_SECONDS + size / MIN_BYTES_PER_SECOND):
            while not isinstance(event := self.http.next_event(), h11.EndOfMessage):
                if isinstance(event, h11.Data):
                    parts.append(bytes(event.data))
                else:
                    self.http.receive_data(await self.reader.read(READ_BYTES))
        return b"".join(parts)

    async def send(self, response: Response, close: bool = False) -> bool:
        """Send a response; True if the connection can carry another request."""
        headers = [("content-length", str(len(response.content)))]
        headers += [("content-type", response.content_type)] * bool(response.content_type)
        headers += [("connection", "close")] * close
        events = (
            h11.Response(status_code=response.status, headers=headers),
            h11.Data(response.content),
            h11.EndOfMessage(),
        )
        async with asyncio.timeout(BODY_SECONDS + len(response.content) / MIN_BYTES_PER_SECOND):
            for event in events:
                self.writer.write(self.http.send(event) or b"")
            await self.writer.drain()
        if (self.http.our_state, self.http.their_state) != (h11.DONE, h11.DONE):
            return False
        self.http.start_next_cycle()
        return True

    def refuse(self, status: int) -> None:
        """Answer what is not HTTP, while an answer is still possible."""
        if self.http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.writer.write(f"HTTP/1.1 {status} \r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())

    async def close(self) -> None:
        """Hang up, without waiting for a client that does not."""
        self.writer.close()
        try:
            async with asyncio.timeout(2 * RETRY_SECONDS):
                await self.writer.wait_closed()
        except (OSError, TimeoutError):
            self.writer.transport.abort()


def network_of(address: str) -> str:
    """What an address counts as: an IPv6 subscriber has 2^64 of them."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))
    return str(found)


def handshake_error(error: Exception) -> str:
    """Why a handshake failed; it tells a connection without TLS from a distrusted certificate."""
    text = str(getattr(error, "reason", None) or error).replace("_", " ").lower()
    if "unknown ca" in text or "certificate" in text:
        return f"it does not trust our certificate: {text}"
    if "http request" in text or "wrong version" in text:
        return "it does not speak TLS"
    return text or "it hung up"
