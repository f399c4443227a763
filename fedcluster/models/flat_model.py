"""The model as an algorithm sees it: one vector w, and the gradient of the loss at w on a batch.

A module's trainable parameters, then its floating-point buffers, become views of one flat float32 vector. Broadcast,
update, average and every local rule are then plain arithmetic on vectors, in one call each. Frozen parameters
(`requires_grad=False`) stay in the module: they are not part of w, and never sent, averaged or kept per update.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from hashlib import sha256
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcluster.errors import BadExperiment
from fedcluster.models.kernels import network_for, supports
from fedcluster.models.precision import in_bf16

Objective = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""What a device minimises: a function of (module, x, y), averaged over the batch."""


def output_tensor(returned: Any) -> Tensor:
    """The outputs among what a model returned: a tensor, the first part of a tuple, or the `logits` of a dict or of a
    Hugging Face output."""
    output = returned
    if isinstance(returned, Mapping):
        output = returned.get("logits")
    elif isinstance(returned, list | tuple) and returned:
        output = returned[0]
    elif not isinstance(returned, Tensor):
        output = getattr(returned, "logits", None)
    if not isinstance(output, Tensor):
        raise BadExperiment(
            f"model.name: the model returns a {type(returned).__name__} without outputs: it must return a tensor, a "
            "tuple whose first part is one, or a dict with logits"
        )
    return output


def cross_entropy(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output_tensor(module(x)), y)


class Loss(nn.Module):
    """The objective as a module, so that its weights can be replaced in a call."""

    def __init__(self, module: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.module, self.objective = module, objective

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.objective(self.module, x, y)

    def at(self, weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        """The objective with these weights in place of the module's own."""
        named = {f"module.{name}": tensor for name, tensor in weights.items()}
        value: Tensor = torch.func.functional_call(self, named, (x, y))
        return value


class FlatModel:
    """A module bound to `w` = [trainable parameters, floating-point buffers].

    `w[:size]` is trained; the buffers that follow (running statistics) are averaged along with it. `gradient` has the
    length of the trained part. Integer buffers (counters) keep their starting values. `frozen` has the frozen
    parameters by name, in whatever type the module has them. With `precision` "bf16" gradients are computed in mixed
    precision (see `precision`); w and `gradient` are always float32.
    """

    def __init__(
        self,
        module: nn.Module,
        device: str = "cpu",
        objective: Objective = cross_entropy,
        precision: str = "float32",
    ) -> None:
        self.module = deepcopy(module).to(device)
        self.precision = precision
        self.objective = in_bf16(objective) if precision == "bf16" else objective
        parameters = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        self.frozen = {name: p.detach() for name, p in self.module.named_parameters() if not p.requires_grad}
        buffers = [(name, b) for name, b in self.module.named_buffers() if b.is_floating_point()]
        self.counters = {name: (b, b.clone()) for name, b in self.module.named_buffers() if not b.is_floating_point()}
        tensors = parameters + buffers
        if not parameters or any(tensor.dtype != torch.float32 for _, tensor in tensors):
            raise BadExperiment(
                "model.name: a model needs parameters to train, and its trainable parameters and floating-point "
                "buffers must be float32"
            )
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors}
        names = {id(tensor): name for name, tensor in self.module.named_parameters()}
        names |= {id(tensor): name for name, tensor in self.module.named_buffers()}
        # a state dict's keys: several for tied weights, none for a buffer that is not persistent
        state = self.module.state_dict(keep_vars=True).items()
        self.keys = {key: names[id(tensor)] for key, tensor in state if id(tensor) in names}
        self.size = sum(p.numel() for _, p in parameters)
        self.w = torch.cat([tensor.detach().reshape(-1) for _, tensor in tensors])
        self.gradient = torch.zeros(self.size, device=device)
        self.noise: list[Tensor] = []  # torch's generators before the latest batch, where a batch may draw from them
        named_gradients = self.named(self.gradient, partial=True)
        for name, view in self.named(self.w).items():
            owner, _, attribute = name.rpartition(".")
            tensor = getattr(self.module.get_submodule(owner), attribute)
            tensor.data = view
            if name in named_gradients:
                tensor.grad = named_gradients[name]
        self.network = network_for(self.module) if self.could_be_compiled else None

    @property
    def arithmetic(self) -> str:
        """Whose rounding the steps have: the compiled loop's, torch's, or that of torch in bfloat16."""
        if self.precision == "bf16":
            return "bf16 torch"
        return "torch" if self.network is None else "compiled"

    @property
    def device(self) -> torch.device:
        return self.w.device

    @property
    def could_be_compiled(self) -> bool:
        """Whether the compiled loop has all that the model and its objective need."""
        return self.objective is cross_entropy and self.device.type == "cpu" and supports(self.module)

    @property
    def parameters(self) -> int:
        """The number of trainable parameters."""
        return self.size

    def frozen_digest(self) -> str | None:
        """SHA-256 of the frozen parameters; None if there are none."""
        if not self.frozen:
            return None
        digest = sha256()
        for name, tensor in sorted(self.frozen.items()):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

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
        """The trained parameters and the buffers of w, by name."""
        trained = self.named(w[: self.size], partial=True)
        return trained, {name: view for name, view in self.named(w).items() if name not in trained}

    def vector(self, named: dict[str, Tensor]) -> Tensor:
        """The reverse: named tensors, of the right shapes, as one new vector."""
        return torch.cat([named[name].detach().reshape(-1).to(self.w) for name in self.shapes])

    def state_dict(self, w: Tensor) -> dict[str, Tensor]:
        """The module's whole state dict at w, on the CPU."""
        values = self.named(w) | self.frozen | {name: start for name, (_, start) in self.counters.items()}
        return {key: values[name].clone().cpu() for key, name in self.keys.items()}

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the state dict's tensors, by key. Integer buffers are left out."""
        shapes = self.shapes | {name: tuple(tensor.shape) for name, tensor in self.frozen.items()}
        return {key: shapes[name] for key, name in self.keys.items() if name in shapes}

    def from_state_dict(self, tensors: dict[str, Tensor]) -> Tensor:
        """The vector w of a state dict; ValueError names a key that does not fit.

        Of tied weights one key is enough. Frozen parameters must be the model's own. Integer buffers are not read: they
        keep the values that the module is built with.
        """
        found: dict[str, Tensor] = {}
        shapes = self.state_shapes()
        for key, tensor in tensors.items():
            name = self.keys.get(key)
            if name in self.counters:
                continue
            if name is None or tuple(tensor.shape) != shapes[key]:
                raise ValueError(key)
            tied = found.setdefault(name, tensor)
            if tied is not tensor and not torch.equal(tied, tensor):
                raise ValueError(key)
        for key, name in self.keys.items():
            if name not in found and name not in self.counters:
                raise ValueError(key)
            own = self.frozen.get(name)
            if own is not None and not torch.equal(found[name].to(own), own):
                raise ValueError(key)
        return self.vector(self.named(self.w) | found)

    def load_frozen(self, tensors: dict[str, Tensor]) -> None:
        """Take the frozen parameters of a state dict, where it has them in the right shape."""
        for key, name in self.keys.items():
            own = self.frozen.get(name)
            if own is not None and key in tensors and tensors[key].shape == own.shape:
                own.copy_(tensors[key])

    def load(self, w: Tensor) -> None:
        """Put the module at w, counters at their start."""
        self.w.copy_(w)
        for counter, start in self.counters.values():
            counter.copy_(start)

    def compute_gradient(self, x: Tensor, y: Tensor) -> None:
        """Leave in `gradient` that of the objective on the batch, at the current w.

        The compiled network computes it if there is one, otherwise autograd.
        """
        self.batch = x, y
        if self.network is not None:
            self.network.compute_gradient(x, y, self.gradient)
            return
        self.noise = random_state(self.device)
        self.gradient.zero_()
        with torch.enable_grad():
            self.objective(self.module, x, y).backward()  # type: ignore[no-untyped-call]

    def gradient_at(self, point: Tensor) -> Tensor:
        """The gradient at another point on the latest batch, with the same random numbers (dropout masks).

        w, its gradient, the counters and torch's generator stay as they are.
        """
        w, gradient = self.w.clone(), self.gradient.clone()
        counts = [counter.clone() for counter, _ in self.counters.values()]
        noise, now = self.noise, random_state(self.device) if self.noise else []
        self.w[..., : self.size] = point
        set_random_state(self.device, noise)
        self.compute_gradient(*self.batch)
        set_random_state(self.device, now)
        self.noise = noise
        there = self.gradient.clone()
        self.w.copy_(w)
        self.gradient.copy_(gradient)
        for (counter, _), count in zip(self.counters.values(), counts, strict=True):
            counter.copy_(count)
        return there


def random_state(device: torch.device) -> list[Tensor]:
    """The state of torch's generators that an operation on `device` may draw from."""
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])


def set_random_state(device: torch.device, states: list[Tensor]) -> None:
    if states:
        torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)
