"""Plain SGD on a chain of linear layers with ReLU between them, its backward pass written by hand.

In a small network a step is mostly memory traffic around the matrix products. Here the product that would give a
layer's gradient adds it to the weights at once,

    W <- W - lr d^T a        d: gradient at the layer's output, a: the layer's input

so that a gradient is neither written nor read. It is autograd's step, rounded in other places, and it is taken from
the first batch on or never: whether it applies depends on the module alone.
"""

import torch
from torch import Tensor, nn

LARGE = 10_000  # weights; for less a product may add its terms to them one by one, which loses the small ones
threshold_backward = torch.ops.aten.threshold_backward.grad_input


class Chain:
    """The layers of a module, first to last, as views of its weights."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        self.weights = [layer.weight.data for layer in layers]
        self.transposed = [weight.t() for weight in self.weights]
        self.biases = [None if layer.bias is None else layer.bias.data for layer in layers]
        self.one_hot = torch.eye(len(self.weights[-1]), device=self.weights[-1].device)
        self.room: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    def descend(self, x: Tensor, y: Tensor, lr: float) -> None:
        """One step on the mean cross-entropy of a batch."""
        outputs, slopes = self.room.get(len(x)) or self.make_room(len(x))
        below = x = x.flatten(1)
        for weight, bias, output in zip(self.transposed, self.biases, outputs, strict=True):
            if below is not x:
                below.relu_()
            torch.mm(below, weight, out=output)
            if bias is not None:
                output.add_(bias)
            below = output
        d = torch.softmax(below, 1).sub_(self.one_hot.index_select(0, y)).mul_(-lr / len(x))
        for i in reversed(range(len(outputs))):
            layer, above, bias = outputs[i - 1] if i else x, d, self.biases[i]
            if i:
                d = torch.mm(above, self.weights[i], out=slopes[i - 1])
                threshold_backward(d, layer, 0, grad_input=d)
            if self.weights[i].numel() >= LARGE:
                self.weights[i].addmm_(above.t(), layer)
            else:
                self.weights[i].add_(torch.mm(above.t(), layer))
            if bias is not None:
                bias.add_(above.sum(0))

    def make_room(self, rows: int) -> tuple[list[Tensor], list[Tensor]]:
        """Where the layers' outputs and the gradients at them go, for batches of this size."""
        outputs = [weight.new_empty(rows, len(weight)) for weight in self.weights]
        self.room = {rows: (outputs, [torch.empty_like(output) for output in outputs[:-1]])}
        return self.room[rows]


def chain(module: nn.Module) -> Chain | None:
    """The chain that a module is: an nn.Sequential of Linear and ReLU in turn, perhaps after a Flatten."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return None
    parts = list(module)
    if parts and type(parts[0]) is nn.Flatten and (parts[0].start_dim, parts[0].end_dim) == (1, -1):
        parts = parts[1:]
    layers = [part for part in parts[::2] if type(part) is nn.Linear]
    if len(parts) != 2 * len(layers) - 1 or not all(type(part) is nn.ReLU for part in parts[1::2]):
        return None
    parameters = list(module.parameters())
    wanted = sum(1 + (layer.bias is not None) for layer in layers)  # fewer when a weight is used twice
    if len(parameters) != wanted or not all(p.requires_grad for p in parameters):
        return None
    if any(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks for part in [module, *module]):
        return None
    return Chain(layers)
