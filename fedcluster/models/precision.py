"""Mixed precision: forward and backward passes in bfloat16, everything else in float32.

torch's autocast decides which operations of the module run in bfloat16. The weights w, gradients, optimizer moments,
outputs, losses, averages and the evaluation stay in float32. bfloat16 has 8 significant bits: the gradient of a batch
differs from that in float32 by up to a tenth of its norm, the loss that a run reaches by a few percent.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from fedcluster.models.flat_model import Objective

PRECISIONS = ("float32", "bf16")
INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "avx10_2", "bf16", "sve_bf16")  # as torch.cpu.get_capabilities calls them


class Autocast(nn.Module):
    """A module whose forward pass runs under autocast; its outputs are float32."""

    def __init__(self, module: nn.Module, kind: str) -> None:
        super().__init__()
        self.module, self.kind = module, kind

    def forward(self, *inputs: Any, **named: Any) -> Any:
        with torch.autocast(self.kind, torch.bfloat16):
            outputs = self.module(*inputs, **named)
        return tree_map(to_float32, outputs)


def to_float32(output: Any) -> Any:
    return output.float() if isinstance(output, Tensor) and output.is_floating_point() else output


def in_bf16(objective: "Objective") -> "Objective":
    """The same objective with the module's forward and backward passes in bfloat16."""

    def mixed(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return objective(Autocast(module, x.device.type), x, y)

    return mixed


def emulated(device: torch.device) -> str | None:
    """Why bfloat16 is emulated here, which is slower than float32; None where the hardware has it."""
    if device.type == "cuda":
        has = torch.cuda.is_bf16_supported(including_emulation=False)
        return None if has else f"{torch.cuda.get_device_name(device)} has no bfloat16"
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    if any(capabilities.get(name) for name in INSTRUCTIONS):
        return None
    return "this processor has no bfloat16 instructions that torch knows of"
