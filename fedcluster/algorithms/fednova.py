"""FedNova. Wang, Liu, Liang, Joshi, Poor: Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization, NeurIPS 2020.

Devices that take more steps would pull the average towards themselves. Their movements are normalised first:

    W_new = W + a_eff sum_k p_k (w_k - W) / a_k,    a_eff = sum_k p_k a_k      p_k renormalised over the cohort

a_k is the number of steps tau_k with SGD and ||a_k||_1 = (tau - m (1 - m^tau) / (1 - m)) / (1 - m) with momentum m.
Running statistics b_k are averaged with the weights p_k. Both sides draw tau_k from the same stream, so that the server
need not be told, and need not believe it. With weights p_k / a_k, of which A is the average of the models, everything
comes from averages:

    W_new = W + mean(a^2) / mean(a)^2 (A - W),    running statistics: mean(a b_k) / mean(a)
"""

from collections.abc import Iterable
from dataclasses import replace

import torch

from fedcluster.algorithms.aggregation.mean import average
from fedcluster.algorithms.fedavg import FedAvg
from fedcluster.fleet.schedule import Cycle, steps_of
from fedcluster.state import Message, State
from fedcluster.training.acceptance import Accepted


class FedNova(FedAvg):
    def length(self, round: int, device: int) -> float:
        """||a_k||_1"""
        steps = steps_of(self.options, self.seed, round, device)
        m = self.options.momentum if self.options.optimizer == "momentum" else 0.0
        return (steps - m * (1 - m**steps) / (1 - m)) / (1 - m)

    def combine(self, state: State, updates: Iterable[Accepted], cycle: Cycle) -> State:
        size = len(state.model[: state.size])

        def normalised() -> Iterable[tuple[float, Message]]:
            for update in updates:
                a = self.length(cycle.round, update.device)
                w = update.message["model"]
                numbers = torch.tensor([a, a * a], device=w.device)
                yield update.weight / a, {"model": w[:size], "a": numbers, "statistics": w[size:].double() * a}

        like = {"model": state.model[:size], "a": state.model.new_zeros(2), "statistics": state.model[size:]}
        mean = average(normalised(), like)
        if mean is None:
            return state
        a, square = mean["a"].double().tolist()
        trained = state.model[:size].double().lerp(mean["model"].double(), square / a**2)
        return replace(state, model=torch.cat([trained, mean["statistics"].double() / a]).to(state.model.dtype))
