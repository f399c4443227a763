"""FedCluster on Flower: the same training with devices on other machines.

    server_app, client_app    a normal Flower app, for `flwr run`
    FedCluster                a Flower Strategy in which clusters take turns, wrapped around another strategy

`fedcluster serve` and `fedcluster join` use the same code without a process for every message.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedcluster.flower.client_app import client_app as client_app
    from fedcluster.flower.server import server_app as server_app
    from fedcluster.flower.strategy import FedCluster as FedCluster

MODULES = {"client_app": "client_app", "server_app": "server", "FedCluster": "strategy"}

__all__ = ["FedCluster", "client_app", "server_app"]


def __getattr__(name: str) -> Any:
    """Import on first use: a device needs nothing of the server, and the server nothing of the device."""
    if name not in MODULES:
        raise AttributeError(f"module 'fedcluster.flower' has no attribute {name!r}")
    return getattr(import_module(f"fedcluster.flower.{MODULES[name]}"), name)
