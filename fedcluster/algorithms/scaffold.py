"""SCAFFOLD. Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning, ICML 2020.

The server keeps a control variate c, device k its own c_k, both 0 at the start. A local step uses

    g - c_k + c

and then the device renews c_k by option I, the gradient of all its data at the model received, or by option II,

    c_k+ = c_k - c + (W - w_k) / (E lr)

The server averages the models, and c moves by the share that the accepted updates have of the whole fleet, so that it
stays the weighted mean of the c_k:

    c <- c + sum_{k accepted} p_k (c_k+ - c_k)      p_k not renormalised

A device whose update is lost or refused keeps its old c_k. The paper's global step size is `server.lr`.

Under cycling a round is M moves of c. With `reset = "round"` c and every c_k begin each round at 0; as a device takes
part once a round, it then keeps nothing.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from fedcluster.algorithms.aggregation.mean import average_and_total
from fedcluster.algorithms.fedavg import FedAvg
from fedcluster.fleet.schedule import Cycle
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.local_sgd import Batches, full_gradient, local_sgd
from fedcluster.state import Message, State
from fedcluster.training.acceptance import Accepted


class Scaffold(FedAvg):
    def initial_server_state(self, model: Tensor, size: int) -> Message:
        return {"variate": torch.zeros_like(model[:size])}

    def initial_device_state(self, model: Tensor, size: int) -> Message:
        return {} if self.options.reset == "round" else {"variate": torch.zeros_like(model[:size])}

    def variate(self, state: State) -> Tensor:
        c = state.server["variate"]
        return torch.zeros_like(c) if self.options.reset == "round" and state.cycle == 0 else c

    def broadcast(self, state: State) -> Message:
        return {"model": state.model, "variate": self.variate(state)}

    def upload_spec(self, state: State) -> Message:
        return {"model": state.model, "variate": state.server["variate"]}

    def train(self, flat_model: FlatModel, received: Message, batches: Batches, device_state: Message) -> Message:
        start, c = received["model"], received["variate"]
        c_k = device_state.get("variate", torch.zeros_like(c))
        gradient_offset = c - c_k
        if self.options.option == "I":
            new = full_gradient(flat_model, start, batches)
        w = local_sgd(flat_model, start, batches, gradient_offset)
        if self.options.option == "II":
            moved = start[..., : flat_model.size] - w[..., : flat_model.size]
            new = moved.div_(batches.steps * self.options.lr).sub_(gradient_offset)
        if self.options.reset == "never":
            device_state["variate"] = new
        return {"model": w, "variate": new - c_k}

    def combine(self, state: State, updates: Iterable[Accepted], cycle: Cycle) -> State:
        found = average_and_total(((update.weight, update.message) for update in updates), like=self.upload_spec(state))
        if found is None:
            return state
        mean, accepted = found
        share = accepted * float(cycle.weights.sum())  # of the whole fleet
        c = self.variate(state).add(mean["variate"], alpha=share)
        return replace(state, model=mean["model"], server=state.server | {"variate": c})
