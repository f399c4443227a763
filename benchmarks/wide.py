"""Where the compiled loop is faster than torch: a step of SGD on networks of two hidden layers, by width and batch.

    python benchmarks/wide.py        a few minutes; one core

`WIDEST` in `kernels/network.py` is read off this table: the engine takes networks whose layers all have fewer weights.
"""

import time

import torch
from torch import nn

from fedcluster.allocator import keep_memory
from fedcluster.data.dataset import Dataset
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.kernels import network as kernels

WIDTHS, BATCHES, INPUTS, CLASSES = (200, 512, 1000, 1024, 1500, 2048), (10, 30, 256), 784, 10


def seconds(flat_model: FlatModel, dataset: Dataset, rows: torch.Tensor) -> float:
    """CPU seconds of some steps: others may be using the machine."""
    began = time.process_time()
    if flat_model.network is not None:
        flat_model.network.sgd(dataset, rows, 0.01)
    else:
        for batch in rows:
            flat_model.compute_gradient(dataset.x_train[batch], dataset.y_train[batch])
            flat_model.w.add_(flat_model.gradient, alpha=-0.01)
    return (time.process_time() - began) / len(rows)


def compare(width: int, batch: int, repeats: int = 7) -> tuple[float, float]:
    """The best CPU seconds a step, compiled and by torch, in turns."""
    sizes = nn.Linear(INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    x, y = torch.randn(batch, INPUTS), torch.randint(CLASSES, (batch,))
    dataset = Dataset(x_train=x.numpy(), y_train=y.numpy(), x_test=x.numpy(), y_test=y.numpy(), classes=CLASSES)
    compiled, torchs = FlatModel(nn.Sequential(*sizes)), FlatModel(nn.Sequential(*sizes))
    compiled.network, torchs.network = kernels.network_for(compiled.module), None
    assert compiled.network is not None, "there is no C compiler"
    rows = torch.arange(batch).repeat(max(2, 20_000_000 // (width * (width + INPUTS) * batch)), 1)
    found = [(seconds(compiled, dataset, rows), seconds(torchs, dataset, rows)) for _ in range(repeats)]
    return min(one for one, _ in found), min(one for _, one in found)


if __name__ == "__main__":
    keep_memory()
    torch.set_num_threads(1)
    kernels.WIDEST = 10**9
    print(
        "| width | batch | compiled, ms a step | torch, ms a step | torch / compiled |\n| --- | --- | --- | --- | --- |"
    )
    for width in WIDTHS:
        for batch in BATCHES:
            one, other = compare(width, batch)
            print(f"| {width} | {batch} | {one * 1e3:.2f} | {other * 1e3:.2f} | {other / one:.2f} |", flush=True)
