"""The model at its start W_0, and what trains it on a device."""

from fedcluster import algorithms
from fedcluster.algorithms.transforms import Transforms
from fedcluster.attacks.attacker import Attacker
from fedcluster.data.dataset import Dataset, DataSpec
from fedcluster.data.targets import PLURALS
from fedcluster.errors import BadExperiment
from fedcluster.experiment import Experiment, Local
from fedcluster.fleet import fleet as fleets
from fedcluster.inputs import located
from fedcluster.models import tasks, zoo
from fedcluster.models.flat_model import FlatModel, Objective
from fedcluster.models.kernels import unavailable_reason
from fedcluster.privacy import mechanism as mechanisms
from fedcluster.training.executors.in_process import InProcess, Trainer
from fedcluster.training.model_check import check_output
from fedcluster.training.weights import load_weights, read_tensors


def build_trainer(
    experiment: Experiment,
    spec: DataSpec,
    device: str = "cpu",
    local: Local | None = None,
    precision: str = "float32",
    secret: int | None = None,
) -> Trainer:
    """What trains on a device: the same for the simulator, a worker process, a rank, and a federation's server and
    devices. `local` replaces the experiment's, for centralized training. `secret` is the seed of a device's own noise,
    the experiment's where none is given."""
    local = local or experiment.local
    central = experiment.method == "centralized"
    task = tasks.build(experiment, spec.target)
    algorithm = (
        algorithms.Centralized(local) if central else algorithms.build(experiment.algorithm, local, experiment.seed)
    )
    if algorithm.targets and task.target not in algorithm.targets:
        raise BadExperiment(
            f"algorithm.name: {algorithm.name} is defined for targets that are "
            f"{' or '.join(PLURALS[kind] for kind in algorithm.targets)}, and those of task = {task.name} are "
            f"{PLURALS[task.target]}: use another algorithm"
        )
    flat_model = start_model(experiment, spec, device, algorithm.objective(task.objective), precision)
    clip = mechanisms.clip_on_device(experiment, experiment.seed if secret is None else secret)
    transforms = Transforms(experiment.transforms, experiment.seed, clip)
    return Trainer(task, algorithm, flat_model, local, experiment.seed, transforms)


def start_model(
    experiment: Experiment, spec: DataSpec, device: str, objective: Objective, precision: str = "float32"
) -> FlatModel:
    module = zoo.build(experiment.model.name, spec, experiment.seed)
    flat_model = FlatModel(module, device, objective, precision)
    if experiment.model.init is not None:
        path = located(experiment.model.init, "model.init")
        flat_model.load_frozen(read_tensors(path, "model.init"))
        flat_model.load(load_weights(path, flat_model, "model.init"))
    return flat_model


def build_model(experiment: Experiment, dataset: Dataset, device: str = "cpu") -> FlatModel:
    """The model at its start W_0, for the task's loss. It is checked against the data."""
    task = tasks.build(experiment, dataset.target)
    flat_model = start_model(experiment, dataset.spec, device, task.objective)
    check_output(flat_model, dataset, task)
    return flat_model


def executor_of(
    experiment: Experiment, dataset: Dataset, precision: str = "float32", attacker: Attacker | None = None
) -> InProcess:
    """What a worker process needs, built from the experiment: every process builds the same one. The data set is
    the one that is trained on, after the partition has changed its features, if it does."""
    _, partition = fleets.build(experiment.fleet, dataset, experiment.seed)
    trainer = build_trainer(experiment, dataset.spec, precision=precision)
    return InProcess(trainer, dataset, partition, attacker)


def without_engine(flat_model: FlatModel) -> str | None:
    """A sentence where the compiled engine could train this model, and is not available."""
    if not flat_model.could_be_compiled or flat_model.network is not None:
        return None
    return f"training with torch, which is slower for this model: {unavailable_reason()}"
