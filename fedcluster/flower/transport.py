"""The post: messages out to nodes, replies in, by way of Flower's Grid, with a clock and a scale of our own.

Flower's send_and_receive looks every three seconds and reads whatever a reply turns out to be. Here we look more often;
a reply is taken piece by piece, so that one who announces more than it sends keeps nobody waiting; and it is weighed
before it is read.
"""

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Array, Message
from flwr.common.constant import ErrorCode
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_children_ids_from_object_content,
    get_object_type_from_object_content,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.superlink.grid import HttpGrid

from fedcluster.flower.messages import Facts, Unreadable, unpack
from fedcluster.state import Message as Tensors

LOOK = 0.2  # seconds between two looks for replies
ALIVE = 1.0  # seconds between two looks whether those are still on line whose replies are under way
PIECES = 8  # objects that a reply of our app may consist of: three, and room
KINDS = frozenset({"Message", "RecordDict", "ConfigRecord"})

LATE, GONE, LEFT = "no answer in time", "it is not on line", "it went off line"
WORDS = {  # of the errors with which the SuperLink answers in a node's place
    ErrorCode.NODE_UNAVAILABLE: LEFT,
    ErrorCode.MESSAGE_UNAVAILABLE: LATE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: LATE,
}
SILENT = frozenset({*WORDS.values(), LATE, GONE})

Reply = tuple[Facts, Tensors]
Found = Message | Unreadable | str
"""A reply, a reply that is not taken, or why there is none."""


@dataclass(frozen=True)
class Waiting:
    """A message without a reply: under which name it was sent, to which node, and how long we wait."""

    name: int
    node: int
    until: float


@dataclass(eq=False)
class PendingReply:
    """A reply that is on its way: what there is to fetch, and what is here. `activated` says since when its sender has
    been on line: one who comes back does not finish what it had begun to send."""

    answers: str
    top: str
    missing: list[str]
    contents: dict[str, bytes] = field(default_factory=dict)
    activated: str | None = None


class Notifier:
    """How one side learns that there is something for it. Where nobody tells, one looks every so often; the gate, which
    sees everything pass, rings."""

    def ring(self, nodes: Iterable[int]) -> None:
        """There are messages for these nodes."""

    def wait(self) -> None:
        """Until there may be a reply."""
        time.sleep(LOOK)


class Transport:
    """`most` bytes are as much as any reply may weigh, in so many pieces, of these kinds."""

    def __init__(
        self,
        grid: Grid,
        most: int,
        pieces: int = PIECES,
        kinds: frozenset[str] = KINDS,
        notifier: Notifier | None = None,
    ) -> None:
        self.grid, self.most, self.pieces, self.kinds, self.notifier = grid, most, pieces, kinds, notifier or Notifier()
        self.waiting: dict[str, Waiting] = {}  # by message
        self.parcels: list[PendingReply] = []
        self.checked = 0.0

    def exchange(self, messages: dict[int, Message], seconds: float) -> Iterator[tuple[int, Found]]:
        """Send each addressee a message and yield what comes back as it comes, until all is here or the time is up."""
        self.waiting, self.parcels = {}, []
        yield from self.send(messages, seconds)
        while self.waiting:
            yield from self.collect()
            if self.waiting:
                self.notifier.wait()

    def send(self, messages: dict[int, Message], seconds: float) -> Iterator[tuple[int, str]]:
        """Send; yields those who are gone. After so many seconds Flower forgets the messages by their own ttl."""
        ids = list(self.grid.push_messages(list(messages.values())))
        self.notifier.ring(message.metadata.dst_node_id for message in messages.values())
        until = time.monotonic() + seconds
        for number, (name, message) in enumerate(messages.items()):
            if number < len(ids) and ids[number]:
                self.waiting[ids[number]] = Waiting(name, message.metadata.dst_node_id, until)
            else:
                yield name, GONE

    def collect(self) -> Iterator[tuple[int, Found]]:
        """One look: replies that are here and whole, those that never will be, and those whose time is up."""
        for answers, reply in self.look():
            if isinstance(reply, PendingReply):
                self.parcels.append(reply)
            else:
                yield self.settle(answers), reply
        left = self.left()
        for parcel in list(self.parcels):
            found = self.fetch(parcel)
            if found is None and parcel in left:
                found = LEFT
            if found is not None:
                yield self.settle(parcel.answers), found
        for id, one in list(self.waiting.items()):
            if time.monotonic() > one.until:
                yield self.settle(id), LATE

    def settle(self, id: str) -> int:
        """A message has been answered, or never will be: whom it was for. The SuperLink keeps what was not fetched, of
        the message or of its answer, until somebody deletes it."""
        tops = [parcel.top for parcel in self.parcels if parcel.answers == id]
        self.parcels = [parcel for parcel in self.parcels if parcel.answers != id]
        self.delete(id, *tops)
        return self.waiting.pop(id).name

    def delete(self, *ids: str) -> None:
        if isinstance(self.grid, HttpGrid):
            for id in ids:
                request = ConfirmMessageReceivedRequest(
                    node=self.grid.node, run_id=self.grid.run.run_id, message_object_id=id
                )
                self.client.ConfirmMessageReceived(request)

    def left(self) -> list[PendingReply]:
        """Those whose senders have gone since they began to send: what is not here by now will never come."""
        if not self.parcels or time.monotonic() < self.checked + ALIVE:
            return []
        self.checked = time.monotonic()
        online = {node.node_id: node.last_activated_at for node in self.grid.get_nodes()}
        gone = []
        for parcel in self.parcels:
            activated = online.get(self.waiting[parcel.answers].node)
            parcel.activated = parcel.activated or activated
            if activated is None or activated != parcel.activated:
                gone.append(parcel)
        return gone

    def look(self) -> Iterator[tuple[str, PendingReply | Found]]:
        """What has come since the last look; what is being fetched already is not asked for again."""
        ids = self.waiting.keys() - {parcel.answers for parcel in self.parcels}
        if not ids:
            return
        if not isinstance(self.grid, HttpGrid):  # Flower's own simulation, where nobody is a stranger
            for message in self.grid.pull_messages(ids):
                yield message.metadata.reply_to_message_id, failure(message) or message
            return
        response = self.client.PullMessages(PullAppMessagesRequest(message_ids=ids))
        for envelope, tree in zip(response.messages_list, response.message_object_trees, strict=True):
            answers = envelope.metadata.reply_to_message_id  # an error of the SuperLink's has itself as sender
            if answers not in ids:
                continue
            pieces = [one.object_id for one in iterate_object_tree(tree)]
            if len(pieces) > self.pieces:
                self.delete(envelope.metadata.message_id)
                yield answers, Unreadable(f"a reply in {len(pieces):,} pieces")
            else:
                yield answers, PendingReply(answers, envelope.metadata.message_id, pieces)

    @property
    def client(self) -> Any:
        assert isinstance(self.grid, HttpGrid)
        return self.grid._runtime_client

    def fetch(self, parcel: PendingReply) -> Found | None:
        """Take what is there of a parcel; its content when it is whole, or why it never will be."""
        assert isinstance(self.grid, HttpGrid)
        run = self.grid.run.run_id
        for name in list(parcel.missing):
            request = PullObjectRequest(node=self.grid.node, run_id=run, object_id=name)
            response = self.client.PullObject(request)
            if not response.object_found:
                return "a reply that was never sent whole"
            if not response.object_available:
                return None
            parcel.missing.remove(name)
            parcel.contents[name] = response.object_content
            if sum(map(len, parcel.contents.values())) > self.most:
                return Unreadable(f"a reply of more than {self.most:,} bytes")
        try:
            if any(get_object_type_from_object_content(one) not in self.kinds for one in parcel.contents.values()):
                return Unreadable("a reply that is not one of ours")
            if expanded(parcel.contents) > self.most:
                return Unreadable(f"a reply that unpacks to more than {self.most:,} bytes")
            message = inflate_object_from_contents(parcel.top, parcel.contents)
        except Exception as error:  # Flower's parsers raise what they like
            return Unreadable(f"a reply that cannot be read ({type(error).__name__})")
        if not isinstance(message, Message):
            return Unreadable("a reply that is not one of ours")
        return failure(message) or message


def expanded(contents: dict[str, bytes]) -> int:
    """Bytes of Flower's arrays once they are put together: an array names its chunks, and may name one many times."""
    total = 0
    for content in contents.values():
        if get_object_type_from_object_content(content) == "Array":
            chunks = get_object_children_ids_from_object_content(content)
            body = json.loads(get_object_body(content, Array))
            total += sum(len(contents[chunks[int(index)]]) for index in body["arraychunk_ids"])
    return total


def failure(message: Message) -> str | None:
    """Why there is no answer, when the device or the SuperLink says so."""
    if not message.has_error():
        return None
    return WORDS.get(message.error.code) or f"it says: {printable(message.error.reason)}"


def opened(found: Found) -> Reply | Unreadable | str:
    """A reply of our own app, unpacked."""
    if not isinstance(found, Message):
        return found
    try:
        return unpack(found.content)
    except Unreadable as error:
        return error


def printable(text: object) -> str:
    """What a device says of its failure, made fit for a log."""
    words: Iterable[str] = str(text or "it failed, and does not say why")[:300].split()
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(words))
