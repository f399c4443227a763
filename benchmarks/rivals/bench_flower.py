"""Flower 1.41.0, Ray-based simulation by `start_simulation`, FedAvg, 1000 virtual clients.

Configuration, for 2 cores: Ray has 2 CPUs and a client needs 1, so 2 actors live through the whole run, with one
torch thread each and without Ray's niceness of 15. Every actor reads the data and builds the model once; evaluation
on clients is off; this file imports itself so that Ray gets functions as references instead of pickled code.
`start_simulation` is deprecated but part of 1.41.0, and the fastest of Flower's engines here: the newer one with the
Message API (bench_flower_message.py) needed more CPU per round in runs taken in turn (mlp).

Batches: 20 of 30, drawn uniformly with replacement. A round is timed on the server, from configure_fit to the end of
aggregate_fit: sampling, messages, training and averaging.
"""

import logging
import os
import time
from functools import cache
from typing import Any, ClassVar

os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0", OMP_NUM_THREADS="1")

import torch
from flwr.app import Context
from flwr.client import Client, NumPyClient
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import start_simulation

import rival_torch as work

Arrays = list[Any]  # of numpy arrays


@cache
def worker(model: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The actor's module and optimizer (plain SGD has no state to clear between clients)."""
    torch.set_num_threads(1)
    module = work.build(model)
    torch.seed()
    return module, torch.optim.SGD(module.parameters(), lr=work.RATE)


def arrays_of(module: torch.nn.Module) -> Arrays:
    return [parameter.detach().numpy() for parameter in module.parameters()]


@torch.no_grad()
def put(arrays: Arrays, module: torch.nn.Module) -> None:
    for parameter, array in zip(module.parameters(), arrays, strict=True):
        parameter.copy_(torch.from_numpy(array))


class Device(NumPyClient):
    def __init__(self, device: int) -> None:
        self.device = device

    def fit(self, parameters: Arrays, config: dict[str, Any]) -> tuple[Arrays, int, dict[str, Any]]:
        module, optimizer = worker(config["model"])
        put(parameters, module)
        work.train(module, optimizer, work.load(config["data"], config["model"]), self.device)
        return arrays_of(module), work.SAMPLES, {}


def client(context: Context) -> Client:
    return Device(int(context.node_config["partition-id"])).to_client()


class TimedFedAvg(FedAvg):
    """FedAvg that notes the seconds of each round and keeps the last parameters."""

    seconds: ClassVar[list[float]] = []

    def configure_fit(self, **given: Any) -> Any:
        self.begun = time.perf_counter()
        return super().configure_fit(**given)

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        if failures:
            raise RuntimeError(f"clients failed: {failures[0]}")
        result = super().aggregate_fit(server_round, results, failures)
        self.seconds.append(time.perf_counter() - self.begun)
        self.last = result[0]
        work.progress(server_round, self.seconds[-1])
        return result


def main() -> None:
    args = work.parser(__doc__).parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    config = {"data": os.path.abspath(args.data), "model": args.model}
    module = work.build(args.model)
    strategy = TimedFedAvg(
        fraction_fit=args.cohort / work.DEVICES,
        fraction_evaluate=0.0,
        min_available_clients=work.DEVICES,
        on_fit_config_fn=lambda server_round: config,
        initial_parameters=ndarrays_to_parameters(arrays_of(module)),
    )
    start_simulation(
        client_fn=client,
        num_clients=work.DEVICES,
        client_resources={"num_cpus": 1},
        strategy=strategy,
        config=ServerConfig(num_rounds=args.rounds),
        ray_init_args={"num_cpus": 2, "include_dashboard": False},
    )
    put(parameters_to_ndarrays(strategy.last), module)
    work.report("flower", args.model, strategy.seconds, work.accuracy(module, work.load(args.data, args.model)))


if __name__ == "__main__":
    import bench_flower  # by its name: functions of __main__ would be pickled by value, and their caches lost

    bench_flower.main()
