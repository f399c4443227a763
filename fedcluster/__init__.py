"""FedCluster: federated learning in which clusters of devices take turns within every round.

import fedcluster
result = fedcluster.run(fedcluster.Experiment(rounds=10, model={"name": "mlp"}))
result.history[-1]["test_accuracy"], result.model
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedcluster.algorithms.transforms import UpdateTransform as UpdateTransform
    from fedcluster.analysis.compare import compare as compare
    from fedcluster.analysis.fleet_report import partition as partition
    from fedcluster.data.dataset import Dataset as Dataset
    from fedcluster.errors import FedClusterError as FedClusterError
    from fedcluster.experiment import Experiment as Experiment
    from fedcluster.experiment import load as load
    from fedcluster.models.metrics import Metric as Metric
    from fedcluster.models.tasks import Task as Task
    from fedcluster.runs.result import Result as Result
    from fedcluster.state import Aggregate as Aggregate
    from fedcluster.training.callbacks import Callback as Callback
    from fedcluster.training.callbacks import EarlyStopping as EarlyStopping
    from fedcluster.training.callbacks import StopTraining as StopTraining
    from fedcluster.training.load_model import load_model as load_model
    from fedcluster.training.run import run as run

__version__ = "0.2.0"

HOME = {
    "Aggregate": "state",
    "Callback": "training.callbacks",
    "Dataset": "data.dataset",
    "EarlyStopping": "training.callbacks",
    "Experiment": "experiment",
    "FedClusterError": "errors",
    "Metric": "models.metrics",
    "Result": "runs.result",
    "StopTraining": "training.callbacks",
    "Task": "models.tasks",
    "UpdateTransform": "algorithms.transforms",
    "compare": "analysis.compare",
    "load": "experiment",
    "load_model": "training.load_model",
    "partition": "analysis.fleet_report",
    "run": "training.run",
}

__all__ = [
    "Aggregate",
    "Callback",
    "Dataset",
    "EarlyStopping",
    "Experiment",
    "FedClusterError",
    "Metric",
    "Result",
    "StopTraining",
    "Task",
    "UpdateTransform",
    "compare",
    "load",
    "load_model",
    "partition",
    "run",
]


def __getattr__(name: str) -> Any:
    """Import on first use: `import fedcluster` and `fedcluster --help` do not wait for torch."""
    if name not in HOME:
        raise AttributeError(f"module 'fedcluster' has no attribute {name!r}")
    return getattr(import_module(f"fedcluster.{HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
