"""One SGD step of the compiled engine and of torch: LeNet, models of the zoo, and networks of two hidden layers.

    python benchmarks/wide.py        a few minutes; one core; writes results/wide.md

`MAX_WEIGHTS` in `models/kernels/architecture.py` comes from the widths: networks with a larger layer are left to torch.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from fedcluster.allocator import keep_memory
from fedcluster.data.dataset import Dataset, DataSpec
from fedcluster.models import zoo
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.kernels import architecture

RESULTS = Path(__file__).parent / "results" / "wide.md"
MODELS = ("logistic", "mlp", "cnn", "alexnet")
WIDTHS, BATCHES, SHAPE, CLASSES = (200, 512, 1000, 1024, 1500, 2048), (10, 30, 256), (1, 28, 28), 10
SECONDS = 0.1  # of torch, for one measurement


def seconds(flat_model: FlatModel, dataset: Dataset, rows: torch.Tensor) -> float:
    """CPU seconds a step: wall-clock time would count other processes."""
    began = time.process_time()
    if flat_model.network is not None:
        flat_model.network.sgd(dataset, rows, 0.01)
    else:
        for batch in rows:
            flat_model.compute_gradient(dataset.x_train[batch], dataset.y_train[batch])
            flat_model.w.add_(flat_model.gradient, alpha=-0.01)
    return (time.process_time() - began) / len(rows)


def compare(name: object, module: nn.Module, batch: int, repeats: int = 7) -> str:
    """A row of the table: the best CPU seconds of each, measured in alternation."""
    x, y = torch.randn(batch, *SHAPE), torch.randint(CLASSES, (batch,))
    dataset = Dataset(x_train=x.numpy(), y_train=y.numpy(), x_test=x.numpy(), y_test=y.numpy(), classes=CLASSES)
    compiled, plain = FlatModel(module), FlatModel(module)
    plain.network = None
    assert compiled.network is not None, "there is no C compiler"
    rows = torch.arange(batch).repeat(2, 1)
    rows = rows[:1].repeat(max(2, int(SECONDS / seconds(plain, dataset, rows))), 1)
    found = [(seconds(compiled, dataset, rows), seconds(plain, dataset, rows)) for _ in range(repeats)]
    ours, theirs = (min(column) for column in zip(*found, strict=True))
    return f"| {name} | {batch} | {ours * 1e3:.3f} | {theirs * 1e3:.3f} | {theirs / ours:.2f} |"


def two_hidden(width: int) -> nn.Module:
    layers = nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    return nn.Sequential(nn.Flatten(), *layers)


def lenet() -> nn.Module:
    blocks = nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)
    layers = nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES)
    return nn.Sequential(*blocks, nn.Flatten(), *layers)


def rows() -> Iterator[str]:
    yield "| model or width | batch | compiled, ms a step | torch, ms a step | torch / compiled |"
    yield "| --- | --- | --- | --- | --- |"
    models = {model: zoo.build(model, DataSpec(SHAPE, "class", CLASSES), seed=0) for model in MODELS}
    for name, module in (models | {"lenet": lenet()}).items():
        for batch in BATCHES[:2]:
            yield compare(name, module, batch)
    for width in WIDTHS:
        for batch in BATCHES:
            yield compare(width, two_hidden(width), batch)


if __name__ == "__main__":
    keep_memory()
    torch.set_num_threads(1)
    architecture.MAX_WEIGHTS = 10**9
    lines = []
    for line in rows():
        print(line, flush=True)
        lines.append(line)
    RESULTS.write_text("\n".join(lines) + "\n")
