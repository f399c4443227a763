"""Local optimizers on vectors. A device starts afresh in every cycle: no moments survive it."""

import torch
from torch import Tensor

from fedcluster.experiment import Local


class SGD:
    """w <- w - lr g"""

    def __init__(self, options: Local) -> None:
        self.lr = options.lr

    def step(self, w: Tensor, g: Tensor) -> None:
        w.add_(g, alpha=-self.lr)


class Momentum:
    """v <- momentum v + g;  w <- w - lr v"""

    def __init__(self, options: Local) -> None:
        self.lr, self.momentum = options.lr, options.momentum
        self.v: Tensor | None = None

    def step(self, w: Tensor, g: Tensor) -> None:
        self.v = g.clone() if self.v is None else self.v.mul_(self.momentum).add_(g)
        w.add_(self.v, alpha=-self.lr)


class Adam:
    """m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2
    w <- w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    """

    def __init__(self, options: Local) -> None:
        self.lr, self.eps = options.lr, options.eps
        self.b1, self.b2 = options.betas
        self.t = 0
        self.m: Tensor | None = None
        self.v: Tensor | None = None

    def step(self, w: Tensor, g: Tensor) -> None:
        if self.m is None or self.v is None:
            self.m, self.v = torch.zeros_like(g), torch.zeros_like(g)
        self.t += 1
        self.m.lerp_(g, 1 - self.b1)
        self.v.mul_(self.b2).addcmul_(g, g, value=1 - self.b2)
        root = (self.v / (1 - self.b2**self.t)).sqrt_().add_(self.eps)
        w.addcdiv_(self.m, root, value=-self.lr / (1 - self.b1**self.t))


def optimizer(options: Local) -> SGD | Momentum | Adam:
    kinds: dict[str, type[SGD] | type[Momentum] | type[Adam]] = {"sgd": SGD, "momentum": Momentum, "adam": Adam}
    return kinds[options.optimizer](options)
