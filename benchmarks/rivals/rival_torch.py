"""What the PyTorch rivals share: the data, the two models, a draw of batches, the accuracy and the last line."""

import argparse
import json
import sys
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

DEVICES, SAMPLES, COHORT, STEPS, BATCH, RATE, CLASSES = 1000, 500, 100, 20, 30, 0.05, 10


class Data:
    """bench.npz in memory, as tensors shaped for the model (flat rows for mlp, 1x28x28 for alexnet)."""

    def __init__(self, path: str, model: str) -> None:
        shape = (-1, 784) if model == "mlp" else (-1, 1, 28, 28)
        with np.load(path) as file:
            self.x_train = torch.from_numpy(file["x_train"]).reshape(shape)
            self.y_train = torch.from_numpy(file["y_train"])
            self.x_test = torch.from_numpy(file["x_test"]).reshape(shape)
            self.y_test = torch.from_numpy(file["y_test"])
            self.rows = torch.from_numpy(file["rows"]).long()

    def batch(self, device: int) -> tuple[Tensor, Tensor]:
        """30 samples of the device, drawn uniformly with replacement."""
        picked = self.rows[device][torch.randint(SAMPLES, (BATCH,))]
        return self.x_train[picked], self.y_train[picked]


def block(channels: int) -> list[nn.Module]:
    """Convolution, max-pooling 3x3 with stride 2 (ceil_mode is "same" here: 28 -> 14 -> 7), normalisation."""
    return [
        nn.Conv2d(channels, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0),
    ]


def build(model: str, seed: int = 0) -> nn.Module:
    """mlp (199,210 parameters) or the small alexnet (1,384,586)."""
    torch.manual_seed(seed)
    if model == "mlp":
        return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, CLASSES))
    return nn.Sequential(
        *block(1),
        *block(64),
        nn.Flatten(),
        nn.Linear(3136, 384),
        nn.ReLU(),
        nn.Linear(384, 192),
        nn.ReLU(),
        nn.Linear(192, CLASSES),
    )


@cache
def load(path: str, model: str) -> Data:
    """The data, read once per process."""
    return Data(path, model)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, data: Data, device: int) -> None:
    """The work of one device in one round: 20 SGD steps."""
    for _ in range(STEPS):
        x, y = data.batch(device)
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()


def accuracy(module: nn.Module, data: Data) -> float:
    with torch.no_grad():
        hits = sum(
            int((module(x).argmax(1) == y).sum())
            for x, y in zip(data.x_test.split(500), data.y_test.split(500), strict=True)
        )
    return hits / len(data.y_test)


def parser(doc: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--data", required=True, help="bench.npz of make_data.py")
    made.add_argument("--model", choices=["mlp", "alexnet"], required=True)
    made.add_argument("--rounds", type=int, required=True, help="rounds trained, the first a warm-up that is not timed")
    made.add_argument("--cohort", type=int, default=COHORT, help="devices in a round (fewer only to try the script)")
    return made


def progress(round_: int, seconds: float) -> None:
    print(f"round {round_}: {seconds:.3f} s", file=sys.stderr, flush=True)


def report(name: str, model: str, seconds: list[float], acc: float) -> None:
    """The last line; `seconds` has every round, the first being warm-up."""
    line = {
        "name": name,
        "model": model,
        "seconds": [round(s, 4) for s in seconds[1:]],
        "accuracy": round(acc, 4),
        "rounds": len(seconds),
    }
    print(json.dumps(line), flush=True)
