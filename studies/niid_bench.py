"""The setting of Flower's baseline niid_bench (adap/flower, baselines/niid_bench), and what it published.

Ten devices, all of which take part in each of 50 rounds, ten local epochs of batch 64, SGD at rate 0.01 with momentum
0.9 and weight decay 1e-5, a CNN with 6 and 16 filters of 5 x 5 and layers of 120 and 84 on pixels from 0 to 1. Training
samples are shared out by Dirichlet(0.5), where a device that has its equal part gets no more classes, or with two
classes a device. Published is the test accuracy of the best round, mean and deviation of several seeds.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn

from fedcluster import Dataset, Experiment
from fedcluster.algorithms.scaffold import Scaffold
from fedcluster.data.sources import open_dataset
from fedcluster.experiment import Section
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.local_sgd import Batches, local_sgd
from fedcluster.models.optimizers import optimizer
from fedcluster.state import Tensors

PUBLISHED = {  # test accuracy in percent: mean, standard deviation
    ("mnist", "dirichlet", "fedavg"): (98.89, 0.07),
    ("mnist", "dirichlet", "scaffold"): (99.07, 0.06),
    ("mnist", "dirichlet", "fedprox"): (99.02, 0.02),
    ("mnist", "dirichlet", "fednova"): (98.03, 0.06),
    ("mnist", "two classes", "fedavg"): (96.86, 0.30),
    ("mnist", "two classes", "scaffold"): (96.92, 0.52),
    ("mnist", "two classes", "fedprox"): (96.85, 0.15),
    ("mnist", "two classes", "fednova"): (96.65, 0.39),
    ("cifar10", "dirichlet", "fedavg"): (62.47, 0.43),
    ("cifar10", "dirichlet", "scaffold"): (68.08, 0.96),
    ("cifar10", "dirichlet", "fedprox"): (65.63, 0.08),
    ("cifar10", "dirichlet", "fednova"): (63.89, 1.40),
}
PARTITIONS: dict[str, dict[str, Any]] = {
    "dirichlet": {"partition": "dirichlet", "alpha": 0.5, "balance": True},
    "two classes": {"partition": "pathological", "classes": 2},
}


def unit_pixels(name: str) -> Dataset:
    """Images with pixels from 0 to 1, which are not standardised."""
    dataset = open_dataset(name, say=lambda line: None)
    channels = dataset.shape[0]
    return dataset.standardised([1 / 255] * channels, [0.0] * channels)


def cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    channels, height, _ = shape
    side = ((height - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * side * side, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )


class MomentumScaffold(Scaffold):
    """SCAFFOLD as niid_bench has it: a step of SGD with momentum, then w <- w - lr (c - c_k), option II."""

    @classmethod
    def local_optimizers(cls, options: Section) -> tuple[str, ...]:
        return ("momentum",)

    def train(self, flat_model: FlatModel, received: Tensors, batches: Batches, device_state: Tensors) -> Tensors:
        start, c, c_k = received["model"], received["variate"], device_state["variate"]
        rule = Corrected(optimizer(self.local, batches.lr), c - c_k, batches.lr)
        w = local_sgd(flat_model, start, batches, rule=rule)
        moved = (start - w)[: flat_model.size]
        new = moved / (batches.steps * batches.lr) - (c - c_k)
        device_state["variate"] = new
        return {"model": w, "variate": new - c_k}


class Corrected:
    """The step of an optimizer, followed by a step along the difference of the variates."""

    def __init__(self, rule: Any, offset: Tensor, lr: float) -> None:
        self.rule, self.offset, self.lr = rule, offset, lr

    def step(self, w: Tensor, g: Tensor) -> None:
        self.rule.step(w, g)
        w.add_(self.offset, alpha=-self.lr)


ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "scaffold": {"name": MomentumScaffold},
    "fedprox": {"name": "fedprox", "mu": 0.01},
    "fednova": {"name": "fednova"},
}


def experiment(data: str, partition: str, algorithm: str, seed: int, rounds: int) -> Experiment:
    return Experiment(
        seed=seed,
        rounds=rounds,
        data={"name": partial(unit_pixels, data)},
        fleet={"devices": 10, "samples": "all"} | PARTITIONS[partition],
        clusters={"count": 1, "participation": 1.0},
        model={"name": cnn},
        algorithm=ALGORITHMS[algorithm],
        local={
            "optimizer": "momentum",
            "momentum": 0.9,
            "weight_decay": 1e-5,
            "epochs": 10,
            "batch": 64,
            "lr": 0.01,
        },
    )
