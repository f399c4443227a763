"""FedMAX. Chen, Bhardwaj, Marculescu: FedMAX: Mitigating Activation Divergence for Accurate and
Communication-Efficient Federated Learning, ECML PKDD 2020.

Of all models that fit its data, a device takes one whose last hidden activations a_i say least: it minimises

    f_k(w) + beta mean_i sum_j q_ij log q_ij        q_i = softmax(a_i)

that is, the loss minus beta times their mean entropy. a_i is what enters the last linear layer.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcluster.algorithms.fedavg import FedAvg
from fedcluster.errors import BadExperiment
from fedcluster.experiment import Local, NonNegative, Section


class FedMax(FedAvg):
    name = "fedmax"

    class Options(Section):
        beta: NonNegative = 1.0

    def __init__(self, local: Local, options: Section | None = None, seed: int = 0) -> None:
        super().__init__(local, options, seed)
        self.objective = self.with_entropy

    def with_entropy(self, module: Any, x: Tensor, y: Tensor) -> Tensor:
        """`module` may be a function over modules: the layer is found by its place in the module below it."""
        seen: list[Tensor] = []
        hook = last_linear(module).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            scores = module(x)
        finally:
            hook.remove()
        log_q = torch.log_softmax(seen[-1].flatten(1), dim=1)
        penalty = (log_q.exp() * log_q).sum(dim=1).mean()
        beta: float = self.options.beta
        return F.cross_entropy(scores, y) + beta * penalty


def last_linear(module: nn.Module) -> nn.Linear:
    layers = [part for part in module.modules() if isinstance(part, nn.Linear)]
    if not layers:
        raise BadExperiment('algorithm.name = "fedmax" needs a model with a linear layer, and this one has none')
    return layers[-1]
