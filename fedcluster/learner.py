"""The model as an algorithm sees it: one vector w, and the gradient of the loss at w on a batch.

A module's parameters, then its floating-point buffers, become views of one flat float32 vector. Broadcast,
update, average and every local rule are then plain arithmetic on vectors, in one call each.
"""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcluster.chain import chain
from fedcluster.errors import BadExperiment

if TYPE_CHECKING:
    from fedcluster.program import Program

WORTH_A_PROGRAM = 200  # batches of one shape; tracing costs about as much as a few hundred steps save
MOST_PROGRAMS = 16  # whole-data batches come in as many shapes as there are devices


Objective = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""What a device minimises: a function of (module, x, y), averaged over the batch."""


def cross_entropy(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module(x), y)


class Learner:
    """A module bound to `w`. `w[:size]` is trained; what follows (running statistics) is averaged along.

    `gradient` has the length of the trained part. Integer buffers (counters) keep their starting values.
    """

    def __init__(self, module: nn.Module, device: str = "cpu", objective: Objective = cross_entropy) -> None:
        self.module = deepcopy(module).to(device)
        self.objective = objective
        parameters = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        fixed = [(name, p) for name, p in self.module.named_parameters() if not p.requires_grad]
        buffers = [(name, b) for name, b in self.module.named_buffers() if b.is_floating_point()]
        self.counters = [(b, b.clone()) for b in self.module.buffers() if not b.is_floating_point()]
        tensors = parameters + fixed + buffers
        if not parameters or any(tensor.dtype != torch.float32 for _, tensor in tensors):
            raise BadExperiment("model.name: a model needs parameters, and all of them in float32")
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors}
        self.size = sum(p.numel() for _, p in parameters)
        self.w = torch.cat([tensor.detach().reshape(-1) for _, tensor in tensors])
        self.gradient = torch.zeros(self.size, device=device)
        self.programs: dict[torch.Size, Program] = {}
        self.seen: Counter[torch.Size] = Counter()
        named_gradients = self.named(self.gradient, partial=True)
        for name, view in self.named(self.w).items():
            owner, _, attribute = name.rpartition(".")
            tensor = getattr(self.module.get_submodule(owner), attribute)
            tensor.data = view
            if name in named_gradients:
                tensor.grad = named_gradients[name]
        self.chain = chain(self.module, self.w) if objective is cross_entropy else None

    @property
    def device(self) -> torch.device:
        return self.w.device

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return self.size

    def named(self, w: Tensor, partial: bool = False) -> dict[str, Tensor]:
        """A vector as views by the names of the module's state dict."""
        views, start = {}, 0
        for name, shape in self.shapes.items():
            end = start + prod(shape)
            if partial and end > len(w):
                break
            views[name] = w[start:end].view(shape)
            start = end
        return views

    def parts(self, w: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What is trained and what is not, by name."""
        trained = self.named(w[: self.size], partial=True)
        return trained, {name: view for name, view in self.named(w).items() if name not in trained}

    def vector(self, named: dict[str, Tensor]) -> Tensor:
        """The reverse: named tensors, of the right shapes, as one new vector."""
        return torch.cat([named[name].detach().reshape(-1).to(self.w) for name in self.shapes])

    def load(self, w: Tensor) -> None:
        """Put the module at w, counters at their start."""
        self.w.copy_(w)
        for counter, start in self.counters:
            counter.copy_(start)

    def differentiate(self, x: Tensor, y: Tensor) -> None:
        """Leave in `gradient` that of the objective on the batch, at the current w.

        Compiled, where the module is a chain. Else by autograd, until a shape of batch has come often enough to be
        worth a program of its own; its gradients are the same to the bit, which is checked when it is made.
        """
        self.batch = x, y
        if self.chain is not None:
            self.chain.differentiate(x, y, self.gradient)
            return
        program = self.programs.get(x.shape)
        if program is not None:
            program(x, y)
            return
        self.gradient.zero_()
        with torch.enable_grad():
            self.objective(self.module, x, y).backward()  # type: ignore[no-untyped-call]
        self.seen[x.shape] += 1
        if self.seen[x.shape] == WORTH_A_PROGRAM and len(self.programs) < MOST_PROGRAMS:
            self.learn_program(x, y)

    def gradient_at(self, point: Tensor) -> Tensor:
        """The gradient on the latest batch at another point; w and its gradient stay as they are."""
        w, gradient = self.w.clone(), self.gradient.clone()
        self.w[..., : self.size] = point
        self.differentiate(*self.batch)
        there = self.gradient.clone()
        self.w.copy_(w)
        self.gradient.copy_(gradient)
        return there

    def learn_program(self, x: Tensor, y: Tensor) -> None:
        """Trace the batch that was just differentiated, and keep the program if it finds the same gradient."""
        from fedcluster.program import straight_line

        weights = self.named(self.w)
        program = straight_line(self.module, self.objective, weights, self.named(self.gradient, partial=True), x, y)
        if program is not None:
            expected = self.gradient.clone()
            program(x, y)
            if torch.equal(self.gradient, expected):
                self.programs[x.shape] = program
            else:
                self.gradient.copy_(expected)
