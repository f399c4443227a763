"""The gate's listener, in this process and with short deadlines: who gets a connection, for how long, for how much."""

import asyncio
import errno
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message, Metadata
from flwr.proto.node_pb2 import Node

from fedcluster.flower import listener, proxy
from fedcluster.flower.listener import ADDRESS, DEVICE, Answer, Listener, Request, Room, Visitor

LETTER = b"POST /known HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nbody"


class Echo:
    """Lets in whoever asks for /known, and gives back what it sends."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def admit(self, request: Request) -> bytes | Answer:
        return b"key" if request.path == "/known" else Answer(403)

    async def serve(self, key: bytes, request: Request, body: bytes, gone: Callable[[], bool]) -> Answer:
        return Answer(200, body)

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def port(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(listener, "FIRST", 0.5)
    monkeypatch.setattr(listener, "GRACE", 0.3)
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
    """All that comes until the other side hangs up."""
    parts = []
    try:
        while part := line.recv(2**16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def is_served(line: socket.socket) -> bool:
    line.sendall(LETTER)
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
    monkeypatch.setattr(listener, "SLOWEST", 10**9)
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
        line.sendall(b"POST /known HTTP/1.1\r\nhost: x\r\nlarge: " + b"x" * 2 * listener.HEADER)
        assert rest(line).startswith(b"HTTP/1.1 431")
    with call(port) as line:
        line.sendall(b"\x1b[2J\x00\xff\r\n\r\n")
        assert rest(line).startswith(b"HTTP/1.1 400")
    with call(port) as line:
        line.sendall(b"GET /elsewhere HTTP/1.1\r\nhost: x\r\n\r\n")
        assert rest(line).startswith(b"HTTP/1.1 403")
    with call(port) as line:  # two lengths, by which a second request could be hidden in the first
        line.sendall(LETTER.replace(b"host: x", b"host: x\r\ncontent-length: 3"))
        assert rest(line).startswith(b"HTTP/1.1 400")
    assert len(echo.said) == 3


def test_a_crowd_does_not_keep_a_device_out(port: int) -> None:
    crowd = [call(port) for _ in range(3 * ADDRESS)]
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

    monkeypatch.setattr(listener, "PAUSE", 0.01)
    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_accept", exhausted)
    call(port).close()  # what was being waited for when the trouble began
    assert refused.wait(60)
    with call(port) as line:
        assert is_served(line)
    assert "Too many open files" in echo.said[0]


def visitors(room: Room, closed: list[Visitor], addresses: list[str]) -> list[Visitor]:
    found = []
    for address in addresses:
        visitor = Visitor(address, listener.network(address))
        visitor.close = lambda visitor=visitor: closed.append(visitor)  # type: ignore[misc]
        assert room.enter(visitor)
        found.append(visitor)
    return found


def test_who_has_to_leave() -> None:
    closed: list[Visitor] = []
    room = Room(most=400, devices=2)  # 200 strangers
    one = visitors(room, closed, ["192.0.2.1"] * (ADDRESS + 1))
    assert closed == [one[0]]  # of the same address, who has waited longest
    room.know(one[1], b"a")
    others = visitors(room, closed, [f"198.51.100.{k}" for k in range(137)])
    assert (len(closed), len(room.strangers), room.size) == (1, 200, 201)
    visitors(room, closed, ["203.0.113.1"])
    assert closed[1:] == [one[2]]  # of the address that has most; never one who is known
    same = visitors(room, closed, ["203.0.113.2"] * DEVICE)
    for visitor in same:
        room.know(visitor, b"a")
    assert closed[-1] is one[1]  # of the same device, the oldest
    for visitor in (*one, *others, *same):
        room.leave(visitor)
        room.leave(visitor)
    assert (room.size, len(room.strangers), room.known) == (1, 1, {})


def test_no_more_known_callers_than_there_are_descriptors() -> None:
    room = Room(most=4, devices=2)
    for number in range(4):
        (visitor,) = visitors(room, [], ["192.0.2.1"])
        room.know(visitor, bytes([number]))
    assert not room.enter(Visitor("192.0.2.1", "192.0.2.1"))


def test_an_ipv6_subscriber_is_one_address() -> None:
    assert listener.network("2001:db8:1:2::3") == listener.network("2001:db8:1:2:ffff::4%eth0")
    assert listener.network("2001:db8:1:2::3") != listener.network("2001:db8:1:3::3")
    assert listener.network("::ffff:192.0.2.1") == listener.network("192.0.2.1")


def test_a_node_answers_in_its_own_name() -> None:
    own = Message(metadata=Metadata(src_node_id=7))
    assert not proxy.forged(PushMessagesRequest(node=Node(node_id=7), messages_list=[own]))
    assert proxy.forged(PushMessagesRequest(node=Node(node_id=8), messages_list=[own]))
    assert proxy.forged(PushMessagesRequest(messages_list=[own]))
