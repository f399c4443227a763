"""The mailbox of the proxy: messages that do not pass through the SuperLink."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from flwr.app import Error, Message

from fedcluster.flower import mailbox
from fedcluster.flower._compat import (
    Node,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    TaskIdentity,
    message_from_proto,
    message_to_proto,
)
from fedcluster.flower.listener import Request, Response
from fedcluster.flower.mailbox import HEADER, exchange
from fedcluster.flower.messages import InvalidMessage, pack, unpack
from fedcluster.flower.proxy import PULL, PUSH, Proxy
from fedcluster.flower.transport import NO_ANSWER, WENT_OFFLINE

NODES = {b"one": 7, b"two": 8}


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy whose SuperLink does not exist: what it forwards gets status 502."""
    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    found = Proxy(("127.0.0.1", 0), ("127.0.0.1", 1), None, None, print)
    found.nodes = dict(NODES)
    with found:
        yield found


class Online:
    """The devices that are online."""

    def __init__(self, *nodes: int) -> None:
        self.devices = dict.fromkeys(nodes, "device")

    def update(self) -> None:
        pass


def call(proxy: Proxy, key: bytes, path: str, body: Any, **headers: str) -> Response:
    content = body.SerializeToString()
    request = Request("127.0.0.1", "POST", path, {"accept": "application/protobuf"} | headers, len(content))
    found = asyncio.run_coroutine_threadsafe(proxy.handle(key, request, content, lambda: False), proxy.loop).result(60)
    assert found is not None
    return found


def pull(proxy: Proxy, key: bytes) -> Any:
    response = call(proxy, key, PULL, PullMessagesRequest(node=Node(node_id=NODES[key])), **{HEADER: "1"})
    assert response.status == 200
    return message_from_proto(PullMessagesResponse.FromString(response.content).messages_list[0])


def push(proxy: Proxy, key: bytes, reply: Message) -> int:
    sent = message_to_proto(reply)
    sent.metadata.src_node_id = NODES[key]
    request = PushMessagesRequest(node=Node(node_id=NODES[key]), messages_list=[sent])
    return call(proxy, key, PUSH, request).status


def start(proxy: Proxy, online: Online, seconds: float = 60) -> tuple[dict[int, Any], threading.Thread]:
    messages = {number: Message(pack({"number": number}), node, "query") for number, node in enumerate(NODES.values())}
    found: dict[int, Any] = {}
    thread = threading.Thread(target=lambda: found.update(exchange(proxy, online, messages, seconds)))  # type: ignore[arg-type]
    thread.start()
    return found, thread


def test_a_message_takes_two_requests(proxy: Proxy) -> None:
    found, thread = start(proxy, Online(7, 8))
    for key in NODES:
        asked = pull(proxy, key)
        again = pull(proxy, key)  # as where the first response was lost
        assert unpack(again.content)[0] == unpack(asked.content)[0]
        reply = Message(pack({"answer": unpack(asked.content)[0]["number"]}), reply_to=asked)
        other = next(name for name in NODES if name != key)
        assert push(proxy, other, reply) == 200  # which is forgotten: it is not that node's message
        assert push(proxy, key, reply) == 200
        assert push(proxy, key, reply) == 200  # and so is a second answer
    thread.join(60)
    assert [unpack(found[number].content)[0]["answer"] for number in (0, 1)] == [0, 1]
    assert proxy.mailbox.nodes == {7, 8}
    assert not proxy.mailbox.waiting


def test_who_does_not_answer_is_missing(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "ONLINE_SECONDS", 0.1)
    online = Online(7, 8)
    found, thread = start(proxy, online, seconds=5)
    late = pull(proxy, b"two")
    del online.devices[7]
    thread.join(60)
    assert found == {0: WENT_OFFLINE, 1: NO_ANSWER}
    assert push(proxy, b"two", Message(pack({}), reply_to=late)) == 200
    assert not list(proxy.mailbox.waiting)


def test_what_cannot_be_decoded_is_refused_and_errors_are_told(proxy: Proxy) -> None:
    found, thread = start(proxy, Online(7, 8))
    asked = pull(proxy, b"one")
    wrong = message_to_proto(Message(pack({}), reply_to=asked))
    wrong.content.ClearField("items")
    wrong.content.items.add().key = "x"
    wrong.metadata.src_node_id = 7
    call(proxy, b"one", PUSH, PushMessagesRequest(node=Node(node_id=7), messages_list=[wrong]))
    push(proxy, b"two", Message(Error(0, "no"), reply_to=pull(proxy, b"two")))
    thread.join(60)
    assert isinstance(found[0], InvalidMessage)
    assert found[1] == "it says: no"


def test_a_node_that_does_not_take_them_is_not_counted(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's own supernode: the exchange goes through the SuperLink then."""
    proxy.with_messages = {7}
    proxy.mailbox.nodes = {7, 8}
    assert call(proxy, b"one", PULL, PullMessagesRequest(node=Node(node_id=7))).status == 502
    assert proxy.mailbox.nodes == {8}
