"""The transport: sends messages to nodes through Flower's Grid and receives their replies.

Flower's `send_and_receive` polls every three seconds and decodes whatever a reply turns out to be. Here polling is
faster or replaced by notification; a reply is fetched object by object, so that a node which announces more than it
sends blocks nobody; and the size of a reply is checked before it is decoded.
"""

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from flwr.app import Array, Message
from flwr.serverapp import Grid

from fedcluster.flower._compat import (
    ConfirmMessageReceivedRequest,
    ErrorCode,
    HttpGrid,
    PullAppMessagesRequest,
    PullObjectRequest,
    RuntimeHttpClient,
    get_object_body,
    get_object_children_ids_from_object_content,
    get_object_type_from_object_content,
    inflate_object_from_contents,
    iterate_object_tree,
    runtime_client,
)
from fedcluster.flower.messages import Fields, InvalidMessage, printable, unpack
from fedcluster.state import Tensors

POLL_SECONDS = 0.2  # between two polls for replies
ONLINE_SECONDS = 1.0  # between two checks that the senders of incomplete replies are still online
MAX_OBJECTS = 8  # objects of a reply of our app: it has three
OBJECT_TYPES = frozenset({"Message", "RecordDict", "ConfigRecord"})

NO_ANSWER, OFFLINE, WENT_OFFLINE = "no answer in time", "it is not online", "it went offline"
SUPERLINK_ERRORS = {  # with which the SuperLink answers in place of a node
    ErrorCode.NODE_UNAVAILABLE: WENT_OFFLINE,
    ErrorCode.MESSAGE_UNAVAILABLE: NO_ANSWER,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: NO_ANSWER,
}
SILENT = frozenset({NO_ANSWER, OFFLINE, WENT_OFFLINE})

Reply = tuple[Fields, Tensors]
Outcome = Message | InvalidMessage | str
"""A reply, a reply that is refused, or the reason why there is none."""


@dataclass(frozen=True)
class SentMessage:
    """A message without a reply yet: the number the caller gave it, its node, and until when (monotonic) we wait."""

    number: int
    node: int
    deadline: float


@dataclass(eq=False)
class PendingReply:
    """A reply that has been announced and is being fetched. `activated` is when its sender came online: a node that has
    reconnected since does not finish the upload that it had begun."""

    reply_to: str
    message_id: str
    missing: list[str]
    objects: dict[str, bytes] = field(default_factory=dict)
    activated: str | None = None


class Notifier:
    """Tells nodes that there are messages, and the server that there may be replies. This one does not know, so the
    server polls; the proxy sees all traffic and knows."""

    def notify(self, nodes: Iterable[int]) -> None:
        """There are messages for these nodes."""

    def wait(self) -> None:
        """Return when there may be a reply."""
        time.sleep(POLL_SECONDS)


class Transport:
    """Replies of at most `max_bytes` in `max_objects` objects of these types are decoded; others are refused."""

    def __init__(
        self,
        grid: Grid,
        max_bytes: int,
        max_objects: int = MAX_OBJECTS,
        object_types: frozenset[str] = OBJECT_TYPES,
        notifier: Notifier | None = None,
    ) -> None:
        self.grid, self.notifier = grid, notifier or Notifier()
        self.max_bytes, self.max_objects, self.object_types = max_bytes, max_objects, object_types
        self.sent: dict[str, SentMessage] = {}  # by message id
        self.pending: list[PendingReply] = []
        self.online_checked = 0.0

    def exchange(self, messages: dict[int, Message], seconds: float) -> Iterator[tuple[int, Outcome]]:
        """Send the messages and yield every outcome under its message's number, in the order of arrival."""
        self.sent, self.pending = {}, []
        yield from self.send(messages, seconds)
        yield from self.receive()

    def receive(self) -> Iterator[tuple[int, Outcome]]:
        """Every outcome of what was sent, in the order of arrival."""
        while self.sent:
            yield from self.collect()
            if self.sent:
                self.notifier.wait()

    def send(self, messages: dict[int, Message], seconds: float) -> Iterator[tuple[int, str]]:
        """Send, and yield those whose node is offline. We wait `seconds` for a reply."""
        ids = list(self.grid.push_messages(list(messages.values())))
        self.notifier.notify(message.metadata.dst_node_id for message in messages.values())
        deadline = time.monotonic() + seconds
        for position, (number, message) in enumerate(messages.items()):
            if position < len(ids) and ids[position]:
                self.sent[ids[position]] = SentMessage(number, message.metadata.dst_node_id, deadline)
            else:
                yield number, OFFLINE

    def collect(self) -> Iterator[tuple[int, Outcome]]:
        """Poll once: replies that are complete, replies that never will be, and messages whose time is up."""
        for reply_to, reply in self.poll():
            if isinstance(reply, PendingReply):
                self.pending.append(reply)
            else:
                yield self.settle(reply_to), reply
        abandoned = self.abandoned()
        for pending in list(self.pending):
            outcome = self.fetch(pending)
            if outcome is None and pending in abandoned:
                outcome = WENT_OFFLINE
            if outcome is not None:
                yield self.settle(pending.reply_to), outcome
        for message_id, message in list(self.sent.items()):
            if time.monotonic() > message.deadline:
                yield self.settle(message_id), NO_ANSWER

    def abandon(self) -> None:
        """Forget all messages without a reply."""
        for message_id in list(self.sent):
            self.settle(message_id)

    def settle(self, message_id: str) -> int:
        """Forget a message that is answered or never will be, and return its number. Deleting is necessary: the
        SuperLink keeps messages that nobody fetched and replies that never came whole."""
        replies = [pending.message_id for pending in self.pending if pending.reply_to == message_id]
        self.pending = [pending for pending in self.pending if pending.reply_to != message_id]
        self.delete(message_id, *replies)
        return self.sent.pop(message_id).number

    def delete(self, *message_ids: str) -> None:
        if isinstance(self.grid, HttpGrid):
            for message_id in message_ids:
                request = ConfirmMessageReceivedRequest(
                    node=self.grid.node, run_id=self.grid.run.run_id, message_object_id=message_id
                )
                self.client.ConfirmMessageReceived(request)

    def abandoned(self) -> list[PendingReply]:
        """Replies whose senders have gone offline, or reconnected, since they announced them."""
        if not self.pending or time.monotonic() < self.online_checked + ONLINE_SECONDS:
            return []
        self.online_checked = time.monotonic()
        online = {node.node_id: node.last_activated_at for node in self.grid.get_nodes()}
        abandoned = []
        for pending in self.pending:
            activated = online.get(self.sent[pending.reply_to].node)
            pending.activated = pending.activated or activated
            if activated is None or activated != pending.activated:
                abandoned.append(pending)
        return abandoned

    def poll(self) -> Iterator[tuple[str, PendingReply | Outcome]]:
        """What was announced since the last poll, with the id of the message that it answers."""
        ids = self.sent.keys() - {pending.reply_to for pending in self.pending}
        if not ids:
            return
        if not isinstance(self.grid, HttpGrid):  # Flower's own simulation, where every node is trusted
            for message in self.grid.pull_messages(ids):
                yield message.metadata.reply_to_message_id, error_of(message) or message
            return
        response = self.client.PullMessages(PullAppMessagesRequest(message_ids=ids))
        for envelope, tree in zip(response.messages_list, response.message_object_trees, strict=True):
            reply_to = envelope.metadata.reply_to_message_id  # the sender of an error is the SuperLink itself
            if reply_to not in ids:
                continue
            objects = [one.object_id for one in iterate_object_tree(tree)]
            if len(objects) > self.max_objects:
                self.delete(envelope.metadata.message_id)
                yield reply_to, InvalidMessage(f"a reply of {len(objects):,} objects")
            else:
                yield reply_to, PendingReply(reply_to, envelope.metadata.message_id, objects)

    @property
    def client(self) -> RuntimeHttpClient:
        assert isinstance(self.grid, HttpGrid)
        return runtime_client(self.grid)

    def fetch(self, pending: PendingReply) -> Outcome | None:
        """Fetch the objects that have arrived; the outcome once the reply is complete or invalid, else None."""
        assert isinstance(self.grid, HttpGrid)
        for name in list(pending.missing):
            request = PullObjectRequest(node=self.grid.node, run_id=self.grid.run.run_id, object_id=name)
            response = self.client.PullObject(request)
            if not response.object_found:
                return "a reply that was never sent whole"
            if not response.object_available:
                return None
            pending.missing.remove(name)
            pending.objects[name] = response.object_content
            if sum(map(len, pending.objects.values())) > self.max_bytes:
                return InvalidMessage(f"a reply of more than {self.max_bytes:,} bytes")
        return self.decode(pending)

    def decode(self, pending: PendingReply) -> Outcome:
        objects = pending.objects
        try:
            if any(get_object_type_from_object_content(one) not in self.object_types for one in objects.values()):
                return InvalidMessage("a reply of other types than expected")
            if unpacked_bytes(objects) > self.max_bytes:
                return InvalidMessage(f"a reply that unpacks to more than {self.max_bytes:,} bytes")
            message = inflate_object_from_contents(pending.message_id, objects)
        except Exception as error:  # Flower's parsers may raise anything
            return InvalidMessage(f"a reply that cannot be decoded ({type(error).__name__})")
        if not isinstance(message, Message):
            return InvalidMessage("a reply that is not a message")
        return error_of(message) or message


def unpacked_bytes(objects: dict[str, bytes]) -> int:
    """Bytes of Flower's arrays once they are assembled: an array names its chunks, and may name one many times."""
    total = 0
    for content in objects.values():
        if get_object_type_from_object_content(content) == "Array":
            chunks = get_object_children_ids_from_object_content(content)
            body = json.loads(get_object_body(content, Array))
            total += sum(len(objects[chunks[int(index)]]) for index in body["arraychunk_ids"])
    return total


def error_of(message: Message) -> str | None:
    """Why there is no answer, where the device or the SuperLink sends an error in its place."""
    if not message.has_error():
        return None
    return SUPERLINK_ERRORS.get(message.error.code) or f"it says: {printable(message.error.reason)}"


def unpack_outcome(outcome: Outcome) -> Reply | InvalidMessage | str:
    """The fields and tensors of a reply of our own app; other outcomes as they are."""
    if not isinstance(outcome, Message):
        return outcome
    try:
        return unpack(outcome.content)
    except InvalidMessage as error:
        return error
