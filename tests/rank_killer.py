"""SCAFFOLD that kills rank 1 in the middle of a cycle, once: what torchrun's restart is tested with."""

import os
import signal
from pathlib import Path

from fedcluster.algorithms.scaffold import Scaffold
from fedcluster.learner import Learner
from fedcluster.local import Batches
from fedcluster.state import Message


class Killer(Scaffold):
    def train(self, learner: Learner, received: Message, batches: Batches, memory: Message) -> Message:
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if first and os.environ.get("RANK") == "1" and any(Path(os.environ["WATCHED"]).glob("checkpoint/*.json")):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train(learner, received, batches, memory)
