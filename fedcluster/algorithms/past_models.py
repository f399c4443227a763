"""The models of the last tau cycles, kept by the server: a ring in which W_t has place t mod tau.

t = j M + K counts the cycles of the run, also those that fail. Before cycle tau, W_{t - tau} is W_0. Each model is a
tensor of its own: a cycle replaces one and copies none. Only the trained part of a model is kept. Two parts of a run
that look back over the same number of cycles share a ring.
"""

from dataclasses import replace

from torch import Tensor

from fedcluster.state import State, Tensors


def initial(w: Tensor, tau: int) -> Tensors:
    return {key(tau, place): w for place in range(tau)}


def past(server: Tensors, t: int, tau: int) -> Tensor:
    """W_{t - tau}"""
    return server[key(tau, t)]


def step(before: State, after: State) -> State:
    """The state after a cycle, with W_t in the place of W_{t - tau} in every ring."""
    rings = {int(name.split(".")[1]) for name in before.server if name.startswith("past.")}
    return replace(after, server=after.server | {key(tau, before.t): before.w for tau in rings}) if rings else after


def key(tau: int, t: int) -> str:
    return f"past.{tau}.{t % tau}"
