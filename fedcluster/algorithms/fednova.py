"""FedNova. Wang, Liu, Liang, Joshi, Poor: Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization, NeurIPS 2020.

In a plain average, devices that take more steps weigh more. FedNova normalises their movements first:

    W_new = W + a_eff sum_k p_k (w_k - W) / a_k,    a_eff = sum_k p_k a_k      p_k renormalised over the cohort

a_k is the number of steps tau_k with SGD, ||a_k||_1 = (tau - m (1 - m^tau) / (1 - m)) / (1 - m) with momentum m, and
tau + m ||a_k||_1 of that with Nesterov's. Weight decay is part of the gradients.
Running statistics b_k are averaged with the weights p_k. Server and device both compute tau_k, from the same random
stream or, with epochs, from the device's number of samples, so that it is not sent. All of it follows from means with
the weights p_k / a_k, with A the mean of the models:

    W_new = W + mean(a^2) / mean(a)^2 (A - W),    running statistics: mean(a b_k) / mean(a)
"""

from dataclasses import replace

import torch

from fedcluster.algorithms.fedavg import FedAvg
from fedcluster.experiment import Section
from fedcluster.fleet.schedule import Cycle, steps_of
from fedcluster.state import Accepted, Aggregate, State, Tensors


class FedNova(FedAvg):
    name = "fednova"

    @classmethod
    def local_optimizers(cls, options: Section) -> tuple[str, ...]:
        return "sgd", "momentum"

    def length(self, cycle: Cycle, device: int) -> float:
        """||a_k||_1"""
        steps = steps_of(self.local, self.seed, cycle.round, device, cycle.samples_of(device))
        m = self.local.momentum if self.local.optimizer == "momentum" else 0.0
        length = (steps - m * (1 - m**steps) / (1 - m)) / (1 - m)
        return steps + m * length if self.local.nesterov else length

    def aggregate_spec(self, state: State) -> Tensors:
        size = len(state.model[: state.size])
        return {"model": state.model[:size], "a": state.model.new_zeros(2), "statistics": state.model[size:]}

    def contribution(self, state: State, update: Accepted, cycle: Cycle) -> tuple[Tensors, float]:
        size = len(state.model[: state.size])
        a, w = self.length(cycle, update.device), update.message["model"]
        numbers = torch.tensor([a, a * a], device=w.device)
        return {"model": w[:size], "a": numbers, "statistics": w[size:].double() * a}, update.weight / a

    def combine(self, state: State, aggregate: Aggregate, cycle: Cycle) -> State:
        mean = aggregate.message
        a, square = mean["a"].double().tolist()
        trained = state.model[: state.size].double().lerp(mean["model"].double(), square / a**2)
        return replace(state, model=torch.cat([trained, mean["statistics"].double() / a]).to(state.model.dtype))
