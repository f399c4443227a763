"""FedCluster on Flower: the same training, its cohorts on other machines.

    server_app, client_app    a normal Flower app, for `flwr run`
    FedCluster                a Flower Strategy that lets clusters take turns around a strategy of one's own

`fedcluster serve` and `fedcluster join` use the same pieces without Flower's process for every message.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedcluster.flower.client_app import client_app as client_app
    from fedcluster.flower.server import server_app as server_app
    from fedcluster.flower.strategy import FedCluster as FedCluster

HOME = {"client_app": "client_app", "server_app": "server", "FedCluster": "strategy"}

__all__ = ["FedCluster", "client_app", "server_app"]


def __getattr__(name: str) -> Any:
    """Import on first use: a device needs nothing of the server's side, nor the other way round."""
    if name not in HOME:
        raise AttributeError(f"module 'fedcluster.flower' has no attribute {name!r}")
    return getattr(import_module(f"fedcluster.flower.{HOME[name]}"), name)
