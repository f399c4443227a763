"""Local optimizers on vectors, step by step those of torch.optim. A device starts afresh in every cycle; centralized
training keeps its moments.

With sgd, momentum and adam, weight decay is coupled, as in torch: it adds `weight_decay` w to the gradient. It is then
part of the loss, f(w) + weight_decay/2 ||w||^2, also where an algorithm computes other gradients of it. With adamw it
is decoupled: w shrinks by itself.
"""

import torch
from torch import Tensor

from fedcluster.experiment import Local
from fedcluster.state import Tensors

FACTOR = "rate_factor"  # the name in a broadcast of what multiplies `local.lr`


def learning_rate(options: Local, received: Tensors) -> float:
    """The learning rate of a cycle's local steps: the server sends its factor where that may be another than 1."""
    return options.lr * float(received[FACTOR]) if FACTOR in received else options.lr


def clip_norm_(g: Tensor, max_norm: float) -> None:
    """Scale a gradient, or every row of a stack of them, down to `max_norm`: torch.nn.utils.clip_grad_norm_."""
    norm = torch.linalg.vector_norm(g, dim=-1, keepdim=True)
    g.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))


def with_decay(w: Tensor, g: Tensor, decay: float) -> Tensor:
    """g + decay w"""
    return g.add(w, alpha=decay) if decay else g


class SGD:
    """w <- w - lr g"""

    def __init__(self, options: Local, lr: float, moments: Tensors) -> None:
        self.lr, self.decay = lr, options.l2

    def step(self, w: Tensor, g: Tensor) -> None:
        w.add_(with_decay(w, g, self.decay), alpha=-self.lr)

    def moments(self) -> Tensors:
        return {}


class Momentum:
    """v <- momentum v + g;  w <- w - lr v, or with nesterov  w <- w - lr (g + momentum v)"""

    def __init__(self, options: Local, lr: float, moments: Tensors) -> None:
        self.lr, self.decay, self.momentum, self.nesterov = lr, options.l2, options.momentum, options.nesterov
        self.v = moments["v"].clone() if moments else None

    def step(self, w: Tensor, g: Tensor) -> None:
        g = with_decay(w, g, self.decay)
        self.v = g.clone() if self.v is None else self.v.mul_(self.momentum).add_(g)
        w.add_(g.add(self.v, alpha=self.momentum) if self.nesterov else self.v, alpha=-self.lr)

    def moments(self) -> Tensors:
        return {} if self.v is None else {"v": self.v}


class Adam:
    """m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2
    w <- w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    """

    def __init__(self, options: Local, lr: float, moments: Tensors) -> None:
        self.lr, self.decay, self.eps = lr, options.decay, options.eps
        self.b1, self.b2 = options.betas
        self.t = int(moments["t"]) if moments else 0
        self.m = moments["m"].clone() if moments else None
        self.v = moments["v"].clone() if moments else None

    def step(self, w: Tensor, g: Tensor) -> None:
        self.move(w, with_decay(w, g, self.decay))

    def move(self, w: Tensor, g: Tensor) -> None:
        if self.m is None or self.v is None:
            self.m, self.v = torch.zeros_like(g), torch.zeros_like(g)
        self.t += 1
        self.m.lerp_(g, 1 - self.b1)
        self.v.mul_(self.b2).addcmul_(g, g, value=1 - self.b2)
        root = (self.v / (1 - self.b2**self.t)).sqrt_().add_(self.eps)
        w.addcdiv_(self.m, root, value=-self.lr / (1 - self.b1**self.t))

    def moments(self) -> Tensors:
        return {} if self.m is None or self.v is None else {"m": self.m, "v": self.v, "t": torch.tensor([self.t])}


class AdamW(Adam):
    """w <- w - lr weight_decay w, then a step of Adam."""

    def step(self, w: Tensor, g: Tensor) -> None:
        w.mul_(1 - self.lr * self.decay)
        self.move(w, g)


def optimizer(options: Local, lr: float, moments: Tensors | None = None) -> SGD | Momentum | Adam:
    """The experiment's optimizer at this learning rate, new or with the moments that `moments()` gave."""
    kinds: dict[str, type[SGD] | type[Momentum] | type[Adam]] = {
        "sgd": SGD,
        "momentum": Momentum,
        "adam": Adam,
        "adamw": AdamW,
    }
    return kinds[options.optimizer](options, lr, moments or {})


def no_moments(options: Local, w: Tensor) -> Tensors:
    """The moments of the experiment's optimizer before its first step."""
    zeros = torch.zeros_like(w)
    adam = {"m": zeros, "v": zeros, "t": torch.zeros(1, dtype=torch.int64)}
    kinds = {"sgd": {}, "momentum": {"v": zeros}, "adam": adam, "adamw": adam}
    return kinds[options.optimizer]
