"""Server optimizers. Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification, 2019 (avgm); Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: Adaptive Federated
Optimization, ICLR 2021 (adagrad, adam, yogi).

The average movement of a cycle, D = W_combined - W, is used as a negative gradient, with any algorithm:

    none                                                 W <- W + lr D
    avgm                  m <- b1 m + D                  W <- W + lr m
    adagrad, adam, yogi   m <- b1 m + (1 - b1) D         W <- W + lr m / (sqrt(v) + tau)
        adagrad   v <- v + D^2
        adam      v <- b2 v + (1 - b2) D^2
        yogi      v <- v - (1 - b2) D^2 sign(v - D^2)    v starts at tau^2, m at 0; no bias correction

As in the paper, adagrad's default is b1 = 0. Running statistics of a model are averaged, not optimized.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fedcluster.experiment import Server
from fedcluster.state import Message, State


class ServerOptimizer:
    def __init__(self, options: Server) -> None:
        self.options = options

    def initial_server_state(self, model: Tensor, size: int) -> Message:
        m = torch.zeros_like(model[:size])
        if self.options.optimizer == "none":
            return {}
        if self.options.optimizer == "avgm":
            return {"server.m": m}
        return {"server.m": m, "server.v": torch.full_like(m, self.options.tau**2)}

    def step(self, before: State, combined: State) -> State:
        """The optimizer's step from `before` along the movement to `combined`."""
        if combined.model is before.model:
            return combined
        options, (b1, b2) = self.options, self.options.betas
        server, size = combined.server, combined.size
        d = combined.model[:size] - before.model[:size]
        model = combined.model.clone()
        if options.optimizer == "none":
            model[:size] = before.model[:size] + options.lr * d
            return replace(combined, model=model)
        if options.optimizer == "avgm":
            m = server["server.m"].mul(b1).add_(d)
            model[:size] = before.model[:size] + options.lr * m
            return replace(combined, model=model, server=server | {"server.m": m})
        m, v = server["server.m"].lerp(d, 1 - b1), server["server.v"]
        square = d * d
        if options.optimizer == "adagrad":
            v = v + square
        elif options.optimizer == "adam":
            v = v.lerp(square, 1 - b2)
        else:
            v = v - (1 - b2) * square * torch.sign(v - square)
        model[:size] = before.model[:size].addcdiv(m, v.sqrt().add_(options.tau), value=options.lr)
        return replace(combined, model=model, server=server | {"server.m": m, "server.v": v})
