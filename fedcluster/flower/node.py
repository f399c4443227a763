"""The node: connects a device to the server through Flower's Fleet API, with the ClientApp in a process that stays.

flower-supernode asks for messages every three seconds and starts a process for each. This loop uses the same API with
Flower's own client and keys, asks more often, and keeps model, data and state in memory. It runs the ClientApp that is
installed here, never one that the server sends.
"""

import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from fedcluster.data.encoding import some
from fedcluster.errors import BadData, BadExperiment, LostServer
from fedcluster.flower._compat import (
    ActivateNodeRequest,
    ConfirmMessageReceivedRequest,
    DeactivateNodeRequest,
    ErrorCode,
    FleetHttpClient,
    Node,
    NodeAuthHttpInterceptor,
    ObjectTree,
    PullMessagesRequest,
    PullObjectRequest,
    PushMessagesRequest,
    PushObjectRequest,
    RegisterNodeFleetRequest,
    RetryInvoker,
    SendNodeHeartbeatRequest,
    constant,
    generate_key_pairs,
    get_all_nested_objects,
    get_object_tree,
    inflate_object_from_contents,
    iterate_object_tree,
    message_from_proto,
    message_to_proto,
    public_key_to_bytes,
    remove_content_from_message,
    set_message_id,
)
from fedcluster.flower.certificates import private_key, trust
from fedcluster.flower.device import Identity
from fedcluster.flower.mailbox import HEADER
from fedcluster.flower.messages import get_refusal, printable

POLL_SECONDS = 0.1  # between two requests for messages; the proxy answers when there is one
HEARTBEAT_SECONDS = 10.0  # the least that the SuperLink allows; a node is offline after twice as long
RECONNECT_SECONDS = 3.0  # before connecting again, when the server is away or does not let us in
MAX_FAILURES = 40  # in a row before we give up
RETRY_SECONDS = 0.5  # at most, before a request is repeated whose connection broke, as on a busy server
CONNECTION_ERRORS = (httpx.ConnectError, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)

Keys = tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]


class ServerUnavailable(Exception):
    """The server does not answer, or does not know us yet; it is worth trying again."""


class UndecodableMessage(Exception):
    """What the server sent cannot be decoded; the envelope says whom to answer."""

    def __init__(self, envelope: Message, reason: str) -> None:
        super().__init__(reason)
        self.envelope = envelope


def join(
    address: tuple[str, int], identity: Identity, folder: Path | None, key: Path | None, say: Callable[[str], None]
) -> None:
    """Serve until interrupted. When a server goes away, the device keeps its state and waits for it; a server that it
    has never reached is given up after a while."""
    from fedcluster.flower.client_app import client_app, load_device

    host, port = address
    server = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if folder is None and not is_loopback(host):
        raise BadExperiment(f"--insecure is for loopback only, and {host} is not: get certificates from the server")
    device = load_device(identity)
    registration = device.registration()
    say(f"device {identity.device}: {registration.samples:,} samples {registration.shape} in {identity.data}")
    if device.statistics:
        say(f"tells count, mean and squares of {some(device.statistics)}, which are standardised over all devices")
    else:
        for line in device.said:
            say(line)
    say(device.limits.describe())
    authority = None if folder is None else folder / "ca.crt"
    if authority is not None:
        trust(authority)  # fail now if the file is missing
    keys = load_keys(key)
    state, failures, connected_once = RecordDict(), 0, False
    while True:
        try:
            check_server(host, port, authority)
            with connect(server, authority, keys, registered=key is not None) as connection:
                say(f"connected to {server}")
                failures, connected_once = 0, True
                serve(connection, client_app, identity, state, say)
        except (ServerUnavailable, httpx.HTTPError, OSError) as error:
            failures += 1
            if failures >= MAX_FAILURES and not connected_once:
                raise LostServer(
                    f"{server} cannot be reached ({describe_error(error)}): check the address and the key"
                ) from None
            if failures in (1, 10):
                say(f"waiting for {server} ({describe_error(error)})")
            time.sleep(RECONNECT_SECONDS)


def describe_error(error: Exception) -> str:
    if not isinstance(error, httpx.HTTPStatusError):
        return str(error)
    statuses = {
        403: "it does not know this device yet",
        412: "it still has an earlier connection of this device",
        502: "it is not ready",
    }
    return statuses.get(error.response.status_code, f"status {error.response.status_code}")


def load_keys(path: Path | None) -> Keys:
    if path is None:
        return generate_key_pairs()
    private = private_key(path)
    return private, private.public_key()


def is_loopback(host: str) -> bool:
    """Whether every address of this name is the machine's own."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise BadData(f"{host}: {error.strerror or error}") from None
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)


def check_server(host: str, port: int, authority: Path | None) -> None:
    """Check that the server's certificate is of the authority that we trust, to fail with a sentence if it is not.
    Every request checks it again."""
    try:
        with socket.create_connection((host, port), timeout=10) as plain:
            if authority is None:
                return
            with trust(authority).wrap_socket(plain, server_hostname=host):
                return
    except ssl.SSLCertVerificationError as error:
        raise BadData(
            f"{host}:{port} does not have a certificate of {authority} ({error.verify_message}): use the ca.crt of "
            "that server, and an address that its certificate names"
        ) from None
    except ssl.SSLError as error:
        raise ServerUnavailable(f"no TLS: {error.reason}") from None


class FleetConnection:
    """A node's connection to the SuperLink, through the proxy."""

    def __init__(self, client: FleetHttpClient, node: Node) -> None:
        self.client, self.node = client, node
        self.whole = ""  # the id of the last message that came with its content

    def receive(self) -> Message | None:
        """The next message, complete; None if there is none."""
        response = self.client.PullMessages(PullMessagesRequest(node=self.node))
        if not response.messages_list:
            return None
        envelope = message_from_proto(response.messages_list[0])
        if not response.message_object_trees:  # from the proxy's mailbox
            self.whole = envelope.metadata.message_id
            return envelope
        tree = response.message_object_trees[0]
        run = envelope.metadata.run_id
        contents = {one.object_id: self.pull(run, one) for one in iterate_object_tree(tree)}
        confirm = ConfirmMessageReceivedRequest(node=self.node, run_id=run, message_object_id=tree.object_id)
        self.client.ConfirmMessageReceived(confirm)
        set_message_id(envelope, tree.object_id)
        try:
            message = inflate_object_from_contents(tree.object_id, contents)
        except Exception as error:  # Flower's parsers may raise anything
            raise UndecodableMessage(envelope, f"a message that cannot be decoded ({type(error).__name__})") from None
        if not isinstance(message, Message):
            raise UndecodableMessage(envelope, "an object that is not a message")
        set_message_id(message, tree.object_id)
        return message

    def pull(self, run: int, tree: ObjectTree) -> bytes:
        request = PullObjectRequest(node=self.node, run_id=run, object_id=tree.object_id)
        for _ in range(100):
            response = self.client.PullObject(request)
            if response.object_available:
                return bytes(response.object_content)
            if not response.object_found:
                break
            time.sleep(0.1)  # the server has not sent all of it yet
        raise ServerUnavailable("the server withdrew a message")

    def send(self, reply: Message) -> None:
        if reply.metadata.reply_to_message_id == self.whole:
            self.client.PushMessages(PushMessagesRequest(node=self.node, messages_list=[message_to_proto(reply)]))
            return
        set_message_id(reply, reply.object_id)
        run = reply.metadata.run_id
        pushed = self.client.PushMessages(
            PushMessagesRequest(
                node=self.node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[0.0],
            )
        )
        wanted = set(pushed.objects_to_push)
        for name, thing in get_all_nested_objects(reply).items():
            if name in wanted:
                self.client.PushObject(
                    PushObjectRequest(
                        node=self.node,
                        run_id=run,
                        object_id=name,
                        object_content=thing.deflate(),
                        session_id=pushed.session_id,
                    )
                )


class TakesMailbox:
    """Says in every request that this node takes messages with their content."""

    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        context.request.headers[HEADER] = "1"
        return call_next(context)


@contextmanager
def connect(server: str, authority: Path | None, keys: Keys, registered: bool) -> Iterator[FleetConnection]:
    """A connection of an activated node. Heartbeats are sent in the background, and the node is deactivated at the end.
    `registered` says that the server knows the key already."""
    public = public_key_to_bytes(keys[1])
    certificates = None if authority is None else authority.read_bytes()
    interceptors: list[Any] = [NodeAuthHttpInterceptor(*keys), TakesMailbox()]
    given = (server, authority is None, certificates, interceptors)
    retry = RetryInvoker(lambda: constant(RETRY_SECONDS), CONNECTION_ERRORS, max_tries=4, max_time=None)
    with (
        FleetHttpClient.from_server_address(*given, retry_invoker=retry) as client,
        FleetHttpClient.from_server_address(*given, retry_invoker=retry) as background,
    ):
        if not registered:
            with suppress(httpx.HTTPStatusError):  # it may be registered already
                client.RegisterNode(RegisterNodeFleetRequest(public_key=public))
        activated = client.ActivateNode(ActivateNodeRequest(public_key=public, heartbeat_interval=HEARTBEAT_SECONDS))
        node, over = Node(node_id=activated.node_id), threading.Event()
        heartbeat = SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT_SECONDS)

        def send_heartbeats() -> None:
            while not over.wait(HEARTBEAT_SECONDS / 2):
                with suppress(httpx.HTTPError):  # the main loop notices and says so
                    background.SendNodeHeartbeat(heartbeat)

        heartbeats = threading.Thread(target=send_heartbeats, daemon=True)
        heartbeats.start()
        try:
            yield FleetConnection(client, node)
        finally:
            over.set()
            heartbeats.join(HEARTBEAT_SECONDS)  # a heartbeat after the deactivation would activate the node again
            with suppress(httpx.HTTPError):
                background.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))


def serve(
    connection: FleetConnection, app: ClientApp, identity: Identity, state: RecordDict, say: Callable[[str], None]
) -> None:
    """Answer one message after another. An error in one is logged and sent to the server."""
    config = identity.config()

    def failure(message: Message, error: Exception) -> Message:
        say(printable(f"device {identity.device} cannot do what the server asks: {error}"))
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)[:500]), reply_to=message)

    while True:
        try:
            message = connection.receive()
            if message is None:
                time.sleep(POLL_SECONDS)
                continue
        except UndecodableMessage as error:
            reply = failure(error.envelope, error)
        else:
            refused = get_refusal(message.content) if message.has_content() else None
            if refused is not None:
                say(f"the server refuses device {identity.device}: {printable(refused)}")
                continue
            try:
                reply = app(message, Context(message.metadata.run_id, connection.node.node_id, config, state, {}))
            except Exception as error:  # whatever a message may cause, the next one is served
                reply = failure(message, error)
        try:
            connection.send(reply)
        except httpx.HTTPStatusError as error:
            if error.response.status_code in (401, 502, 503, 504):
                raise
            say(f"the server did not accept an answer (status {error.response.status_code})")
