"""The gradient as a straight line: forward and backward traced once into the tensor operations that autograd
would run, in its order, without autograd and without modules.

Tracing costs a process about two seconds, and a step of a small model becomes two to three times as fast, one of a
large model hardly faster. So it waits for many batches of one shape, and a program is used only after it has found
autograd's gradient, faster, on a number of them.

Three rewrites, none of which changes a bit of the result:

- parameters stay where they are in memory, so views of them are taken once, not in every step;
- a gradient is written to its place in the gradient vector by the operation that computes it;
- the value of the loss, which nobody asks for, is not computed.
"""

import math
import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fedcluster.models.flat_model import Loss, Objective, Program

BATCHES = 50  # of a trial
FASTER = 0.8  # of autograd's time; what saves less is not worth a second way

aten = torch.ops.aten

VIEWS = {aten.t.default, aten.view.default, aten.detach.default, aten.alias.default, aten.permute.default}
SAME = {aten.detach.default, aten.alias.default}
# the same operations by their direct bindings, which cost a microsecond less to call
DIRECT: dict[Any, Callable[..., Any]] = {
    aten.addmm.default: torch.addmm,
    aten.mm.default: torch.mm,
    aten.relu.default: torch.relu,
    aten.sum.dim_IntList: torch.sum,
    aten.mm.out: torch.mm,
    aten.sum.IntList_out: torch.sum,
    aten.mul.Tensor: torch.mul,
    aten.add.Tensor: torch.add,
    aten.div.Tensor: torch.div,
    aten.convolution.default: torch.convolution,
    aten._log_softmax.default: torch._log_softmax,
}


class Trial:
    """A program beside autograd, on the same batches, before it takes autograd's place."""

    def __init__(self, program: Program | None) -> None:
        self.program, self.left, self.theirs, self.ours = program, BATCHES, math.inf, math.inf

    def passed(self, x: Tensor, y: Tensor, gradient: Tensor, seconds: float) -> bool:
        """Whether it is over and won. `gradient` is autograd's on this batch, found in so many seconds; it stays."""
        if self.program is None or not self.left:
            return False
        expected, began = gradient.clone(), time.perf_counter()
        try:
            self.program(x, y)
        except Exception:  # what was traced may fit one batch and not another
            self.program = None
        self.ours, self.theirs = min(self.ours, time.perf_counter() - began), min(self.theirs, seconds)
        if not torch.equal(gradient, expected):
            self.program = None
            gradient.copy_(expected)
        self.left -= 1
        return self.program is not None and not self.left and self.ours < FASTER * self.theirs


def straight_line(
    module: nn.Module,
    objective: Objective,
    weights: dict[str, Tensor],
    gradients: dict[str, Tensor],
    x: Tensor,
    y: Tensor,
) -> Program | None:
    """A function of (x, y), of these shapes, that leaves the gradient of the objective in `gradients`; None for a
    module that this cannot be done for, such as one that draws random numbers or changes its buffers."""
    try:  # a module may do anything; what cannot be traced is left to autograd
        return traced(Loss(deepcopy(module), objective), weights, gradients, x, y)
    except Exception:
        return None


def traced(
    loss: Loss, weights: dict[str, Tensor], gradients: dict[str, Tensor], x: Tensor, y: Tensor
) -> Program | None:
    @torch.enable_grad()
    def gradient(tensors: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
        named = dict(zip(weights, (tensor.detach() for tensor in tensors), strict=True))
        leaves = [named[name].requires_grad_() for name in gradients]
        return list(torch.autograd.grad(loss.at(named, x, y), leaves))

    root = make_fx(gradient, tracing_mode="fake")(list(weights.values()), x, y)
    graph = root.graph
    if any(isinstance(n.target, torch._ops.OpOverload) and unsteady(n.target) for n in graph.nodes):
        return None
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    fixed = dict(zip(inputs, weights.values(), strict=False))
    fold(root, fixed, rows=len(y), device=x.device)
    graph.eliminate_dead_code()
    place(root, list(gradients.values()))
    for node in inputs[: len(weights)]:
        graph.erase_node(node)
    graph.set_codegen(fx.graph.CodeGen())
    graph.eliminate_dead_code()
    for node in graph.nodes:
        node.target = DIRECT.get(node.target, node.target)
    root.recompile()
    forward: Program = root.forward
    return forward


def unsteady(operation: Any) -> bool:
    return operation._schema.is_mutable or torch.Tag.nondeterministic_seeded in operation.tags


def fold(root: fx.GraphModule, fixed: dict[fx.Node, Tensor], rows: int, device: torch.device) -> None:
    """Take views of parameters once; see through copies that copy nothing; drop the value of the loss."""

    graph = root.graph

    def constant(node: fx.Node, value: Tensor) -> None:
        name = f"c{len(fixed)}"
        setattr(root, name, value)
        with graph.inserting_before(node):
            held = graph.create_node("get_attr", name)
        node.replace_all_uses_with(held)
        fixed[held] = value

    for node in list(graph.nodes):
        if node.op == "placeholder" and node in fixed:
            constant(node, fixed[node])
        elif node.target in SAME:
            node.replace_all_uses_with(node.args[0])
        elif node.target in VIEWS and node.args[0] in fixed:
            constant(node, node.target(fixed[node.args[0]], *node.args[1:]))
        elif node.target == aten.t.default and getattr(node.args[0], "target", None) == aten.t.default:
            node.replace_all_uses_with(node.args[0].args[0])
        elif node.target == aten.ones_like.default and node.meta["val"].dim() == 0:
            constant(node, torch.ones((), device=device))
        elif node.target == aten.nll_loss_forward.default and node.args[2] is None:
            for part in list(node.users):
                if part.args[1] == 1:  # the total weight: one for each row
                    constant(part, torch.tensor(float(rows), device=device))


def place(root: fx.GraphModule, gradients: list[Tensor]) -> None:
    """Let the operation that computes a gradient write it to its place."""
    graph = root.graph
    output = next(node for node in graph.nodes if node.op == "output")
    for number, (node, gradient) in enumerate(zip(output.args[0], gradients, strict=True)):
        source = node.args[0] if node.target == aten.view.default else node
        if node.target == aten.mm.default and len(node.users) == 1:
            shaped = gradient
        elif source.target == aten.sum.dim_IntList and len(source.users) == 1 and source.args[1:] == ([0], True):
            node, shaped = source, gradient.view(1, -1)
        else:
            shaped = None
        setattr(root, f"g{number}", gradient if shaped is None else shaped)
        with graph.inserting_before(node if shaped is not None else output):
            target = graph.create_node("get_attr", f"g{number}")
        if shaped is not None:
            node.kwargs = {**node.kwargs, "out": target}
            node.target = aten.mm.out if node.target == aten.mm.default else aten.sum.IntList_out
        else:
            with graph.inserting_before(output):
                graph.call_function(aten.copy_.default, (target, node))
    output.args = (None,)
