"""One SGD step of the compiled engine and of torch: models of the zoo, and networks of two hidden layers by width.

    python benchmarks/wide.py        a few minutes; one core

`MAX_WEIGHTS` in `models/kernels/architecture.py` comes from the widths: networks with a larger layer are left to torch.
"""

import time

import torch
from torch import nn

from fedcluster.allocator import keep_memory
from fedcluster.data.dataset import Dataset, DataSpec
from fedcluster.models import zoo
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.kernels import architecture

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


if __name__ == "__main__":
    keep_memory()
    torch.set_num_threads(1)
    architecture.MAX_WEIGHTS = 10**9
    print("| model or width | batch | compiled, ms a step | torch, ms a step | torch / compiled |")
    print("| --- | --- | --- | --- | --- |")
    for model in MODELS:
        for batch in BATCHES[:2]:
            print(compare(model, zoo.build(model, DataSpec(SHAPE, "class", CLASSES), seed=0), batch), flush=True)
    for width in WIDTHS:
        for batch in BATCHES:
            print(compare(width, two_hidden(width), batch), flush=True)
