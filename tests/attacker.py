"""A hostile device with a valid key: `python -m tests.attacker MODE SERVER DEVICE FOLDER`.

It identifies itself honestly, waits for its cycle, trains as it should, and then does what MODE says with the update
or, asked for its scores, with these.
"""

import os
import signal
import sys
import time
from pathlib import Path

import httpx
import torch
from flwr.app import Context, Message, RecordDict

from fedcluster.flower._compat import (
    ObjectTree,
    PushMessagesRequest,
    PushObjectRequest,
    get_object_tree,
    message_to_proto,
    remove_content_from_message,
    set_message_id,
)
from fedcluster.flower.certificates import private_key
from fedcluster.flower.client_app import client_app
from fedcluster.flower.device import Identity
from fedcluster.flower.messages import pack, unpack
from fedcluster.flower.node import POLL_SECONDS, RECONNECT_SECONDS, FleetConnection, connect

earlier: list[RecordDict] = []


def answer(mode: str, connection: FleetConnection, message: Message, reply: Message) -> None:
    facts, tensors = unpack(reply.content)
    model = tensors["model"]
    if mode == "nan":
        model[7] = float("nan")
    elif mode == "scaled" and not earlier:
        tensors = {"model": model * 1e6}
    elif mode == "huge":
        model[7] = 3.3e38
    elif mode == "shape":
        tensors = {"model": model[:1].clone()}  # one number would broadcast over all of them
    elif mode == "names":
        tensors = {"model": model, "weight": torch.full((1,), 1e12)}
    elif mode == "replay" and earlier:
        facts, tensors = unpack(earlier[0])
    elif mode == "hang":
        time.sleep(3600)
    elif mode == "flood":
        flood(connection, message)
        return
    elif mode in ("vanish", "leave"):
        announce(connection, reply)
        if mode == "leave":
            sys.exit()  # which deactivates the node
        os.kill(os.getpid(), signal.SIGKILL)
    earlier.append(reply.content)
    connection.send(Message(pack(facts, tensors), reply_to=message))


def boast(reply: Message) -> RecordDict:
    """Scores that nobody has."""
    fields, _ = unpack(reply.content)
    return pack(fields | {"sums/accuracy": [1e6, 1.0]})


def announce(connection: FleetConnection, reply: Message) -> None:
    """Announce an answer and the objects that it consists of, and send none of them."""
    set_message_id(reply, reply.object_id)
    connection.client.PushMessages(
        PushMessagesRequest(
            node=connection.node,
            messages_list=[message_to_proto(remove_content_from_message(reply))],
            message_object_trees=[get_object_tree(reply)],
            clientapp_runtime_list=[0.0],
        )
    )


def flood(connection: FleetConnection, message: Message) -> None:
    """Send a gigabyte, in objects of the size that Flower uses."""
    reply = Message(pack({"round": 0}), reply_to=message)
    set_message_id(reply, reply.object_id)
    tree = get_object_tree(reply)
    names = [f"{number:064x}" for number in range(1, 210)]
    tree.children.extend(ObjectTree(object_id=name) for name in names)
    pushed = connection.client.PushMessages(
        PushMessagesRequest(
            node=connection.node,
            messages_list=[message_to_proto(remove_content_from_message(reply))],
            message_object_trees=[tree],
            clientapp_runtime_list=[0.0],
        )
    )
    sent = 0
    for name in names:
        request = PushObjectRequest(
            node=connection.node,
            run_id=reply.metadata.run_id,
            object_id=name,
            object_content=b"x" * (5 * 2**20),
            session_id=pushed.session_id,
        )
        try:
            connection.client.PushObject(request)
            sent += 5
        except httpx.HTTPError as error:
            print(f"after {sent} MB: {error!r}", flush=True)
            break


def main(mode: str, server: str, device: str, folder: str) -> None:
    key = private_key(Path(folder, "certificates", "devices", f"{device}.key"))
    config = Identity(
        device, str(Path(folder, f"{device}.npz")), allow=("tests.slow:Slow",), evaluate=mode == "scores"
    ).config()
    state, authority = RecordDict(), Path(folder, "certificates/ca.crt")
    while True:
        try:
            with connect(server, authority, (key, key.public_key()), registered=True) as connection:
                while True:
                    message = connection.receive()
                    if message is None:
                        time.sleep(POLL_SECONDS)
                        continue
                    run, own = message.metadata.run_id, connection.node.node_id
                    reply = client_app(message, Context(run, own, config, state, {}))
                    if message.metadata.message_type.startswith("query"):
                        connection.send(reply)
                    elif message.metadata.message_type.startswith("evaluate"):
                        connection.send(Message(boast(reply), reply_to=message))
                    else:
                        answer(mode, connection, message, reply)
        except (httpx.HTTPError, OSError) as error:
            print(repr(error), flush=True)
            time.sleep(RECONNECT_SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
