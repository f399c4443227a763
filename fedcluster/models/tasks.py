"""Tasks: what is learned. A task says which targets it takes, which outputs the model has to give, the loss, and the
metrics that are recorded where `metrics` does not name others.

A task of your own is a subclass of `Task`, or of one of those below, that says in what it differs; `batch` is for a
model that is not simply given x and held against y. A loss of your own is a function (outputs, targets) -> scalar.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator
from torch import Tensor, nn
from torch.nn import functional as F

from fedcluster.data.dataset import DataSpec
from fedcluster.data.targets import IGNORED, TARGETS
from fedcluster.errors import BadExperiment
from fedcluster.experiment import Experiment, Section, check_name, import_object, one_of
from fedcluster.models.flat_model import Objective, cross_entropy, output_tensor
from fedcluster.models.metrics import Metric, find_metrics

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""The mean loss of a batch, a scalar, given the outputs and the targets."""


class Task:
    """What every task declares.

    `target` is the kind of targets it takes, `losses` are those that `task.loss` names, the first of them the default,
    and `metrics` are recorded by default. `options` is the section [task] of the experiment.
    """

    name: str
    target: ClassVar[str] = "class"
    losses: ClassVar[Mapping[str, LossFunction]] = {}
    metrics: ClassVar[tuple[Any, ...]] = ()

    class Options(Section):
        """The keys that [task] has besides `name`."""

        loss: Annotated[Any, AfterValidator(lambda loss: loss and check_name(loss, ()))] = None

    def __init__(self, options: Section | None = None) -> None:
        self.name = vars(type(self)).get("name", type(self).__name__)
        self.options: Any = options or self.Options()
        self.own_loss = loss_of(getattr(self.options, "loss", None), self.losses)

    def batch(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """What the model is given, and what its outputs are held against."""
        return x, y

    def output_shape(self, spec: DataSpec) -> tuple[int, ...] | None:
        """The shape of the model's outputs for one sample; None where every shape will do."""
        return (spec.outputs,)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a batch."""
        function = self.own_loss or next(iter(self.losses.values()), None)
        if function is None:
            raise BadExperiment(f"task.name: {type(self).__name__} needs a loss(outputs, targets)")
        return function(outputs, targets)

    def count(self, targets: Tensor) -> int:
        """How many losses the mean loss of a batch is the mean of."""
        return len(targets)

    def predict(self, module: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The model's outputs for a batch, and the targets, as the loss and the metrics take them."""
        x, y = self.batch(x, y)
        return output_tensor(module(x)), y

    def mean_loss(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(*self.predict(module, x, y))

    @property
    def first_gradients(self) -> float:
        """How large a weight's gradient may be in the first cycle, before the norm bound knows a median. That of a loss
        of one's own, or on numbers in any unit, may be large."""
        return 1000.0

    @property
    def objective(self) -> Objective:
        """What a device minimises, unless its algorithm adds to it."""
        return self.mean_loss


class CrossEntropyTask(Task):
    """A task whose own loss has gradients of the size of the inputs."""

    @property
    def first_gradients(self) -> float:
        return 1.0 if self.own_loss in self.losses.values() else super().first_gradients


class Classification(CrossEntropyTask):
    """One class of several. The model gives a score for each class; the loss is cross-entropy."""

    name = "classification"
    target = "class"
    losses: ClassVar[Mapping[str, LossFunction]] = {"cross_entropy": F.cross_entropy}
    metrics: ClassVar[tuple[Any, ...]] = ("accuracy",)

    class Options(Section):
        loss: Annotated[Any, one_of("cross_entropy")] = "cross_entropy"

    @property
    def objective(self) -> Objective:
        plain = type(self) is Classification and self.own_loss is F.cross_entropy
        return cross_entropy if plain else self.mean_loss  # which the compiled engine knows


class Regression(Task):
    """One number or several. The model gives as many."""

    name = "regression"
    target = "number"
    losses: ClassVar[Mapping[str, LossFunction]] = {"mse": F.mse_loss, "mae": F.l1_loss, "huber": F.huber_loss}
    metrics: ClassVar[tuple[Any, ...]] = ("rmse", "mae", "r2")

    class Options(Section):
        loss: Annotated[Any, one_of("mse", "mae", "huber")] = "mse"

    def predict(self, module: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        outputs, targets = super().predict(module, x, y)
        return outputs.reshape(targets.shape), targets


class Multilabel(CrossEntropyTask):
    """Any number of labels. The model gives a logit for each; the loss is the binary cross-entropy."""

    name = "multilabel"
    target = "multilabel"
    losses: ClassVar[Mapping[str, LossFunction]] = {"cross_entropy": F.binary_cross_entropy_with_logits}
    metrics: ClassVar[tuple[Any, ...]] = ("micro_f1", "map")

    class Options(Section):
        loss: Annotated[Any, one_of("cross_entropy")] = "cross_entropy"


def token_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over the positions that count; 0 where none does."""
    loss = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss / (targets != IGNORED).sum().clamp(min=1)


class NextToken(CrossEntropyTask):
    """The next token of a text. At every position the model gives a score for each token of the vocabulary; the loss is
    the cross-entropy."""

    name = "next_token"
    target = "token"
    losses: ClassVar[Mapping[str, LossFunction]] = {"cross_entropy": token_cross_entropy}
    metrics: ClassVar[tuple[Any, ...]] = ("token_accuracy", "perplexity")

    class Options(Section):
        loss: Annotated[Any, one_of("cross_entropy")] = "cross_entropy"

    def output_shape(self, spec: DataSpec) -> tuple[int, ...]:
        return (*spec.shape, spec.outputs)

    def count(self, targets: Tensor) -> int:
        return int((targets != IGNORED).sum())


TASKS: Mapping[str, type[Task]] = {
    "classification": Classification,
    "regression": Regression,
    "multilabel": Multilabel,
    "next_token": NextToken,
}
BY_TARGET = {task.target: name for name, task in TASKS.items()}


def build(experiment: Experiment, target: str) -> Task:
    """The experiment's task; where it names none, the one for targets of this kind."""
    section = experiment.task
    if section.name is None:
        section = section.named(BY_TARGET[target])
    named = section.find()
    task = named if isinstance(named, Task) else named(section.options) if is_task(named) else None
    if task is None or task.target not in TARGETS:
        raise BadExperiment(
            f"task.name: {getattr(named, '__name__', named)} is not a task: give a subclass of fedcluster.Task whose "
            f"target is one of {', '.join(TARGETS)}"
        )
    return task


def target_of(experiment: Experiment) -> str | None:
    """The kind of targets that the experiment's task takes; None where it names no task."""
    return None if experiment.task.name is None else build(experiment, "").target


def is_task(obj: Any) -> bool:
    return isinstance(obj, type) and issubclass(obj, Task)


def loss_of(given: Any, losses: Mapping[str, LossFunction]) -> LossFunction | None:
    """The function that `task.loss` stands for: one of the task's, or one of the user's."""
    if isinstance(given, str):
        given = losses[given] if given in losses else import_object(given, "outputs", "targets")
    loss: LossFunction | None = given
    return loss


def metrics_of(experiment: Experiment, task: Task) -> list[Metric]:
    """The metrics that the experiment names, else the task's. Which fit a task of the user's is not known."""
    if experiment.metrics is None:
        return find_metrics(task.metrics)
    return find_metrics(experiment.metrics, task.target if task.name in TASKS else None)
