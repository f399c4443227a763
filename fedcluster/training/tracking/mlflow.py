"""MLflow: a run of the experiment `track.project`, on the server or in the database that MLFLOW_TRACKING_URI names."""

import json
import logging
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path

from fedcluster.training.tracking.registry import TrackedRun, missing

FOLDER, HOST = "fedcluster.folder", "fedcluster.host"  # the tags by which a resumed run finds itself
AT_ONCE = 100  # parameters in a request, as many as MLflow allows
LONGEST = 6000  # characters of a parameter, as many as MLflow allows
# a server that is away holds up a run for seconds; MLflow's own defaults take minutes
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}


class MLflow:
    """Metrics by round, the experiment's keys as parameters, pictures and model as artifacts. Where
    MLFLOW_TRACKING_URI is not set, MLflow's own default holds: mlflow.db in the current folder."""

    def __init__(self, project: str) -> None:
        try:
            import mlflow
        except ImportError:
            raise missing("mlflow") from None
        self.mlflow, self.project = mlflow, project
        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        logging.getLogger("mlflow").setLevel(logging.WARNING)

    def start(self, run: TrackedRun) -> int:
        self.client = self.mlflow.MlflowClient()
        known = self.client.get_experiment_by_name(self.project)
        experiment = self.client.create_experiment(self.project) if known is None else known.experiment_id
        tags = {FOLDER: str(run.folder.resolve()), HOST: platform.node()}
        if run.resumed:
            wanted = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items() if "'" not in value)
            for earlier in self.client.search_runs([experiment], wanted, max_results=1):
                self.run = earlier.info.run_id
                self.client.set_terminated(self.run, "RUNNING")
                logged = self.client.get_metric_history(self.run, "train_loss")
                return max((metric.step for metric in logged), default=0)
        self.run = self.client.create_run(experiment, run_name=run.folder.name, tags=tags).info.run_id
        parameters = [
            self.mlflow.entities.Param(key, (value if isinstance(value, str) else json.dumps(value))[:LONGEST])
            for key, value in run.parameters.items()
        ]
        for first in range(0, len(parameters), AT_ONCE):
            self.client.log_batch(self.run, params=parameters[first : first + AT_ONCE])
        return 0

    def log(self, round: int, numbers: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self.mlflow.entities.Metric(key, value, now, round) for key, value in numbers.items()]
        for first in range(0, len(metrics), AT_ONCE):
            self.client.log_batch(self.run, metrics=metrics[first : first + AT_ONCE])

    def finish(self, files: Sequence[Path]) -> None:
        for path in files:
            self.client.log_artifact(self.run, str(path))
        self.client.set_terminated(self.run, "FINISHED")

    def abort(self) -> None:
        self.client.set_terminated(self.run, "KILLED")
