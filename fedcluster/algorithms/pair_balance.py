"""Balanced order of clusters. Lu, Guo, De Sa: GraB: Finding Provably Better Data Permutations than Random Reshuffling,
NeurIPS 2022; Cha, Lee, Yun: Tighter Lower Bounds for Shuffling SGD, ICML 2023 (in pairs: no mean is needed).

Clusters whose movements cancel come close to each other in the next round. Cycles are taken in pairs; for clusters a, b
of a pair, with movements d_a, d_b of the model,

    v = d_a - d_b;    s = +1 if |r + v| <= |r - v| else -1;    r <- r + s v        r = 0 as a round begins

With s = +1, a takes the first free place at the front of the next round's order, and b the last free place at its back;
with s = -1 it is the other way round. Of an odd number of clusters, the last takes the place that is left. The first
order is drawn at random.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fedcluster.fleet.fleet import Ints
from fedcluster.fleet.schedule import Cycle
from fedcluster.state import State, Tensors


def initial_server_state(start: State, order: Tensor) -> Tensors:
    """`order` [M]: the clusters of round 0, in the order of their cycles."""
    zeros = torch.zeros_like(start.w)
    return {"order": order, "order.next": torch.full_like(order, -1), "order.r": zeros, "order.first": zeros}


def step(before: State, after: State, cycle: Cycle) -> State:
    """Note a cycle's movement; after the second of a pair, give both their places in the next round."""
    server, position, M = after.server, cycle.cycle, before.cycles
    moved = after.w - before.w
    order, following = server["order"], server["order.next"].clone()
    kept: Tensors = {}
    if position % 2:
        v = server["order.first"] - moved
        r = server["order.r"] if position > 1 else torch.zeros_like(v)
        front, back = position // 2, M - 1 - position // 2
        if squares(r + v) <= squares(r - v):
            kept["order.r"] = r + v
        else:
            kept["order.r"] = r - v
            front, back = back, front
        following[front], following[back] = order[position - 1], order[position]
    else:
        kept["order.first"] = moved
        if position == M - 1:
            following[position // 2] = order[position]
    if position == M - 1:
        order, following = following, torch.full_like(following, -1)
    return replace(after, server=server | kept | {"order": order, "order.next": following})


def squares(v: Tensor) -> float:
    return float(v.double().square().sum())


def order_of(state: State) -> Ints | None:
    """The order of the round that is under way, where the state has one."""
    order = state.server.get("order")
    return None if order is None else order.cpu().numpy()
