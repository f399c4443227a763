"""Messages that nobody fetches, that cannot be decoded, and that are not safe for a terminal."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

import fedcluster
from fedcluster.flower._compat import (
    Node,
    NodeInfo,
    PullMessagesRequest,
    PullMessagesResponse,
    PullObjectRequest,
    PullObjectResponse,
    PushMessagesRequest,
    PushMessagesResponse,
    TaskIdentity,
    generate_key_pairs,
    get_object_tree,
    message_from_proto,
    message_to_proto,
    set_message_id,
)
from fedcluster.flower.device import Identity
from fedcluster.flower.executor import NodeDirectory
from fedcluster.flower.messages import pack
from fedcluster.flower.node import FleetConnection, connect, serve
from fedcluster.flower.proxy import Proxy
from fedcluster.flower.registry import Registry
from fedcluster.flower.superlink import SuperLink
from fedcluster.flower.transport import NO_ANSWER, Transport


def test_a_message_that_nobody_fetches_does_not_stay_at_the_superlink(tmp_path: Path) -> None:
    """Nor does a reply that is announced and not sent."""
    superlink = SuperLink(None, None, tmp_path / "superlink.log")
    with superlink.running(), superlink.run() as grid:
        transport = Transport(grid, max_bytes=2**20)

        def found(id: str) -> bool:
            request = PullObjectRequest(node=grid.node, run_id=grid.run.run_id, object_id=id)
            return bool(transport.client.PullObject(request).object_found)

        with connect(superlink.address, None, generate_key_pairs(), registered=False) as connection:
            message = Message(pack({"round": 1, "note": "x" * 1000}), connection.node.node_id, "train", ttl=60)
            exchange = transport.exchange({7: message}, seconds=1)
            sent, announced = "", ""
            original = transport.collect

            def collect() -> Any:
                nonlocal sent, announced
                if not sent:
                    (sent,) = transport.sent
                    assert found(sent)
                    asked = connection.client.PullMessages(PullMessagesRequest(node=connection.node)).messages_list[0]
                    announced = announce(connection, asked)
                yield from original()

            transport.collect = collect  # type: ignore[method-assign]
            assert list(exchange) == [(7, NO_ANSWER)]
            assert not found(sent)
            assert not found(announced)


def announce(connection: FleetConnection, asked: Any) -> str:
    """Announce a reply and send none of it."""
    reply = Message(pack({"round": 1}), reply_to=message_from_proto(asked))
    set_message_id(reply, reply.object_id)
    connection.client.PushMessages(
        PushMessagesRequest(
            node=connection.node, messages_list=[message_to_proto(reply)], message_object_trees=[get_object_tree(reply)]
        )
    )
    return reply.object_id


class Garbage:
    """A server that sends one message, which cannot be decoded."""

    def __init__(self) -> None:
        message = Message(pack({"round": 1}), 5, "train")
        message.metadata.__dict__["_run_id"] = 3
        set_message_id(message, message.object_id)
        self.message, self.replies = message, list[Any]()

    def PullMessages(self, request: Any) -> PullMessagesResponse:
        if self.replies:
            raise KeyboardInterrupt
        return PullMessagesResponse(
            messages_list=[message_to_proto(self.message)], message_object_trees=[get_object_tree(self.message)]
        )

    def PullObject(self, request: Any) -> PullObjectResponse:
        return PullObjectResponse(object_found=True, object_available=True, object_content=b"\x00garbage")

    def ConfirmMessageReceived(self, request: Any) -> None: ...

    def PushMessages(self, request: Any) -> PushMessagesResponse:
        self.replies += request.messages_list
        return PushMessagesResponse()


def test_a_device_reports_a_message_that_it_cannot_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_run_id", "_task_id", "_node_id"):  # as where Flower makes a message
        monkeypatch.setattr(TaskIdentity, name, 1)
    garbage, said = Garbage(), list[str]()
    connection = FleetConnection(garbage, Node(node_id=5))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        serve(connection, ClientApp(), Identity("3", "x.npz"), RecordDict(), said.append)
    assert said[0].startswith("device 3 cannot do what the server asks: a message that cannot be decoded")
    (reply,) = garbage.replies
    assert "cannot be decoded" in reply.error.reason
    assert reply.metadata.reply_to_message_id == garbage.message.object_id


RUDE = "\x1b[2J\x1b]0;owned\x07\n" + "x" * 2000


def test_what_clients_send_is_printed_safely() -> None:
    said: list[str] = []
    grid: Any = SimpleNamespace(push_messages=list)
    directory = NodeDirectory(grid, Registry(fedcluster.Experiment()), None, said.append)
    registration = {"device": "1", "samples": 1, "shape": [1], "outputs": 1, RUDE: 1}
    node = NodeInfo(node_id=1)
    why = directory.identify(node, ({"registration": json.dumps(registration), "version": RUDE}, {}))
    assert why is not None
    directory.refuse(node, why)
    with Proxy(("127.0.0.1", 0), ("127.0.0.1", 1), None, None, said.append) as proxy:
        proxy.log(RUDE)
    assert [len(text) < 320 and text.isprintable() for text in said] == [True, True]
