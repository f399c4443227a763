"""The data of a run, and the task that they are for."""

from fedcluster.data import sources
from fedcluster.data.dataset import Dataset
from fedcluster.data.partitions import registry as partitions
from fedcluster.data.targets import PLURALS
from fedcluster.errors import BadData
from fedcluster.experiment import Experiment
from fedcluster.models import tasks, zoo
from fedcluster.models.tasks import Task
from fedcluster.reporting import Say


def open_data(experiment: Experiment, say: Say) -> tuple[Dataset, Task]:
    """The data, with targets as the task takes them. Messages name what the data decide: the task, the partition and
    the model, where the experiment leaves them open or they need what the data do not have."""
    dataset = sources.open_dataset(experiment.data, say, tasks.target_of(experiment))
    task = tasks.build(experiment, dataset.target)
    dataset = with_targets(dataset, task)
    if dataset.target == "number" and bool((dataset.y_train == dataset.y_train[:1]).all()):
        raise BadData(f"{dataset.name}: the target is the same in all training rows, so there is nothing to learn")
    if experiment.task.name is None and task.name != "classification":
        say(f"{dataset.name}: the targets are {PLURALS[dataset.target]}, so the task is {task.name}")
    chosen = partitions.usable(experiment.fleet, dataset).partition
    if chosen != experiment.fleet.partition:
        devices = "the devices that the data name" if chosen == "natural" else "every device draws from all rows"
        say(
            f'fleet.partition = "{experiment.fleet.partition}" needs class labels, which {dataset.name} does not have: '
            f'"{chosen}" is used instead ({devices})'
        )
    elif dataset.device_train is not None and isinstance(chosen, str) and chosen != "natural":
        say(
            f'{dataset.name} names the device of every row, and fleet.partition = "{chosen}" makes other devices: '
            '"natural" takes those'
        )
    if experiment.model.name is None:
        say(f"{dataset.name}: samples are {kind_of_samples(dataset)}, so the model is {zoo.default_name(dataset.spec)}")
    return dataset, task


def kind_of_samples(dataset: Dataset) -> str:
    """What the samples are, as the choice of a model sees it."""
    if dataset.vocabulary:
        return "token ids"
    return "pictures of {1}x{2}".format(*dataset.shape) if len(dataset.shape) == 3 else "rows of numbers"


def with_targets(dataset: Dataset, task: Task) -> Dataset:
    """The data with the kind of targets that the task takes; classes may be taken as numbers, for example."""
    return dataset.with_target(task.target, f"task = {task.name}")
