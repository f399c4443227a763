"""A device with a good key and bad intentions: `python -m tests.attacker MODE SERVER DEVICE FOLDER`.

It says truly who it is, waits for its turn, trains as it should, and then does what MODE says with the answer.
"""

import os
import signal
import sys
import time
from pathlib import Path

import httpx
import torch
from flwr.app import Context, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest
from flwr.supercore.inflatable.inflatable_object import get_object_tree

from fedcluster.flower.certificates import private_key
from fedcluster.flower.client_app import client_app
from fedcluster.flower.device import Identity
from fedcluster.flower.messages import pack, unpack
from fedcluster.flower.node import AGAIN, PAUSE, Line, connected

earlier: list[RecordDict] = []


def answer(mode: str, line: Line, message: Message, reply: Message) -> None:
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
        flood(line, message)
        return
    elif mode in ("vanish", "leave"):
        announce(line, reply)
        if mode == "leave":
            sys.exit()  # which says good-bye
        os.kill(os.getpid(), signal.SIGKILL)
    earlier.append(reply.content)
    line.send(Message(pack(facts, tensors), reply_to=message))


def announce(line: Line, reply: Message) -> None:
    """The beginning of an answer: that there is one, and of what pieces, of which none follows."""
    reply.metadata.__dict__["_message_id"] = reply.object_id
    line.client.PushMessages(
        PushMessagesRequest(
            node=line.node,
            messages_list=[message_to_proto(remove_content_from_message(reply))],
            message_object_trees=[get_object_tree(reply)],
            clientapp_runtime_list=[0.0],
        )
    )


def flood(line: Line, message: Message) -> None:
    """A gigabyte, in the pieces in which Flower would carry it."""
    reply = Message(pack({"round": 0}), reply_to=message)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    tree = get_object_tree(reply)
    names = [f"{number:064x}" for number in range(1, 210)]
    tree.children.extend(ObjectTree(object_id=name) for name in names)
    pushed = line.client.PushMessages(
        PushMessagesRequest(
            node=line.node,
            messages_list=[message_to_proto(remove_content_from_message(reply))],
            message_object_trees=[tree],
            clientapp_runtime_list=[0.0],
        )
    )
    sent = 0
    for name in names:
        request = PushObjectRequest(
            node=line.node,
            run_id=reply.metadata.run_id,
            object_id=name,
            object_content=b"x" * (5 * 2**20),
            session_id=pushed.session_id,
        )
        try:
            line.client.PushObject(request)
            sent += 5
        except httpx.HTTPError as error:
            print(f"after {sent} MB: {error!r}", flush=True)
            break


def main(mode: str, server: str, device: str, folder: str) -> None:
    key = private_key(Path(folder, "certificates", "devices", f"{device}.key"))
    config = Identity(device, str(Path(folder, f"{device}.npz")), allow=("tests.slow:Slow",)).config()
    state = RecordDict()
    while True:
        try:
            with connected(server, Path(folder, "certificates/ca.crt"), (key, key.public_key()), known=True) as line:
                while True:
                    message = line.receive()
                    if message is None:
                        time.sleep(PAUSE)
                        continue
                    reply = client_app(message, Context(message.metadata.run_id, line.node.node_id, config, state, {}))
                    if message.metadata.message_type.startswith("query"):
                        line.send(reply)
                    else:
                        answer(mode, line, message, reply)
        except (httpx.HTTPError, OSError) as error:
            print(repr(error), flush=True)
            time.sleep(AGAIN)


if __name__ == "__main__":
    main(*sys.argv[1:])
