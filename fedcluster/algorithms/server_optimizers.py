"""Server optimizers. Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification, 2019 (avgm); Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: Adaptive Federated
Optimization, ICLR 2021 (adagrad, adam, yogi); Wang, Ji: A Unified Analysis of Federated Learning with Arbitrary Client
Participation, NeurIPS 2022 (amplified). round_momentum is our own.

The average movement of a cycle, D = W_combined - W_t, is used as a negative gradient, with any algorithm:

    none                                                 W <- W + lr D
    avgm                  m <- b1 m + D                  W <- W + lr m
    adagrad, adam, yogi   m <- b1 m + (1 - b1) D         W <- W + lr m / (sqrt(v) + tau)
        adagrad   v <- v + D^2
        adam      v <- b2 v + (1 - b2) D^2
        yogi      v <- v - (1 - b2) D^2 sign(v - D^2)    v starts at tau^2, m at 0; no bias correction

As in the paper, adagrad's default is b1 = 0. Movements from cluster to cluster differ mostly by what the
clusters differ in; what they add up to over a round is progress. Two optimizers therefore look back over a round:

    round_momentum       W <- W + lr D + b1 m
        memory = "held"       m = (A - A') / M, the mean movement of the last round's cycles, for a whole round
        memory = "sliding"    m = (W_t - W_{t - M}) / M, the mean movement of the last M cycles
    amplified            W <- A + lr (W - A)     after the last cycle of a round

A and A' are W as this round and the one before it began; both are W_0 in the first round, as is W_{t - M} before cycle
M. Where clusters are shuffled, the last M cycles have some clusters twice and others not at all, and a round has each
once: "held" is the default. A cycle that fails leaves the model as it is, and counts as one of the last M. Running
statistics of a model are averaged, not optimized.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fedcluster.algorithms import past_models
from fedcluster.experiment import Server
from fedcluster.state import State, Tensors


class ServerOptimizer:
    """Makes the next model of what a cycle's updates were combined to."""

    def __init__(self, options: Server) -> None:
        self.options = options

    def initial_server_state(self, start: State) -> Tensors:
        """What the optimizer keeps from cycle to cycle, before the first, which begins at `start`."""
        return {}

    def start_round(self, state: State) -> Tensors:
        """What the optimizer changes of it as a round begins."""
        return {}

    def step(self, before: State, combined: State, lr: float) -> State:
        """The state after a cycle that went from `before` to `combined`, at this rate."""
        if combined.model is before.model:
            return combined
        w, kept = self.optimize(before, combined, lr)
        model = combined.model.clone()
        model[: combined.size] = w
        return replace(combined, model=model, server=combined.server | kept)

    def optimize(self, before: State, combined: State, lr: float) -> tuple[Tensor, Tensors]:
        """The trained part of the next model, and what the optimizer keeps."""
        return scaled(before, combined, lr), {}


def scaled(before: State, combined: State, lr: float) -> Tensor:
    """W + lr D, which with lr = 1 is the combined model to the bit."""
    return combined.w if lr == 1.0 else before.w + lr * (combined.w - before.w)


class AvgM(ServerOptimizer):
    def initial_server_state(self, start: State) -> Tensors:
        return {"server.m": torch.zeros_like(start.w)}

    def optimize(self, before: State, combined: State, lr: float) -> tuple[Tensor, Tensors]:
        m = combined.server["server.m"].mul(self.options.betas[0]).add_(combined.w - before.w)
        return before.w + lr * m, {"server.m": m}


class Adaptive(ServerOptimizer):
    """adagrad, adam, yogi"""

    def initial_server_state(self, start: State) -> Tensors:
        m = torch.zeros_like(start.w)
        return {"server.m": m, "server.v": torch.full_like(m, self.options.tau**2)}

    def optimize(self, before: State, combined: State, lr: float) -> tuple[Tensor, Tensors]:
        options, (b1, b2) = self.options, self.options.betas
        d = combined.w - before.w
        m, v, square = combined.server["server.m"].lerp(d, 1 - b1), combined.server["server.v"], d * d
        if options.optimizer == "adagrad":
            v = v + square
        elif options.optimizer == "adam":
            v = v.lerp(square, 1 - b2)
        else:
            v = v - (1 - b2) * square * torch.sign(v - square)
        return before.w.addcdiv(m, v.sqrt().add_(options.tau), value=lr), {"server.m": m, "server.v": v}


class RoundMomentum(ServerOptimizer):
    def initial_server_state(self, start: State) -> Tensors:
        return past_models.initial(start.w, start.cycles)

    def optimize(self, before: State, combined: State, lr: float) -> tuple[Tensor, Tensors]:
        M = before.cycles
        m = (before.w - past_models.past(before.server, before.t, M)).div_(M)
        return scaled(before, combined, lr).add(m, alpha=self.options.betas[0]), {}


class HeldRoundMomentum(ServerOptimizer):
    def initial_server_state(self, start: State) -> Tensors:
        return {"server.m": torch.zeros_like(start.w), "server.round": start.w}

    def start_round(self, state: State) -> Tensors:
        m = (state.w - state.server["server.round"]).div_(state.cycles)
        return {"server.m": m, "server.round": state.w}

    def optimize(self, before: State, combined: State, lr: float) -> tuple[Tensor, Tensors]:
        return scaled(before, combined, lr).add(before.server["server.m"], alpha=self.options.betas[0]), {}


class Amplified(ServerOptimizer):
    def initial_server_state(self, start: State) -> Tensors:
        return {"server.round": start.w}

    def start_round(self, state: State) -> Tensors:
        return {"server.round": state.w}

    def optimize(self, before: State, combined: State, lr: float) -> tuple[Tensor, Tensors]:
        if before.cycle < before.cycles - 1:
            return combined.w, {}
        return combined.w.add(combined.w - before.server["server.round"], alpha=lr - 1), {}


def build(options: Server) -> ServerOptimizer | None:
    """The optimizer of [server]; None where every cycle's combined model is taken as it is."""
    if (options.optimizer, options.lr, options.schedule) == ("none", 1.0, None):
        return None
    if options.optimizer == "round_momentum" and options.memory == "held":
        return HeldRoundMomentum(options)
    return OPTIMIZERS[options.optimizer](options)


OPTIMIZERS: dict[str, type[ServerOptimizer]] = {
    "none": ServerOptimizer,
    "avgm": AvgM,
    "adagrad": Adaptive,
    "adam": Adaptive,
    "yogi": Adaptive,
    "round_momentum": RoundMomentum,
    "amplified": Amplified,
}
