"""Flower 1.41.0, simulation engine with the Ray backend, Message API, FedAvg.

Configuration, for 2 cores: Ray has 2 CPUs and a client needs 1, so 2 actors live through the whole run, with one
torch thread each and without Ray's niceness of 15. Every actor reads the data and builds the model once; evaluation
on clients is off; this file imports itself so that Ray gets the apps as references instead of pickled code.
There are as many supernodes as seats in the cohort (100), and the server tells each which of the 1000 devices it
plays in this round: with one supernode per device (--supernodes 1000) the engine, which polls the inbox of every
supernode, costs a third more CPU per round (mlp). The older `start_simulation`, deprecated, with 1000 clients,
costs as much as this.

Batches: 20 of 30, drawn uniformly with replacement. A round is timed on the server, from configure_train to the end
of aggregate_train: sampling, messages, training and averaging.
"""

import logging
import os
import random
import time
from collections.abc import Iterable
from functools import cache

os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0", OMP_NUM_THREADS="1")

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

import rival_torch as work

client = ClientApp()


@cache
def worker(model: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The actor's module and optimizer (plain SGD has no state to clear between clients)."""
    torch.set_num_threads(1)
    module = work.build(model)
    torch.seed()
    return module, torch.optim.SGD(module.parameters(), lr=work.RATE)


@client.train()
def train(message: Message, context: Context) -> Message:
    config = message.content["config"]
    module, optimizer = worker(config["model"])
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    work.train(module, optimizer, work.load(config["data"], config["model"]), config["device"])
    reply = {"arrays": ArrayRecord(module.state_dict()), "metrics": MetricRecord({"num-examples": work.SAMPLES})}
    return Message(RecordDict(reply), reply_to=message)


class TimedFedAvg(FedAvg):
    """FedAvg whose messages name the device to play, and which notes the seconds of each round."""

    def __init__(self, cohort: int, supernodes: int) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.cohort, self.supernodes = cohort, supernodes
        self.seconds: list[float] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        while len(nodes := list(grid.get_node_ids())) < self.supernodes:  # only as the engine starts
            time.sleep(0.1)
        self.begun = time.perf_counter()
        seats = random.sample(nodes, self.cohort)
        devices = random.sample(range(work.DEVICES), self.cohort)
        return [
            Message(
                RecordDict({"arrays": arrays, "config": ConfigRecord({**config, "device": device})}),
                node,
                MessageType.TRAIN,
            )
            for node, device in zip(seats, devices, strict=True)
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        if errors := [reply.error.reason for reply in replies if reply.has_error()]:
            raise RuntimeError(errors[0])
        result = super().aggregate_train(server_round, replies)
        self.seconds.append(time.perf_counter() - self.begun)
        work.progress(server_round, self.seconds[-1])
        return result


def main() -> None:
    parser = work.parser(__doc__)
    parser.add_argument("--supernodes", type=int, help="virtual nodes of Flower (as many as the cohort)")
    args = parser.parse_args()
    supernodes = args.supernodes or args.cohort
    logging.getLogger("flwr").setLevel(logging.ERROR)
    server, strategy = ServerApp(), TimedFedAvg(args.cohort, supernodes)
    final: dict[str, torch.Tensor] = {}

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        config = ConfigRecord({"data": os.path.abspath(args.data), "model": args.model})
        start = ArrayRecord(work.build(args.model).state_dict())
        result = strategy.start(grid, start, num_rounds=args.rounds, train_config=config)
        final.update(result.arrays.to_torch_state_dict())

    run_simulation(
        server,
        client,
        num_supernodes=supernodes,
        backend_config={"init_args": {"num_cpus": 2}, "client_resources": {"num_cpus": 1}},
    )
    module = work.build(args.model)
    module.load_state_dict(final)
    work.report("flower", args.model, strategy.seconds, work.accuracy(module, work.load(args.data, args.model)))


if __name__ == "__main__":
    import bench_flower  # by its name: functions of __main__ would be pickled by value, and their caches lost

    bench_flower.main()
