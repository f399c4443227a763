"""A device of a later version, which tells something of itself that this server does not know:
`python -m tests.later SERVER DEVICE FOLDER`."""

import sys
from pathlib import Path

import fedcluster

fedcluster.__version__ = "9.9.9"

from fedcluster.flower import node  # noqa: E402
from fedcluster.flower.device import Device, Identity  # noqa: E402
from fedcluster.flower.registry import Registration  # noqa: E402


class Later(Registration):
    battery: int = 50


def main(server: str, device: str, folder: str) -> None:
    plain = Device.registration
    Device.registration = lambda self: Later(**dict(plain(self)))  # type: ignore[method-assign]
    host, _, port = server.rpartition(":")
    certificates = Path(folder, "certificates")
    identity = Identity(device, str(Path(folder, f"{device}.npz")))
    key = certificates / "devices" / f"{device}.key"
    node.join((host, int(port)), identity, certificates, key, lambda text: print(text, flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
