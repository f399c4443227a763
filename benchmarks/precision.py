"""What mixed precision gains: the gradient of a batch in float32 and with `--precision bf16`, interleaved, on one core.

    python benchmarks/precision.py        a minute; writes results/precision.md

float32 is measured as fedcluster runs it (compiled where it can be) and by torch, so that the two columns of ratios say
what the precision gains and what a run gains.
"""

import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from fedcluster.allocator import keep_memory
from fedcluster.data.dataset import DataSpec
from fedcluster.models import zoo
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.precision import emulated

RESULTS = Path(__file__).parent / "results" / "precision.md"
REPEATS = 15
HEAD = """| model, batch of 32 | float32, ms | float32 by torch, ms | bf16, ms | torch / bf16 | float32 / bf16 |
| --- | --- | --- | --- | --- | --- |"""


class Transformer(nn.Module):
    """One block of width 256 with 4 heads, on 64 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.output = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.output(self.block(x).mean(1))
        return scores


def milliseconds(flat_model: FlatModel, x: Tensor, y: Tensor) -> float:
    """CPU time: others may be using the machine."""
    began = time.process_time()
    flat_model.compute_gradient(x, y)
    return (time.process_time() - began) * 1e3


def compare(name: str, module: nn.Module, shape: tuple[int, ...]) -> str:
    as_run, by_torch, bf16 = FlatModel(module), FlatModel(module), FlatModel(module, precision="bf16")
    by_torch.network = None
    x, y = torch.randn(32, *shape), torch.randint(10, (32,))
    models = as_run, by_torch, bf16
    found = [[milliseconds(model, x, y) for model in models] for _ in range(REPEATS)]
    one, two, half = (min(column) for column in zip(*found, strict=True))
    return f"| {name} | {one:.2f} | {two:.2f} | {half:.2f} | {two / half:.2f} | {one / half:.2f} |"


if __name__ == "__main__":
    keep_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if why := emulated(torch.device("cpu")):
        sys.exit(f"{why}: there is nothing to measure")
    rows = [
        compare("CNN, 28x28", zoo.build("cnn", DataSpec((1, 28, 28), "class", 10), 0), (1, 28, 28)),
        compare("small AlexNet, 32x32", zoo.build("alexnet", DataSpec((3, 32, 32), "class", 10), 0), (3, 32, 32)),
        compare("MLP 784-200-200-10", zoo.build("mlp", DataSpec((784,), "class", 10), 0), (784,)),
        compare("transformer block, 256 wide, 64 tokens", Transformer(), (64, 256)),
    ]
    text = "\n".join([HEAD, *rows])
    RESULTS.write_text(text + "\n")
    print(text)
