"""FedMAX. Chen, Bhardwaj, Marculescu: FedMAX: Mitigating Activation Divergence for Accurate and
Communication-Efficient Federated Learning, ECML PKDD 2020.

A device keeps the entropy of its last hidden activations a_i high. It minimises

    f_k(w) + beta mean_i sum_j q_ij log q_ij        q_i = softmax(a_i)

the loss minus beta times their mean entropy. a_i is the input of the last linear layer.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fedcluster.algorithms.fedavg import FedAvg
from fedcluster.errors import BadExperiment
from fedcluster.experiment import NonNegative, Section
from fedcluster.models.flat_model import Objective


class FedMax(FedAvg):
    name = "fedmax"
    targets = ("class",)

    class Options(Section):
        beta: NonNegative = 1.0

    def objective(self, loss: Objective) -> Objective:
        beta: float = self.options.beta

        def with_entropy(module: Any, x: Tensor, y: Tensor) -> Tensor:
            """The loss with the penalty. `module` may be a function over modules: its last linear layer is hooked."""
            seen: list[Tensor] = []
            hook = last_linear(module).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
            try:
                value = loss(module, x, y)
            finally:
                hook.remove()
            log_q = torch.log_softmax(seen[-1].flatten(1).float(), dim=1)
            penalty = (log_q.exp() * log_q).sum(dim=1).mean()
            return value + beta * penalty

        return with_entropy


def last_linear(module: nn.Module) -> nn.Linear:
    layers = [part for part in module.modules() if isinstance(part, nn.Linear)]
    if not layers:
        raise BadExperiment(
            'algorithm.name = "fedmax" needs a model with a linear layer: choose another model or algorithm'
        )
    return layers[-1]
