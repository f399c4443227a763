"""A local rule that kills rank 1 in the middle of a cycle, once: what torchrun's restart is tested with."""

import os
import signal
from pathlib import Path

import torch

calls = 0


def rule(gradient: torch.Tensor, w: torch.Tensor, received: torch.Tensor) -> None:
    global calls
    calls += 1
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    if first and os.environ.get("RANK") == "1" and any(Path(os.environ["WATCHED"]).glob("checkpoint/*.json")):
        os.kill(os.getpid(), signal.SIGKILL)
