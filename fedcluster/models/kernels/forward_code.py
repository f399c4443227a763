"""The layers that a module applies one after the other, also where its class has a `forward` of its own.

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        return self.output(torch.flatten(x, 1))

is the chain conv, ReLU, MaxPool2d(2), Flatten, output. torch.fx records such a method with a symbolic input. What it
records is all that the method can ever do only if the method has no branches and depends on nothing but its submodules
and its input. So its code is looked at first, and whatever is not known to be harmless is left to autograd.
"""

import dis
from operator import getitem
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from fedcluster.models import layers as own_layers

LEAVES = ("torch.nn.modules.", own_layers.__name__)
GLOBALS: tuple[Any, ...] = (torch, nn, F, torch.relu, F.relu, torch.flatten, torch.max_pool2d, F.max_pool2d)
FLATTEN = ("start_dim", "end_dim")
POOLING = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
ATTRIBUTES = {"nn", "functional", "relu", "flatten", "max_pool2d", "view", "reshape", "size", "shape"}


def layers_of(module: nn.Module) -> list[nn.Module] | None:
    """The layers of a module's forward pass, nested modules opened; None if it is not known to be a chain."""
    if is_changed(module):
        return None
    if type(module).forward is nn.Sequential.forward:
        return join([layers_of(part) for part in module.children()]) if isinstance(module, nn.Sequential) else None
    if type(module).__module__.startswith(LEAVES):
        return [module]
    return recorded_layers(module) if is_straight_line(module) else None


def is_changed(module: nn.Module) -> bool:
    """Whether calling the module may do something else than its `forward`."""
    kind = type(module)
    own_call = any(getattr(kind, name) is not getattr(nn.Module, name) for name in ("__call__", "__getattr__"))
    own_call = own_call or kind.__getattribute__ is not nn.Module.__getattribute__ or "forward" in vars(module)
    return bool(own_call or module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def is_straight_line(module: nn.Module) -> bool:
    """Whether `forward(self, x)` has no branches and uses nothing but submodules, its input and torch's functions."""
    function = type(module).forward
    if not isinstance(function, FunctionType) or function.__code__.co_freevars:
        return False
    code: CodeType = function.__code__
    if code.co_argcount != 2 or code.co_kwonlyargcount or code.co_flags & (0x04 | 0x08 | 0x20):  # *, **, a generator
        return False
    for step in dis.get_instructions(code):
        branches = step.opcode in dis.hasjrel or step.opcode in dis.hasjabs
        writes = step.opname.startswith(("STORE_", "DELETE_", "IMPORT_", "MAKE_")) and "_FAST" not in step.opname
        if branches or writes:
            return False
        if step.opname == "LOAD_GLOBAL":
            found = function.__globals__.get(step.argval)
            if not any(found is allowed for allowed in GLOBALS):
                return False
        elif step.opcode in dis.hasname and not is_harmless(module, step.argval):
            return False
    return True


def is_harmless(module: nn.Module, name: str) -> bool:
    """Whether an attribute of this name can only be a submodule or a function of a tensor."""
    if hasattr(type(module), name) or name in vars(module):
        return False
    return name in module._modules or (name in ATTRIBUTES and not hasattr(module, name))


class Recorder(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def recorded_layers(module: nn.Module) -> list[nn.Module] | None:
    """The layers of a straight-line `forward`, if each takes what the one before has made, and nothing else."""
    try:
        nodes = list(Recorder().trace(module).nodes)
        found: list[list[nn.Module] | None] = []
        current = nodes[0]
        for node in nodes[1:-1]:
            if not is_shape(node):
                found.append(layers_at(module, node) if node.args[0] is current else None)
                current = node
        return join(found) if nodes[-1].args == (current,) else None
    except Exception:  # not every method takes a symbolic input, or has arguments that make sense
        return None


def is_shape(node: fx.Node) -> bool:
    """x.size(), x.shape, or an element of either; used as anything but a batch size, it ends the chain."""
    return node.target in (getattr, getitem) or (node.op == "call_method" and node.target == "size")


def is_batch_size(node: object) -> bool:
    """x.size(0), x.size()[0] or x.shape[0]."""
    if not isinstance(node, fx.Node) or not is_shape(node):
        return False
    return node.args[1:] == (0,) and (node.target == "size" or is_shape(node.args[0]))  # type: ignore[arg-type]


def layers_at(module: nn.Module, node: fx.Node) -> list[nn.Module] | None:
    """A call, as layers."""
    if node.op == "call_module":
        return layers_of(module.get_submodule(str(node.target)))
    arguments, options = node.args[1:], dict(node.kwargs)
    if node.target in ("relu", torch.relu, F.relu):
        return [nn.ReLU()]
    if node.target in ("flatten", torch.flatten):
        return [nn.Flatten(**{"start_dim": 0} | dict(zip(FLATTEN, arguments, strict=False)) | options)]  # type: ignore[arg-type]
    if node.target in (torch.max_pool2d, F.max_pool2d):
        return [nn.MaxPool2d(**dict(zip(POOLING, arguments, strict=False)) | options)]  # type: ignore[arg-type]
    if node.target in ("view", "reshape") and len(arguments) == 2 and is_flat(*arguments):
        return [nn.Flatten()]
    return None


def is_flat(rows: object, features: object) -> bool:
    """view(x.size(0), -1), or view(-1, features): the linear layer after it takes no other number of features."""
    return (is_batch_size(rows) and features == -1) or (rows == -1 and isinstance(features, int) and features > 0)


def join(parts: list[list[nn.Module] | None]) -> list[nn.Module] | None:
    joined: list[nn.Module] = []
    for part in parts:
        if part is None:
            return None
        joined += part
    return joined
