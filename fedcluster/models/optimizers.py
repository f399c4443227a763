"""Local optimizers on vectors. A device starts afresh in every cycle; centralized training goes on with its moments."""

import torch
from torch import Tensor

from fedcluster.experiment import Local
from fedcluster.state import Message


class SGD:
    """w <- w - lr g"""

    def __init__(self, options: Local, moments: Message) -> None:
        self.lr = options.lr

    def step(self, w: Tensor, g: Tensor) -> None:
        w.add_(g, alpha=-self.lr)

    def moments(self) -> Message:
        return {}


class Momentum:
    """v <- momentum v + g;  w <- w - lr v"""

    def __init__(self, options: Local, moments: Message) -> None:
        self.lr, self.momentum = options.lr, options.momentum
        self.v = moments["v"].clone() if moments else None

    def step(self, w: Tensor, g: Tensor) -> None:
        self.v = g.clone() if self.v is None else self.v.mul_(self.momentum).add_(g)
        w.add_(self.v, alpha=-self.lr)

    def moments(self) -> Message:
        return {} if self.v is None else {"v": self.v}


class Adam:
    """m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2
    w <- w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    """

    def __init__(self, options: Local, moments: Message) -> None:
        self.lr, self.eps = options.lr, options.eps
        self.b1, self.b2 = options.betas
        self.t = int(moments["t"]) if moments else 0
        self.m = moments["m"].clone() if moments else None
        self.v = moments["v"].clone() if moments else None

    def step(self, w: Tensor, g: Tensor) -> None:
        if self.m is None or self.v is None:
            self.m, self.v = torch.zeros_like(g), torch.zeros_like(g)
        self.t += 1
        self.m.lerp_(g, 1 - self.b1)
        self.v.mul_(self.b2).addcmul_(g, g, value=1 - self.b2)
        root = (self.v / (1 - self.b2**self.t)).sqrt_().add_(self.eps)
        w.addcdiv_(self.m, root, value=-self.lr / (1 - self.b1**self.t))

    def moments(self) -> Message:
        return {} if self.m is None or self.v is None else {"m": self.m, "v": self.v, "t": torch.tensor([self.t])}


def optimizer(options: Local, moments: Message | None = None) -> SGD | Momentum | Adam:
    """The optimizer of the experiment, at its start or going on with what `moments()` gave."""
    kinds: dict[str, type[SGD] | type[Momentum] | type[Adam]] = {"sgd": SGD, "momentum": Momentum, "adam": Adam}
    return kinds[options.optimizer](options, moments or {})


def no_moments(options: Local, w: Tensor) -> Message:
    """The moments of the experiment's optimizer before its first step."""
    zeros = torch.zeros_like(w)
    kinds = {
        "sgd": {},
        "momentum": {"v": zeros},
        "adam": {"m": zeros, "v": zeros, "t": torch.zeros(1, dtype=torch.int64)},
    }
    return kinds[options.optimizer]
