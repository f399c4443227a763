"""The mailbox: small messages that the proxy hands to nodes itself, and their answers.

A message takes about 20 requests to Flower's SuperLink: each has three objects, which are sent, fetched and deleted one
by one. Secure aggregation sends four small messages more a cycle than a plain run. Here such a message takes two
requests: it is the answer to the node's request for messages, with its content, and the node pushes the reply with its
content. Who may ask and answer is checked as for all other requests. Only `fedcluster join` takes messages in this way;
Flower's own supernode does not say that it does.
"""

import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from flwr.app import Message

from fedcluster.flower._compat import (
    PullMessagesResponse,
    PushMessagesRequest,
    message_from_proto,
    message_to_proto,
    set_message_id,
)
from fedcluster.flower.messages import InvalidMessage
from fedcluster.flower.transport import NO_ANSWER, ONLINE_SECONDS, WENT_OFFLINE, Outcome, error_of

if TYPE_CHECKING:
    from fedcluster.flower.executor import NodeDirectory
    from fedcluster.flower.proxy import Proxy

HEADER = "fedcluster-mailbox"  # of the requests of a node that takes messages with their content
PREFIX = "mailbox-"  # of the ids of messages that come from here


class Mailbox:
    """A message stays until it is answered: a node that asks again has not received it."""

    def __init__(self) -> None:
        self.nodes: set[int] = set()  # that take messages from here
        self.waiting: dict[int, tuple[str, bytes]] = {}  # by node, a message's id and the response that carries it
        self.replies: SimpleQueue[tuple[str, Any]] = SimpleQueue()  # to which message, and the reply as it came

    def put(self, message: Message) -> str:
        """Keep a message for its node. Returns its id."""
        name = PREFIX + secrets.token_hex(16)
        set_message_id(message, name)
        response = PullMessagesResponse(messages_list=[message_to_proto(message)])
        self.waiting[message.metadata.dst_node_id] = name, response.SerializeToString()
        return name

    def get(self, node: int) -> bytes | None:
        """The response to a node's request for messages, if there is one for it here."""
        return self.waiting.get(node, ("", None))[1]

    def take(self, node: int, pushed: PushMessagesRequest) -> bool:
        """Whether a node's request is an answer to a message from here. A late one is forgotten."""
        found = [one for one in pushed.messages_list if one.metadata.reply_to_message_id.startswith(PREFIX)]
        for reply in found:
            name = reply.metadata.reply_to_message_id
            if node in self.waiting and self.waiting[node][0] == name:
                del self.waiting[node]
                self.replies.put((name, reply))
        return bool(found)

    def arrived(self) -> Iterator[tuple[str, Any]]:
        with suppress(Empty):
            while True:
                yield self.replies.get_nowait()


def exchange(
    proxy: "Proxy", directory: "NodeDirectory", messages: Mapping[int, Message], seconds: float
) -> Iterator[tuple[int, Outcome]]:
    """Send the messages, and yield every outcome under its message's number, in the order of arrival."""
    mailbox, began = proxy.mailbox, time.monotonic()
    sent = {mailbox.put(message): (number, message.metadata.dst_node_id) for number, message in messages.items()}
    proxy.wake(node for _, node in sent.values())
    checked = began
    while sent:
        proxy.wait()
        for name, reply in mailbox.arrived():
            if name in sent:
                yield sent.pop(name)[0], read(reply)
        late = time.monotonic() > began + seconds
        if not late and time.monotonic() > checked + ONLINE_SECONDS:
            directory.update()
            checked = time.monotonic()
        for name, (number, node) in list(sent.items()):
            if late or node not in directory.devices:
                del sent[name]
                mailbox.waiting.pop(node, None)
                yield number, NO_ANSWER if late else WENT_OFFLINE


def read(reply: Any) -> Outcome:
    try:
        message = message_from_proto(reply)
    except Exception as error:  # Flower's parsers may raise anything
        return InvalidMessage(f"a reply that cannot be decoded ({type(error).__name__})")
    return error_of(message) or message
