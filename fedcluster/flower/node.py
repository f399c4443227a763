"""The node: Flower's Fleet API from the device's side, with the ClientApp in a process that stays.

flower-supernode asks for messages every three seconds and starts a process for each. This loop speaks the same API with
Flower's own client and key, asks more often, and keeps model, data and memory where they are. It runs the ClientApp
that is installed here, never one that the server sends.
"""

import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.retry.retry_invoker import RetryInvoker, constant
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedcluster.errors import BadData, BadExperiment, LostServer
from fedcluster.flower.device import Identity
from fedcluster.flower.messages import refusal
from fedcluster.flower.transport import printable

PAUSE = 0.1  # seconds between two questions whether there is a message; the gate answers when there is one
HEARTBEAT = 10.0  # seconds that we promise; the SuperLink gives a node up after two of them
AGAIN = 3.0  # seconds until the next try when the server is away or does not let us in
TRIES = 40  # of them in a row before we give up
HICCUP = 0.5  # seconds at most until a request is tried again whose connection broke, as on a crowded server
LOST = (httpx.ConnectError, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)


class ServerUnavailable(Exception):
    """The server does not answer, or does not know us now; it is worth trying again."""


class Garbled(Exception):
    """What the server sent is not a message; its envelope says whom to tell."""

    def __init__(self, envelope: Message, why: str) -> None:
        super().__init__(why)
        self.envelope = envelope


def join(
    address: tuple[str, int], identity: Identity, folder: Path | None, key: Path | None, say: Callable[[str], None]
) -> None:
    """Serve until interrupted. A server that goes and comes back finds us again, with all that we keep; one that we
    have never met is not waited for for ever."""
    from fedcluster.flower.client_app import client_app, device

    host, port = address
    server = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if folder is None and not loopback(host):
        raise BadExperiment(f"--insecure is for loopback only, and {host} is not: get certificates from the server")
    registration = device(identity).registration()
    say(f"device {identity.device}: {registration.samples:,} samples {registration.shape} in {identity.data}")
    authority = None if folder is None else folder / "ca.crt"
    keys = own_keys(key)
    state, failed, met = RecordDict(), 0, False
    while True:
        try:
            check_server(host, port, authority)
            with connected(server, authority, keys, known=key is not None) as line:
                say(f"connected to {server}")
                failed, met = 0, True
                serve(line, client_app, identity, state, say)
        except (ServerUnavailable, httpx.HTTPError, OSError) as error:
            failed += 1
            if failed >= TRIES and not met:
                raise LostServer(f"{server} does not let us in ({why(error)}): check address and key") from None
            if failed in (1, 10):
                say(f"waiting for {server} ({why(error)})")
            time.sleep(AGAIN)


def why(error: Exception) -> str:
    if not isinstance(error, httpx.HTTPStatusError):
        return str(error)
    words = {403: "it does not know us, or not yet", 412: "it still counts us as connected", 502: "it is not up"}
    return words.get(error.response.status_code, f"status {error.response.status_code}")


def own_keys(path: Path | None) -> tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]:
    from fedcluster.flower.certificates import private_key

    if path is None:
        return generate_key_pairs()
    private = private_key(path)
    return private, private.public_key()


def loopback(host: str) -> bool:
    """Whether every address of this name is the machine's own."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise BadData(f"{host}: {error.strerror or error}") from None
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)


def check_server(host: str, port: int, authority: Path | None) -> None:
    """That it is the server whose authority we trust; its name is checked by every request anyway."""
    try:
        with socket.create_connection((host, port), timeout=10) as plain:
            if authority is None:
                return
            context = ssl.create_default_context(cafile=authority)
            with context.wrap_socket(plain, server_hostname=host):
                return
    except ssl.SSLCertVerificationError as error:
        raise BadData(
            f"{host}:{port} does not prove to be the server of {authority} ({error.verify_message}): "
            "take the ca.crt of that server, and an address that its certificate names"
        ) from None
    except ssl.SSLError as error:
        raise ServerUnavailable(f"no TLS: {error.reason}") from None


class Line:
    """Our connection to the SuperLink, by way of the gate."""

    def __init__(self, client: FleetHttpClient, node: Node) -> None:
        self.client, self.node = client, node

    def receive(self) -> Message | None:
        """The next message for us, whole."""
        response = self.client.PullMessages(PullMessagesRequest(node=self.node))
        if not response.messages_list:
            return None
        envelope, tree = message_from_proto(response.messages_list[0]), response.message_object_trees[0]
        run = envelope.metadata.run_id
        contents = {one.object_id: self.pull(run, one) for one in iterate_object_tree(tree)}
        confirm = ConfirmMessageReceivedRequest(node=self.node, run_id=run, message_object_id=tree.object_id)
        self.client.ConfirmMessageReceived(confirm)
        envelope.metadata.__dict__["_message_id"] = tree.object_id
        try:
            message = inflate_object_from_contents(tree.object_id, contents)
        except Exception as error:  # Flower's parsers raise what they like
            raise Garbled(envelope, f"a message that cannot be read ({type(error).__name__})") from None
        if not isinstance(message, Message):
            raise Garbled(envelope, "what is not a message")
        message.metadata.__dict__["_message_id"] = tree.object_id
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
        reply.metadata.__dict__["_message_id"] = reply.object_id
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


@contextmanager
def connected(
    server: str,
    authority: Path | None,
    keys: tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey],
    known: bool,
) -> Iterator[Line]:
    """Activated, with a heart that beats in the background, and deactivated at the end."""
    public = public_key_to_bytes(keys[1])
    certificates = None if authority is None else authority.read_bytes()
    given = (server, authority is None, certificates, [NodeAuthHttpInterceptor(*keys)])
    again = RetryInvoker(lambda: constant(HICCUP), LOST, max_tries=4, max_time=None)
    with (
        FleetHttpClient.from_server_address(*given, retry_invoker=again) as client,
        FleetHttpClient.from_server_address(*given, retry_invoker=again) as heart,
    ):
        if not known:
            with suppress(httpx.HTTPStatusError):  # registered already
                client.RegisterNode(RegisterNodeFleetRequest(public_key=public))
        answer = client.ActivateNode(ActivateNodeRequest(public_key=public, heartbeat_interval=HEARTBEAT))
        node, over = Node(node_id=answer.node_id), threading.Event()
        beat = SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT)

        def beats() -> None:
            while not over.wait(HEARTBEAT / 2):
                with suppress(httpx.HTTPError):  # the main loop finds out and says so
                    heart.SendNodeHeartbeat(beat)

        beating = threading.Thread(target=beats, daemon=True)
        beating.start()
        try:
            yield Line(client, node)
        finally:
            over.set()
            beating.join(HEARTBEAT)  # a beat after the good-bye would bring us back
            with suppress(httpx.HTTPError):
                heart.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))


def serve(line: Line, app: ClientApp, identity: Identity, state: RecordDict, say: Callable[[str], None]) -> None:
    """Message after message, each answered before the next. What goes wrong in one is told the server, and said."""
    config = identity.config()

    def failed(message: Message, error: Exception) -> Message:
        say(printable(f"device {identity.device} cannot do what it is asked: {error}"))
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)[:500]), reply_to=message)

    while True:
        try:
            message = line.receive()
            if message is None:
                time.sleep(PAUSE)
                continue
        except Garbled as error:
            reply = failed(error.envelope, error)
        else:
            refused = refusal(message.content) if message.has_content() else None
            if refused is not None:
                say(f"the server refuses device {identity.device}: {printable(refused)}")
                continue
            try:
                reply = app(message, Context(message.metadata.run_id, line.node.node_id, config, state, {}))
            except Exception as error:  # whatever a message may cause, the next one is served
                reply = failed(message, error)
        try:
            line.send(reply)
        except httpx.HTTPStatusError as error:
            if error.response.status_code in (401, 502, 503, 504):
                raise
            say(f"the server did not take an answer ({error.response.status_code})")
