"""The compiled engine: SGD, gradients and evaluation of common models in C, several times as fast as torch.

`network_for(module)` is the interface. It returns None where the engine cannot be used, and then torch does the work.
"""

from fedcluster.models.kernels.library import unavailable_reason
from fedcluster.models.kernels.network import EVALUATION_BATCH, Network, network_for, supports

__all__ = ["EVALUATION_BATCH", "Network", "network_for", "supports", "unavailable_reason"]
