"""The gradient as a straight line: forward and backward traced once into the tensor operations that autograd
would run, in its order, without autograd and without modules.

Three rewrites, none of which changes a bit of the result:

- parameters stay where they are in memory, so views of them are taken once, not in every step;
- a gradient is written to its place in the gradient vector by the operation that computes it;
- the value of the loss, which nobody asks for, is not computed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

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

Program = Callable[[Tensor, Tensor], None]


class Loss(nn.Module):
    """The objective as a module, so that its weights can be replaced in a call."""

    def __init__(self, module: nn.Module, objective: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self.objective = module, objective

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.objective(self.module, x, y)

    def at(self, weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        """The objective with these weights in place of the module's own."""
        named = {f"module.{name}": tensor for name, tensor in weights.items()}
        value: Tensor = torch.func.functional_call(self, named, (x, y))
        return value


def straight_line(
    module: nn.Module,
    objective: Callable[[nn.Module, Tensor, Tensor], Tensor],
    weights: dict[str, Tensor],
    gradients: dict[str, Tensor],
    x: Tensor,
    y: Tensor,
) -> Program | None:
    """A function of (x, y), of these shapes, that leaves the gradient of the objective in `gradients`; None for a
    module that this cannot be done for: one that draws random numbers or changes its buffers."""
    names, loss = list(weights), Loss(module, objective)

    @torch.enable_grad()
    def gradient(tensors: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        return list(torch.autograd.grad(loss.at(dict(zip(names, leaves, strict=True)), x, y), leaves))

    try:
        traced = make_fx(gradient, tracing_mode="fake")([weights[name] for name in names], x, y)
    except Exception:  # a module may do anything; what cannot be traced is left to autograd
        return None
    graph = traced.graph
    if any(isinstance(n.target, torch._ops.OpOverload) and unsteady(n.target) for n in graph.nodes):
        return None
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    fixed = dict(zip(inputs, weights.values(), strict=False))
    fold(traced, fixed, rows=len(y), device=x.device)
    graph.eliminate_dead_code()
    place(traced, [gradients[name] for name in names])
    for node in inputs[: len(names)]:
        graph.erase_node(node)
    graph.set_codegen(fx.graph.CodeGen())
    graph.eliminate_dead_code()
    for node in graph.nodes:
        node.target = DIRECT.get(node.target, node.target)
    traced.recompile()
    forward: Program = traced.forward
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
        elif node.target == aten.ones_like.default:
            constant(node, torch.ones((), device=device))
        elif node.target == aten.nll_loss_forward.default:
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
