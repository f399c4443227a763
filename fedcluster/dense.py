"""A chain of linear layers with ReLU between them: a device's steps of plain SGD in one compiled loop, and evaluation.

In a small network the products are too thin for a library made for large ones, and calling it costs as much as they
do. `chain.c` has the whole loop. Its steps are autograd's up to rounding, and it is used from the first batch on or
never: whether it applies depends on the module and the machine alone.
"""

from typing import Any

from torch import Tensor, nn

from fedcluster import compiled
from fedcluster.dataset import Dataset

SCORED = 60  # rows at a time, so that what they need stays in a core's cache


class Chain:
    """Layers of these widths, whose weights and biases, first to last, are the vector w."""

    def __init__(self, library: Any, w: Tensor, sizes: list[int]) -> None:
        self.library, self.w, self.sizes = library, w, sizes
        self.kind, self.room = (0, False), w

    def descend(self, dataset: Dataset, rows: Tensor, lr: float, drift: Tensor | None = None) -> None:
        """A step on the mean cross-entropy of each batch, a row of places in the training set; `drift` is added
        after each."""
        kind = (rows.shape[1], drift is not None)
        if self.kind != kind:
            self.kind, self.room = kind, compiled.room_for(self.library, self.sizes, *kind)
        # asked for anew: sharing a tensor with another process moves it
        samples = compiled.Samples(dataset.x_train, dataset.y_train, dataset.scale, dataset.shift)
        compiled.descend(self.library, self.w, drift, self.sizes, samples, rows, lr, self.room)

    def score(self, x: Tensor, y: Tensor, dataset: Dataset, rows: Tensor) -> list[tuple[float, int]]:
        """The summed cross-entropy and the number of right answers at w, of SCORED of the rows at a time."""
        samples = compiled.Samples(x, y, dataset.scale, dataset.shift)
        return list(zip(*compiled.score(self.library, self.w, self.sizes, samples, rows, SCORED), strict=True))


def chain(module: nn.Module, w: Tensor) -> Chain | None:
    """The chain that a module is whose parameters are views of w, if it is one and can be compiled here."""
    layers = linear_layers(module)
    if not layers or len(layers) > compiled.MOST_LAYERS or w.device.type != "cpu":
        return None
    parts = [part for layer in layers for part in (layer.weight, layer.bias)]
    place = w.data_ptr()
    for part in parts:
        if part.data_ptr() != place:
            return None
        place += part.numel() * part.element_size()
    library = compiled.library()
    if library is None or place != w.data_ptr() + w.numel() * w.element_size():
        return None
    return Chain(library, w, [layers[0].in_features, *(layer.out_features for layer in layers)])


def linear_layers(module: nn.Module) -> list[nn.Linear] | None:
    """The layers of an nn.Sequential of Linear (with bias) and ReLU in turn, perhaps after a Flatten."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return None
    parts = list(module)
    if parts and type(parts[0]) is nn.Flatten and (parts[0].start_dim, parts[0].end_dim) == (1, -1):
        parts = parts[1:]
    layers = [part for part in parts[::2] if type(part) is nn.Linear and part.bias is not None]
    if len(parts) != 2 * len(layers) - 1 or not all(type(part) is nn.ReLU for part in parts[1::2]):
        return None
    parameters = list(module.parameters())
    if len(parameters) != 2 * len(layers) or not all(p.requires_grad for p in parameters):
        return None  # fewer: a weight is used twice
    if any(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks for part in [module, *module]):
        return None
    return layers
