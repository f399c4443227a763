"""SCAFFOLD that kills rank 1 in the middle of a cycle, once: for the test of torchrun's restart.

Rank 0 saves after every cycle, so that the kill waits for a checkpoint and not for the clock. Ranks meet in every
cycle, so rank 1 sees the checkpoint of one cycle in the next but one at the latest.
"""

import os
import signal
from pathlib import Path

from fedcluster.algorithms.scaffold import Scaffold
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.local_sgd import Batches
from fedcluster.runs import checkpoint
from fedcluster.state import Tensors
from fedcluster.training import checkpoints

RESTARTS = os.environ.get("TORCHELASTIC_RESTART_COUNT")  # None outside torchrun

if RESTARTS is not None:
    checkpoints.SAVE_EVERY, checkpoints.SAVE_SHARE = 0.0, 0


class Killer(Scaffold):
    def train(self, flat_model: FlatModel, received: Tensors, batches: Batches, device_state: Tensors) -> Tensors:
        if RESTARTS == "0" and os.environ["RANK"] == "1":
            saved = checkpoint.names(Path(os.environ["WATCHED"], "checkpoint"))
            if saved and saved[0].stem >= "00000002":  # two whole rounds
                os.kill(os.getpid(), signal.SIGKILL)
        return super().train(flat_model, received, batches, device_state)
