"""FedProx. Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks,
MLSys 2020.

A device minimises f_k(w) + mu/2 ||w - W||^2, so its gradient is

    g + mu (w - W)
"""

from torch import Tensor

from fedcluster.algorithms.fedavg import FedAvg
from fedcluster.experiment import NonNegative, Section


class FedProx(FedAvg):
    name = "fedprox"

    class Options(Section):
        mu: NonNegative = 0.1

    def correct(self, gradient: Tensor, w: Tensor, received: Tensor) -> None:
        gradient.add_(w, alpha=self.options.mu).sub_(received, alpha=self.options.mu)
