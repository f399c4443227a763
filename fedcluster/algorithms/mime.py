"""Mime and MimeLite. Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh: Breaking the Centralized Barrier for
Cross-Device Federated Learning, NeurIPS 2021.

The optimizer's statistics s are the server's. Local steps apply them without changing them:

    w <- w - lr U(d, s),    d = g(w) - g(W) + c  in Mime,  d = g(w)  in MimeLite
    s <- V(c, s)            once a cycle, with c the cohort's average gradient at W over all of its data

    sgd        U = d
    momentum   U = (1 - b) d + b m                    V: m <- (1 - b) c + b m
    adam       see `statistics`                      V: m <- b1 m + (1 - b1) c,  v <- b2 v + (1 - b2) c^2,  t <- t + 1
        per_step   U = Adam's step with bias correction, after updating a copy of the statistics with d
        fixed      U = ((1 - b1) d + b1 m) / (sqrt(v) + eps) as in the paper; v starts at 0, without bias correction

Mime needs c before the local steps, and so a phase of its own. MimeLite uploads gradients together with models; with
plain SGD there are no statistics and no gradients are uploaded. Weight decay adds its term to d and, at W, to c.
"""

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedcluster.algorithms.fedavg import FedAvg
from fedcluster.algorithms.pooled_gradient import PooledGradient
from fedcluster.experiment import Local, Section
from fedcluster.fleet.schedule import Cycle
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.local_sgd import Batches, full_gradient, local_sgd
from fedcluster.models.optimizers import with_decay
from fedcluster.state import Aggregate, State, Tensors


class MimeOptimizer:
    """A local step with the server's statistics: w <- w - lr U(d, s)."""

    def __init__(self, local: Local, lr: float, fixed: bool, statistics: Tensors) -> None:
        self.local, self.lr, self.fixed, self.statistics = local, lr, fixed, statistics

    def step(self, w: Tensor, d: Tensor) -> None:
        options, lr, s = self.local, self.lr, self.statistics
        d = with_decay(w, d, options.l2)
        if options.optimizer == "momentum":
            b = options.momentum
            w.add_(d, alpha=-lr * (1 - b)).add_(s["m"], alpha=-lr * b)
        elif options.optimizer == "adam":
            (b1, b2), t = options.betas, float(s["t"]) + 1
            m = s["m"].lerp(d, 1 - b1)
            if self.fixed:
                w.addcdiv_(m, s["v"].sqrt().add_(options.eps), value=-lr)
                return
            v = (s["v"] * b2).addcmul(d, d, value=1 - b2)
            w.addcdiv_(m, v.div_(1 - b2**t).sqrt_().add_(options.eps), value=-lr / (1 - b1**t))
        else:
            w.add_(d, alpha=-lr)


def update_statistics(options: Local, s: Tensors, mean: Tensors, w: Tensor) -> Tensors:
    """V(c, s), with c the cohort's average gradient at w."""
    if options.optimizer == "sgd":
        return {}
    gradient = with_decay(w, mean["gradient"], options.l2)
    if options.optimizer == "momentum":
        return {"m": s["m"].lerp(gradient, 1 - options.momentum)}
    if options.optimizer == "adam":
        b1, b2 = options.betas
        v = (s["v"] * b2).addcmul_(gradient, gradient, value=1 - b2)
        return {"m": s["m"].lerp(gradient, 1 - b1), "v": v, "t": s["t"] + 1}
    return {}


class MimeLite(FedAvg):
    name = "mimelite"
    unsupported: ClassVar = {
        "clip_norm": "the server's statistics are of gradients that are not clipped",
        "nesterov": "its steps have the server's momentum, which does not change from step to step",
    }

    class Options(Section):
        statistics: Literal["per_step", "fixed"] = "per_step"

    @classmethod
    def local_optimizers(cls, options: Section) -> tuple[str, ...]:
        return "sgd", "momentum", "adam"

    def overlap_fault(self) -> str | None:
        if self.local.optimizer == "sgd" or not self.local.l2:
            return None
        return "mimelite would take weight decay at another model than gradients: remove local.weight_decay"

    def initial_server_state(self, start: State) -> Tensors:
        zeros = torch.zeros_like(start.w)
        kinds = {"sgd": {}, "momentum": {"m": zeros}, "adam": {"m": zeros, "v": zeros, "t": zeros[:1]}}
        return kinds[self.local.optimizer]

    def statistics(self, server: Tensors) -> Tensors:
        return {name: tensor for name, tensor in server.items() if name in ("m", "v", "t")}

    def broadcast(self, state: State) -> Tensors:
        return {"model": state.model} | self.statistics(state.server)

    def upload_spec(self, state: State) -> Tensors:
        plain = self.local.optimizer == "sgd"  # has no statistics
        return {"model": state.model} | ({} if plain else {"gradient": state.model[: state.size]})

    def train(self, flat_model: FlatModel, received: Tensors, batches: Batches, device_state: Tensors) -> Tensors:
        plain, start = self.local.optimizer == "sgd", received["model"]
        gradient = {} if plain else {"gradient": full_gradient(flat_model, start, batches)}
        rule = MimeOptimizer(self.local, batches.lr, self.options.statistics == "fixed", self.statistics(received))
        return {"model": local_sgd(flat_model, start, batches, rule=rule)} | gradient

    def combine(self, state: State, aggregate: Aggregate, cycle: Cycle) -> State:
        w = state.model[: state.size]
        server = state.server | update_statistics(self.local, state.server, aggregate.message, w)
        return replace(state, model=aggregate.message["model"], server=server)


class Mime(MimeLite):
    name = "mime"

    @property
    def phases(self) -> tuple[FedAvg, ...]:
        return PooledGradient(self.local, seed=self.seed), self

    def broadcast(self, state: State) -> Tensors:
        """The model was sent in the first phase."""
        return {"gradient": state.server["gradient"]} | self.statistics(state.server)

    def upload_spec(self, state: State) -> Tensors:
        return {"model": state.model}

    def train(self, flat_model: FlatModel, received: Tensors, batches: Batches, device_state: Tensors) -> Tensors:
        pooled = received["gradient"]

        def variance_reduction(gradient: Tensor, w: Tensor, start: Tensor) -> None:
            gradient.sub_(flat_model.gradient_at(start)).add_(pooled)

        rule = MimeOptimizer(self.local, batches.lr, self.options.statistics == "fixed", self.statistics(received))
        return {"model": local_sgd(flat_model, received["model"], batches, correct=variance_reduction, rule=rule)}

    def combine(self, state: State, aggregate: Aggregate, cycle: Cycle) -> State:
        pooled = {"gradient": state.server["gradient"]}
        return super().combine(state, replace(aggregate, message=aggregate.message | pooled), cycle)
