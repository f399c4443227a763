"""Whether the model and the task fit the data, found out before anything is trained."""

import torch

from fedcluster.data.dataset import Dataset
from fedcluster.errors import BadExperiment
from fedcluster.models.flat_model import FlatModel, output_tensor
from fedcluster.models.tasks import Task

OUTPUTS = {"class": "classes", "number": "numbers a sample", "multilabel": "labels", "token": "tokens"}


def check_output(flat_model: FlatModel, dataset: Dataset, task: Task) -> None:
    """A model or a task of one's own may not fit the data: find out now, and say how."""
    flat_model.module.eval()
    x, y = dataset.inputs(dataset.x_train[:2]).to(flat_model.device), dataset.y_train[:2].to(flat_model.device)
    given, _ = task.batch(x, y)
    try:
        with torch.no_grad():
            returned = flat_model.module(given)
    except Exception as error:  # a model may do anything
        raise BadExperiment(
            f"model.name: the model does not take samples {list(dataset.shape)} ({first_line(error)})"
        ) from None
    expected, actual = task.output_shape(dataset.spec), list(output_tensor(returned).shape)
    if expected is not None and not fits(actual, [len(x), *expected], dataset):
        raise BadExperiment(
            f"model.name: the model gives outputs {actual[1:]} for a sample, but the data have {dataset.outputs} "
            f"{OUTPUTS[dataset.target]}, which take {list(expected)}"
        )
    try:
        with torch.no_grad():
            loss = task.mean_loss(flat_model.module, x, y)
    except Exception as error:  # as may a loss
        raise BadExperiment(f"task: the loss fails on outputs {actual} ({first_line(error)})") from None
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise BadExperiment(f"task: the loss must be one number, the mean over a batch, but is {describe_value(loss)}")


def fits(actual: list[int], expected: list[int], dataset: Dataset) -> bool:
    """Whether outputs have the shape that the targets need. One number may come without an axis of its own, and a model
    may know more tokens than the data have."""
    if dataset.target == "number" and dataset.y_train.ndim == 1 and actual == expected[:1]:
        return True
    if dataset.target == "token" and actual[:-1] == expected[:-1]:
        return actual[-1] >= expected[-1]
    return actual == expected


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def describe_value(value: object) -> str:
    return f"of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
