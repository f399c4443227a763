"""A device with a later version of fedcluster, which sends a field that this server does not know:
`python -m tests.later SERVER DEVICE FOLDER`."""

import sys
from importlib import import_module
from pathlib import Path

from fedcluster.flower import node
from fedcluster.flower.device import Device, Identity
from fedcluster.flower.registry import Registration


class Later(Registration):
    battery: int = 50


def main(server: str, device: str, folder: str) -> None:
    import_module("fedcluster.flower.client_app").__version__ = "9.9.9"  # type: ignore[attr-defined]
    registration = Device.registration
    Device.registration = lambda self: Later(**dict(registration(self)))  # type: ignore[method-assign]
    host, _, port = server.rpartition(":")
    certificates = Path(folder, "certificates")
    identity = Identity(device, str(Path(folder, f"{device}.npz")))
    key = certificates / "devices" / f"{device}.key"
    node.join((host, int(port)), identity, certificates, key, lambda text: print(text, flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
