"""FedLab 1.3.0, its cross-process mode on loopback: a server and 2 processes, each with a SerialClientTrainer.

Configuration, for 2 cores: FedLab's own SynchronousServerManager and PassiveClientManager (torch.distributed, gloo),
FedLab's own serial SGD trainer with one torch thread in each of the 2 client processes; the server waits meanwhile.
Three things are set up better than FedLab does by itself: each process averages its devices' models and uploads the
average (uploading all 100 models to the server takes as long as training mlp); the cohort is split evenly on the 2
processes (its coordinator would give each the devices that it owns, in random proportion); its logging is off.

Batches: 20 of 30, drawn uniformly with replacement, straight from tensors (no DataLoader). A round is timed on the
server, from the sampling of the clients to the new global model.
"""

import logging
import random
import socket
import time
from collections.abc import Iterator

import torch
import torch.multiprocessing as mp

# FedLab imports torchvision for data sets not used here; PyPI's torchvision cannot load its CUDA operators on a CPU
# build of torch, and then refuses to be imported unless these two have at least been declared.
for operator in ("nms", "qnms"):
    torch.library.define(f"torchvision::{operator}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.contrib.dataset.basic_dataset import FedDataset
from fedlab.core.client.manager import PassiveClientManager
from fedlab.core.coordinator import Coordinator
from fedlab.core.network import DistNetwork
from fedlab.core.server.manager import SynchronousServerManager
from fedlab.utils import Aggregators
from torch import Tensor

import rival_torch as work

PROCESSES = 2


class Devices(FedDataset):
    """The devices' batches of one round."""

    def __init__(self, data: work.Data) -> None:
        self.data = data

    def get_dataloader(self, id: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.data.batch(id) for _ in range(work.STEPS))


class Trainer(SGDSerialClientTrainer):
    """FedLab's serial trainer, which averages its part of the cohort as it goes: one upload per process."""

    def local_process(self, payload: list[Tensor], id_list: list[int]) -> None:
        total = torch.zeros_like(payload[0])
        for id in id_list:
            (parameters,) = self.train(payload[0], self.dataset.get_dataloader(id, self.batch_size))
            total.add_(parameters, alpha=work.SAMPLES)
        samples = work.SAMPLES * len(id_list)
        self.cache.append([total / samples, torch.tensor([float(samples)])])


class Handler(SyncServerHandler):
    """FedAvg weighted by samples over the processes' averages, which notes the seconds of each round."""

    num_clients_per_round = PROCESSES  # what FedLab takes for the number of uploads to wait for

    def __init__(self, model: torch.nn.Module, rounds: int, cohort: int) -> None:
        super().__init__(model, rounds, sample_ratio=cohort / work.DEVICES)
        self.cohort = cohort
        self.seconds: list[float] = []

    def sample_clients(self) -> list[int]:
        self.begun = time.perf_counter()
        return random.sample(range(self.num_clients), self.cohort)

    def global_update(self, buffer: list[list[Tensor]]) -> None:
        self.set_model(Aggregators.fedavg_aggregate([p for p, _ in buffer], torch.cat([n for _, n in buffer])))
        self.seconds.append(time.perf_counter() - self.begun)
        work.progress(len(self.seconds), self.seconds[-1])


class EvenCoordinator(Coordinator):
    """Deals the cohort out evenly; every process has the data of all devices."""

    def map_id_list(self, id_list: list[int]) -> dict[int, list[int]]:
        return {rank: list(id_list[i :: len(self.map)]) for i, rank in enumerate(self.map)}


class Server(SynchronousServerManager):
    def setup(self) -> None:
        super().setup()
        self.coordinator = EvenCoordinator(self.coordinator.map)


def network(port: int, rank: int) -> DistNetwork:
    return DistNetwork(("127.0.0.1", str(port)), PROCESSES + 1, rank, ethernet="lo")


def client(port: int, rank: int, path: str, model: str) -> None:
    """A client process."""
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    trainer = Trainer(work.build(model), work.DEVICES // PROCESSES)
    trainer.setup_dataset(Devices(work.load(path, model)))
    trainer.setup_optim(epochs=1, batch_size=work.BATCH, lr=work.RATE)
    torch.manual_seed(rank)
    PassiveClientManager(network(port, rank), trainer).run()


def main() -> None:
    args = work.parser(__doc__).parse_args()
    logging.disable(logging.INFO)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    clients = [
        mp.get_context("spawn").Process(target=client, args=(port, rank, args.data, args.model))
        for rank in range(1, PROCESSES + 1)
    ]
    for process in clients:
        process.start()
    handler = Handler(work.build(args.model), args.rounds, args.cohort)
    Server(network(port, 0), handler).run()
    for process in clients:
        process.join()
    accuracy = work.accuracy(handler.model, work.load(args.data, args.model))
    work.report("fedlab", args.model, handler.seconds, accuracy)


if __name__ == "__main__":
    main()
