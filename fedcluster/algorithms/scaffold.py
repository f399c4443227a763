"""SCAFFOLD. Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning, ICML 2020.

The server has a control variate c and device k a control variate c_k, both 0 at the start. A local step uses

    g - c_k + c

After its steps the device updates c_k. Option I takes the gradient of all its data at the received model, option II

    c_k+ = c_k - c + (W - w_k) / (E lr)

The server averages the models and updates c so that it stays the weighted mean of the c_k:

    c <- c + sum_{k accepted} p_k (c_k+ - c_k)      p_k not renormalised

A device whose update is missing or refused keeps its old c_k, and so does one whose learning rate is 0. The paper's
global step size is `server.lr`.

With M clusters c is updated M times a round. With `reset = "round"` c and every c_k are 0 at the start of each round;
since a device takes part once a round, it then has no state.
"""

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedcluster.algorithms.fedavg import FedAvg
from fedcluster.experiment import LOCAL_OPTIMIZERS, Section
from fedcluster.fleet.schedule import Cycle
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.local_sgd import Batches, full_gradient, local_sgd
from fedcluster.models.optimizers import with_decay
from fedcluster.state import Aggregate, State, Tensors


class Scaffold(FedAvg):
    name = "scaffold"
    unsupported: ClassVar = {"clip_norm": "its control variates stand for gradients that are not clipped"}

    class Options(Section):
        option: Literal["I", "II"] = "II"
        reset: Literal["never", "round"] = "never"

    @classmethod
    def local_optimizers(cls, options: Section) -> tuple[str, ...]:
        """Option II assumes that a device moves by E lr times its mean gradient, which only SGD does."""
        assert isinstance(options, Scaffold.Options)
        return ("sgd",) if options.option == "II" else LOCAL_OPTIMIZERS

    def overlap_fault(self) -> str | None:
        if self.options.reset == "never":
            return None
        return 'algorithm.reset = "round" resets variates that cycles of the round before still use: use "never"'

    def initial_server_state(self, start: State) -> Tensors:
        return {"variate": torch.zeros_like(start.w)}

    def initial_device_state(self, model: Tensor, size: int) -> Tensors:
        return {} if self.options.reset == "round" else {"variate": torch.zeros_like(model[:size])}

    def start_round(self, state: State) -> Tensors:
        return {"variate": torch.zeros_like(state.w)} if self.options.reset == "round" else {}

    def broadcast(self, state: State) -> Tensors:
        return {"model": state.model, "variate": state.server["variate"]}

    def upload_spec(self, state: State) -> Tensors:
        return {"model": state.model, "variate": state.server["variate"]}

    def train(self, flat_model: FlatModel, received: Tensors, batches: Batches, device_state: Tensors) -> Tensors:
        start, c = received["model"], received["variate"]
        c_k = device_state.get("variate", torch.zeros_like(c))
        gradient_offset = c - c_k
        if self.options.option == "I":
            gradient = full_gradient(flat_model, start, batches)
            new = with_decay(start[..., : flat_model.size], gradient, self.local.l2)
        w = local_sgd(flat_model, start, batches, gradient_offset)
        if self.options.option == "II":
            moved = start[..., : flat_model.size] - w[..., : flat_model.size]
            new = moved.div_(batches.steps * batches.lr).sub_(gradient_offset) if batches.lr else c_k
        if self.options.reset == "never":
            device_state["variate"] = new
        return {"model": w, "variate": new - c_k}

    def combine(self, state: State, aggregate: Aggregate, cycle: Cycle) -> State:
        share = aggregate.weight * float(cycle.weights.sum())  # sum of p_k over the accepted updates
        c = state.server["variate"].add(aggregate.message["variate"], alpha=share)
        return replace(state, model=aggregate.message["model"], server=state.server | {"variate": c})
