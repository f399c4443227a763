"""FedMAX. Chen, Bhardwaj, Marculescu: FedMAX: Mitigating Activation Divergence for Accurate and
Communication-Efficient Federated Learning, ECML PKDD 2020.

A device keeps the entropy of its last hidden activations a_i high. It minimises

    f_k(w) + beta mean_i sum_j q_ij log q_ij        q_i = softmax(a_i)

the loss minus beta times their mean entropy. a_i is the input of the last linear layer.
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
        """The loss with the penalty. `module` may be a function over a module, whose last linear layer is hooked."""
        seen: list[Tensor] = []
        hook = last_linear(module).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            scores = module(x)
        finally:
            hook.remove()
        log_q = torch.log_softmax(seen[-1].flatten(1).float(), dim=1)
        penalty = (log_q.exp() * log_q).sum(dim=1).mean()
        beta: float = self.options.beta
        return F.cross_entropy(scores, y) + beta * penalty


def last_linear(module: nn.Module) -> nn.Linear:
    layers = [part for part in module.modules() if isinstance(part, nn.Linear)]
    if not layers:
        raise BadExperiment(
            'algorithm.name = "fedmax" needs a model with a linear layer: choose another model or algorithm'
        )
    return layers[-1]
