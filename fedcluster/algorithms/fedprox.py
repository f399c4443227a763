"""FedProx. Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks,
MLSys 2020.

A device minimises f_k(w) + mu/2 ||w - W||^2, so its gradient is

    g + mu (w - W)
"""

from torch import Tensor

from fedcluster.algorithms.fedavg import FedAvg


class FedProx(FedAvg):
    def __init__(self, mu: float) -> None:
        super().__init__(self.pull)
        self.mu = mu

    def pull(self, gradient: Tensor, w: Tensor, received: Tensor) -> None:
        gradient.add_(w, alpha=self.mu).sub_(received, alpha=self.mu)
