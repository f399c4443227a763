"""Messages that nobody fetches, that cannot be read, and that are not fit for a terminal."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse, PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
from flwr.proto.node_pb2 import Node, NodeInfo
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.primitives.asymmetric import generate_key_pairs

import fedcluster
from fedcluster.flower.device import Identity
from fedcluster.flower.executor import NodeDirectory
from fedcluster.flower.messages import pack
from fedcluster.flower.node import Line, connected, serve
from fedcluster.flower.proxy import Proxy
from fedcluster.flower.registry import Registry
from fedcluster.flower.superlink import SuperLink
from fedcluster.flower.transport import LATE, Transport


def test_a_message_that_nobody_fetches_does_not_stay_at_the_superlink(tmp_path: Path) -> None:
    """Nor does an answer that is announced and not sent."""
    superlink = SuperLink(None, None, tmp_path / "superlink.log")
    with superlink.running(), superlink.run() as grid:
        post = Transport(grid, most=2**20)

        def found(id: str) -> bool:
            request = PullObjectRequest(node=grid.node, run_id=grid.run.run_id, object_id=id)
            return bool(post.client.PullObject(request).object_found)

        with connected(superlink.address, None, generate_key_pairs(), known=False) as line:
            message = Message(pack({"round": 1, "note": "x" * 1000}), line.node.node_id, "train", ttl=60)
            exchange = post.exchange({7: message}, seconds=1)
            sent, announced = "", ""
            original = post.collect

            def collect() -> Any:
                nonlocal sent, announced
                if not sent:
                    (sent,) = post.waiting
                    assert found(sent)
                    asked = line.client.PullMessages(PullMessagesRequest(node=line.node)).messages_list[0]
                    announced = announce(line, asked)
                yield from original()

            post.collect = collect  # type: ignore[method-assign]
            assert list(exchange) == [(7, LATE)]
            assert not found(sent)
            assert not found(announced)


def announce(line: Line, asked: Any) -> str:
    """Begin to answer: the SuperLink is told what will come, and nothing comes."""
    reply = Message(pack({"round": 1}), reply_to=message_from_proto(asked))
    reply.metadata.__dict__["_message_id"] = reply.object_id
    line.client.PushMessages(
        PushMessagesRequest(
            node=line.node, messages_list=[message_to_proto(reply)], message_object_trees=[get_object_tree(reply)]
        )
    )
    return reply.object_id


class Garbage:
    """A server that sends one message, of which nothing can be read."""

    def __init__(self) -> None:
        message = Message(pack({"round": 1}), 5, "train")
        message.metadata.__dict__["_run_id"] = 3
        message.metadata.__dict__["_message_id"] = message.object_id
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


def test_a_device_says_what_it_cannot_read_and_goes_on() -> None:
    garbage, said = Garbage(), list[str]()
    line = Line(garbage, Node(node_id=5))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        serve(line, ClientApp(), Identity("3", "x.npz"), RecordDict(), said.append)
    assert said[0].startswith("device 3 cannot do what it is asked: a message that cannot be read")
    (reply,) = garbage.replies
    assert "cannot be read" in reply.error.reason
    assert reply.metadata.reply_to_message_id == garbage.message.object_id


RUDE = "\x1b[2J\x1b]0;owned\x07\n" + "x" * 2000


def test_what_strangers_say_is_fit_for_a_terminal() -> None:
    said: list[str] = []
    grid: Any = SimpleNamespace(push_messages=list)
    directory = NodeDirectory(grid, Registry(fedcluster.Experiment()), None, said.append)
    registration = {"device": "1", "samples": 1, "shape": [1], "classes": 1, RUDE: 1}
    node = NodeInfo(node_id=1)
    why = directory.meet(node, ({"registration": json.dumps(registration), "version": RUDE}, {}))
    assert why is not None
    directory.refuse(node, why)
    with Proxy(("127.0.0.1", 0), ("127.0.0.1", 1), None, None, said.append) as proxy:
        proxy.say(RUDE)
    assert [len(text) < 320 and text.isprintable() for text in said] == [True, True]
