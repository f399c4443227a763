"""A device with a valid key that does not follow the protocol of secure aggregation, or goes away in the middle of it:
`python -m tests.secure_attacker MODE SERVER DEVICE FOLDER`. MODE is

    lie      its shares in the clear are wrong
    replay   in later cycles it sends the keys of the first
    unmasked it goes away when it is asked for its masked update
    masked   it goes away after its masked update
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Context, Message, RecordDict

from fedcluster.flower.certificates import private_key
from fedcluster.flower.client_app import client_app
from fedcluster.flower.device import Identity
from fedcluster.flower.messages import get_refusal, pack, pack_secure, unpack, unpack_secure
from fedcluster.flower.node import POLL_SECONDS, RECONNECT_SECONDS, FleetConnection, connect

first: list[bytes] = []


def answer(mode: str, message: Message, reply: Message) -> RecordDict:
    stage, body = unpack(message.content)[0].get("stage"), unpack_secure(reply.content)
    if body is None:
        return reply.content
    training = message.metadata.message_type == "train"
    if (mode == "unmasked" and training) or (mode == "masked" and stage == "confirm"):
        sys.exit()  # which deactivates the node
    if mode == "replay" and stage == "advertise":
        first.append(body)
        body = first[0]
    if mode == "lie" and stage == "unmask":
        shares = json.loads(body)
        shares["seeds"] = {device: f"{int(share, 16) ^ 1:064x}" for device, share in shares["seeds"].items()}
        body = json.dumps(shares).encode()
    return pack_secure(pack(unpack(reply.content)[0]), body)


def main(mode: str, server: str, device: str, folder: str) -> None:
    certificates = Path(folder, "certificates")
    key = private_key(certificates / "devices" / f"{device}.key")
    identity = Identity(device, str(Path(folder, f"{device}.npz")), certificates=str(certificates))
    config = replace(identity, limits=str(Path(folder, "limits.toml"))).config()
    state = RecordDict()
    while True:
        try:
            with connect(server, certificates / "ca.crt", (key, key.public_key()), registered=True) as connection:
                serve(mode, connection, config, state)
        except (httpx.HTTPError, OSError):
            time.sleep(RECONNECT_SECONDS)


def serve(mode: str, connection: FleetConnection, config: dict[str, Any], state: RecordDict) -> None:
    while True:
        message = connection.receive()
        if message is None:
            time.sleep(POLL_SECONDS)
        elif get_refusal(message.content) is None:
            context = Context(message.metadata.run_id, connection.node.node_id, config, state, {})
            content = answer(mode, message, client_app(message, context))
            connection.send(Message(content, reply_to=message))


if __name__ == "__main__":
    main(*sys.argv[1:])
