"""Weights & Biases: a run of the project `track.project`. Without an account it is kept offline, for `wandb sync`."""

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from fedcluster.training.tracking.registry import TrackedRun, missing


class WandB:
    """Metrics by round, the experiment's keys as config, pictures, and the model as an artifact. WANDB_MODE says
    whether the run is sent; where it is not set and nobody is logged in, the run is written to its folder only."""

    def __init__(self, project: str) -> None:
        try:
            import wandb
        except ImportError:
            raise missing("wandb") from None
        self.wandb, self.project = wandb, project

    def start(self, run: TrackedRun) -> int:
        wandb = self.wandb
        quiet = wandb.Settings(silent=True, console="off", x_disable_stats=True)
        wandb.setup(quiet)
        offline = "WANDB_MODE" not in os.environ and not wandb.login(prompt=False, verify=False)
        before = sorted((run.folder / "wandb").glob("*run-*-*")) if run.resumed else []
        self.run = wandb.init(
            project=self.project,
            name=run.folder.name,
            id=before[-1].name.rpartition("-")[2] if before else secrets.token_hex(4),
            resume="allow",
            dir=run.folder,
            config=run.parameters,
            mode="offline" if offline else None,
            settings=quiet,
        )
        self.run.define_metric("round")
        self.run.define_metric("*", step_metric="round")
        return run.rounds if before else 0

    def log(self, round: int, numbers: dict[str, float]) -> None:
        self.run.log({"round": round, **numbers})

    def finish(self, files: Sequence[Path]) -> None:
        artifact = self.wandb.Artifact(f"run-{self.run.id}", type="model")
        for path in files:
            if path.suffix == ".png":
                self.run.log({path.stem: self.wandb.Image(str(path))})
            else:
                artifact.add_file(str(path))
        self.run.log_artifact(artifact)
        self.run.finish()

    def abort(self) -> None:
        self.run.finish(exit_code=1)
