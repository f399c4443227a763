"""TensorBoard: `tensorboard --logdir RUN` shows the curves, the experiment's keys and the pictures."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedcluster.training.tracking.registry import TrackedRun, missing


class TensorBoard:
    """Event files in the folder `tensorboard` of the run. A resumed run writes them anew, from its record."""

    def __init__(self, project: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise missing("tensorboard") from None
        self.writer_of = SummaryWriter
        self.last: dict[str, float] = {}

    def start(self, run: TrackedRun) -> int:
        path = run.folder / "tensorboard"
        shutil.rmtree(path, ignore_errors=True)
        self.writer = self.writer_of(str(path))
        self.parameters = {
            key: value if isinstance(value, int | float | str) else json.dumps(value)
            for key, value in run.parameters.items()
        }
        return 0

    def log(self, round: int, numbers: dict[str, float]) -> None:
        for key, value in numbers.items():
            self.writer.add_scalar(key, value, round)
        self.last = numbers

    def finish(self, files: Sequence[Path]) -> None:
        from PIL import Image

        for path in files:
            if path.suffix == ".png":
                with Image.open(path) as image:
                    self.writer.add_image(path.stem, np.asarray(image.convert("RGB")), dataformats="HWC")
        scores = {f"last/{key}": value for key, value in self.last.items() if key.startswith(("test_", "train_"))}
        self.writer.add_hparams(self.parameters, scores, run_name=".")
        self.writer.close()

    def abort(self) -> None:
        self.writer.close()
