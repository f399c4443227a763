"""The models of the last tau cycles, kept by the server: a ring in which W_t has place t mod tau.

t = j M + K counts the cycles of the run. Before cycle tau, W_{t - tau} is W_0. Each model is a tensor of its own: a
cycle replaces one and copies none. Only the trained part of a model is kept.
"""

from torch import Tensor

from fedcluster.state import Tensors


def initial(w: Tensor, tau: int) -> Tensors:
    return {f"past.{place}": w for place in range(tau)}


def past(server: Tensors, t: int, tau: int) -> Tensor:
    """W_{t - tau}"""
    return server[f"past.{t % tau}"]


def remember(t: int, tau: int, w: Tensor) -> Tensors:
    """The place that W_t takes, that of W_{t - tau}."""
    return {f"past.{t % tau}": w}
