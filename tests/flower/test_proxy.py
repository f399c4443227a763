"""The proxy and its listener in this process, with short time limits: who is let in, for how long, and for how much."""

import asyncio
import errno
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fedcluster.flower import listener
from fedcluster.flower._compat import Node, PullMessagesRequest, PushMessagesRequest
from fedcluster.flower.listener import (
    MAX_PER_ADDRESS,
    MAX_PER_DEVICE,
    Client,
    ConnectionLimits,
    Listener,
    Request,
    Response,
)
from fedcluster.flower.proxy import FLEET, PULL, PUSH, Proxy

REQUEST = b"POST /known HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nbody"


class Echo:
    """Authorizes requests for /known, and returns their bodies."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def authorize(self, request: Request) -> bytes | Response:
        return b"key" if request.path == "/known" else Response(403)

    async def handle(self, key: bytes, request: Request, body: bytes, disconnected: Callable[[], bool]) -> Response:
        return Response(200, body)

    def log(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def port(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(listener, "HEADER_SECONDS", 0.5)
    monkeypatch.setattr(listener, "BODY_SECONDS", 0.3)
    over, loop = asyncio.Event(), asyncio.new_event_loop()
    door = Listener(("127.0.0.1", 0), None, echo, descriptors=1000, devices=2)
    thread = threading.Thread(target=lambda: loop.run_until_complete(door.run(over.wait())))
    thread.start()
    yield door.port
    loop.call_soon_threadsafe(over.set)
    thread.join()
    loop.close()
    door.socket.close()


def call(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def rest(line: socket.socket) -> bytes:
    """Everything received until the other side hangs up."""
    parts = []
    try:
        while part := line.recv(2**16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def is_served(line: socket.socket) -> bool:
    line.sendall(REQUEST)
    answer = b""
    while part := line.recv(1000):
        answer += part
        if answer.endswith(b"body"):
            return answer.startswith(b"HTTP/1.1 200")
    return False


def test_a_known_caller_is_answered_again_and_again(port: int) -> None:
    with call(port) as line:
        assert all(is_served(line) for _ in range(3))


@pytest.mark.parametrize(
    ("begun", "then"),
    [
        (b"", b""),  # says nothing at all
        (b"", b"x"),  # one letter after the other, for ever
        (b"POST /known HTTP/1.1\r\n", b"a: b\r\n"),  # header after header
        (b"POST /known HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n", b"x"),  # a body without end
    ],
)
def test_who_takes_too_long_is_cut_off(port: int, monkeypatch: pytest.MonkeyPatch, begun: bytes, then: bytes) -> None:
    monkeypatch.setattr(listener, "MIN_BYTES_PER_SECOND", 10**9)
    with call(port) as line:
        line.sendall(begun)
        line.settimeout(0.1)
        for _ in range(600):
            try:
                if then:
                    line.sendall(then)
                if not line.recv(1000):
                    return
            except TimeoutError:
                continue
            except OSError:
                return
    pytest.fail("it was never cut off")


def test_headers_are_small_and_garbage_is_not_http(port: int, echo: Echo) -> None:
    with call(port) as line:
        line.sendall(b"POST /known HTTP/1.1\r\nhost: x\r\nlarge: " + b"x" * 2 * listener.MAX_HEADER)
        assert rest(line).startswith(b"HTTP/1.1 431")
    with call(port) as line:
        line.sendall(b"\x1b[2J\x00\xff\r\n\r\n")
        assert rest(line).startswith(b"HTTP/1.1 400")
    with call(port) as line:
        line.sendall(b"GET /elsewhere HTTP/1.1\r\nhost: x\r\n\r\n")
        assert rest(line).startswith(b"HTTP/1.1 403")
    with call(port) as line:  # two lengths, by which a second request could be hidden in the first
        line.sendall(REQUEST.replace(b"host: x", b"host: x\r\ncontent-length: 3"))
        assert rest(line).startswith(b"HTTP/1.1 400")
    assert len(echo.lines) == 3


def test_a_crowd_does_not_keep_a_device_out(port: int) -> None:
    crowd = [call(port) for _ in range(3 * MAX_PER_ADDRESS)]
    with call(port) as line:
        assert is_served(line)
        for one in crowd:  # each in its turn, the first of them at once
            assert rest(one) == b""
            one.close()
        assert is_served(line)


def test_no_descriptor_left_is_not_the_end(port: int, echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    true, refused = asyncio.SelectorEventLoop.sock_accept, threading.Event()

    async def exhausted(loop: Any, door: socket.socket) -> Any:
        if not refused.is_set():
            refused.set()
            raise OSError(errno.EMFILE, "Too many open files")
        return await true(loop, door)

    monkeypatch.setattr(listener, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_accept", exhausted)
    call(port).close()  # what was being waited for when the trouble began
    assert refused.wait(60)
    with call(port) as line:
        assert is_served(line)
    assert "Too many open files" in echo.lines[0]


def connect(limits: ConnectionLimits, closed: list[Client], addresses: list[str]) -> list[Client]:
    clients = []
    for address in addresses:
        client = Client(address, listener.network_of(address))
        client.close = lambda client=client: closed.append(client)  # type: ignore[misc]
        assert limits.add(client)
        clients.append(client)
    return clients


def test_which_connection_is_closed_for_another() -> None:
    closed: list[Client] = []
    limits = ConnectionLimits(max_connections=400, devices=2)  # 200 of them unauthenticated
    one = connect(limits, closed, ["192.0.2.1"] * (MAX_PER_ADDRESS + 1))
    assert closed == [one[0]]  # the oldest of that address
    limits.authenticate(one[1], b"a")
    others = connect(limits, closed, [f"198.51.100.{k}" for k in range(137)])
    assert (len(closed), len(limits.unauthenticated), limits.size) == (1, 200, 201)
    connect(limits, closed, ["203.0.113.1"])
    assert closed[1:] == [one[2]]  # of the address that has most; never an authenticated one
    same = connect(limits, closed, ["203.0.113.2"] * MAX_PER_DEVICE)
    for client in same:
        limits.authenticate(client, b"a")
    assert closed[-1] is one[1]  # the oldest of that device
    for client in (*one, *others, *same):
        limits.remove(client)
        limits.remove(client)
    assert (limits.size, len(limits.unauthenticated), limits.authenticated) == (1, 1, {})


def test_no_more_connections_than_descriptors() -> None:
    limits = ConnectionLimits(max_connections=4, devices=2)
    for number in range(4):
        (client,) = connect(limits, [], ["192.0.2.1"])
        limits.authenticate(client, bytes([number]))
    assert not limits.add(Client("192.0.2.1", "192.0.2.1"))


def test_an_ipv6_subscriber_is_one_address() -> None:
    assert listener.network_of("2001:db8:1:2::3") == listener.network_of("2001:db8:1:2:ffff::4%eth0")
    assert listener.network_of("2001:db8:1:2::3") != listener.network_of("2001:db8:1:3::3")
    assert listener.network_of("::ffff:192.0.2.1") == listener.network_of("192.0.2.1")


@pytest.fixture
def door() -> Iterator[Proxy]:
    proxy = Proxy(("127.0.0.1", 0), ("127.0.0.1", 1), None, None, print)
    proxy.nodes = {b"key": 7}
    yield proxy
    proxy.loop.close()
    proxy.listener.socket.close()


def test_a_node_speaks_only_for_itself(door: Proxy) -> None:
    """It neither sends messages in another's name nor takes another's messages, before it is activated least of all."""

    def pushed(node: int, *senders: int) -> bytes:
        request = PushMessagesRequest(node=Node(node_id=node))
        for sender in senders:
            request.messages_list.add().metadata.src_node_id = sender
        return bytes(request.SerializeToString())

    for path, body, forged in (
        (PUSH, pushed(7, 7), False),
        (PUSH, pushed(7, 7, 8), True),
        (PUSH, pushed(8, 8), True),
        (PUSH, pushed(0, 7), True),
        (PULL, PullMessagesRequest(node=Node(node_id=7)).SerializeToString(), False),
        (PULL, PullMessagesRequest(node=Node(node_id=8)).SerializeToString(), True),
        (FLEET + "push-object", b"", False),
    ):
        assert door.is_forged(b"key", path, body) == forged
    assert door.is_forged(b"another key", PULL, PullMessagesRequest(node=Node(node_id=7)).SerializeToString())
