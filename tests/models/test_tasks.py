"""Tasks: what is inferred from targets, losses, metrics against scikit-learn, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as truth
import torch
from torch import Tensor, nn

import fedcluster
from fedcluster.errors import BadData, BadExperiment, Diverged
from fedcluster.models.metrics import METRICS, find_metrics, recorded_metrics
from fedcluster.models.tasks import TASKS, Regression, token_cross_entropy
from fedcluster.runs.progress import Display
from fedcluster.training.evaluation import add, values

RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 5)).astype(np.float32)
NUMBERS = (X @ RNG.normal(size=(5, 2)) + 0.1 * RNG.normal(size=(120, 2))).astype(np.float32)
LABELS = (NUMBERS > 0).astype(np.int64)
TOKENS = np.cumsum(RNG.integers(0, 2, size=(60, 7)), axis=1) % 6


def dataset(x: Any, y: Any, **more: Any) -> fedcluster.Dataset:
    """Five devices."""
    cut = len(x) * 5 // 6
    return fedcluster.Dataset(x[:cut], y[:cut], x[cut:], y[cut:], device_train=np.arange(cut) % 5, **more)


def tokens() -> fedcluster.Dataset:
    return dataset(TOKENS[:, :-1], TOKENS[:, 1:])


def table() -> dict[str, Any]:
    """Columns of numbers and of a category."""
    kind = np.array(["x", "y", "z"])[np.arange(120) % 3]
    return {"a": X[:, 0] * 50 + 100, "kind": kind, "price": X[:, 1] * 1000, "shop": np.arange(120) % 5}


class Heard(Display):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def experiment(data: Any, **keys: Any) -> fedcluster.Experiment:
    base: dict[str, Any] = {
        "rounds": 8,
        "data": {"name": data},
        "clusters": {"count": 2, "participation": 1.0},
        "model": {"name": "logistic"},
        "local": {"steps": 10, "batch": 10, "lr": 0.1},
    }
    return fedcluster.Experiment(**base | keys)


class Small(nn.Module):
    """A recurrent model of tokens, small enough for a test."""

    def __init__(self, shape: tuple[int, ...], outputs: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(vocabulary, 6), nn.LSTM(6, 12, batch_first=True)
        self.output = nn.Linear(12, outputs)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.output(self.rnn(self.embedding(x))[0])
        return scores


@pytest.mark.parametrize(
    ("x", "y", "target", "outputs"),
    [
        (X, LABELS[:, 0], "class", 2),
        (X, NUMBERS[:, 0], "number", 1),
        (X, NUMBERS, "number", 2),
        (X, LABELS, "multilabel", 2),
        (X, LABELS.astype(bool), "multilabel", 2),
        (TOKENS[:, :-1], TOKENS[:, 1:], "token", 6),
        (TOKENS[:, :-1], TOKENS[:, -1], "class", 6),
    ],
)
def test_what_targets_are_is_inferred_where_there_is_no_doubt(x: Any, y: Any, target: str, outputs: int) -> None:
    found = dataset(x, y)
    assert (found.target, found.outputs, found.classes) == (target, outputs, outputs if target == "class" else 0)
    assert found.x_train.dtype == (torch.int64 if x is not X else torch.float32)
    assert found.spec.vocabulary == (6 if x is not X else 0)
    other = (
        dataset(x, y, outputs=outputs + 2)
        if target in ("class", "token")
        else dataset(x, y[:, ::-1] if y.ndim == 2 else -y)
    )
    assert other.digest() != found.digest()


@pytest.mark.parametrize(
    ("x", "y", "more", "said"),
    [
        (X, LABELS[:, 0].astype(float), {}, 'may be classes or numbers: store classes as integers, or say target = "n'),
        (X, LABELS[:, :1], {}, "a single column of whole numbers may be classes or numbers"),
        (X, LABELS * 3, {}, r"whole numbers \[2\] for every sample may be numbers or tokens: say which with target"),
        (X, NUMBERS, {"target": "class"}, "must be one label for each of the 100 samples"),
        (X, NUMBERS, {"target": "multilabel"}, "must be 0 or 1"),
        (X, NUMBERS, {"outputs": 3}, "must have 3 numbers for each sample"),
        (X, NUMBERS, {"target": "numbers"}, "target = 'numbers' is not allowed: use one of class, number, multilabel"),
        (X, NUMBERS * np.nan, {}, "not finite"),
        (X, np.array(["a"] * 120), {"target": "number"}, "must be numbers, but is <U1"),
        (TOKENS - 3, TOKENS[:, 1], {}, "has whole numbers, which are taken as token ids, but -3 is not one"),
        (TOKENS, TOKENS, {"vocabulary": 4}, "has the token 5, but the vocabulary has 4 tokens"),
        (TOKENS, np.where(np.arange(60)[:, None] == 3, -100, TOKENS), {}, "no target in row 3: every position is -100"),
    ],
)
def test_doubt_and_bad_targets_are_refused(x: Any, y: Any, more: dict[str, Any], said: str) -> None:
    with pytest.raises(BadData, match=said):
        dataset(x, y, **more)


@pytest.mark.parametrize(
    ("data", "task", "keys", "metric", "least"),
    [
        (lambda: dataset(X, NUMBERS[:, 0]), "regression", {}, "r2", 0.9),
        (lambda: dataset(X, NUMBERS), "regression", {"task": {"loss": "huber"}}, "r2", 0.9),
        (lambda: dataset(X, NUMBERS), "regression", {"task": {"name": "regression", "loss": "mae"}}, "r2", 0.9),
        (lambda: dataset(X, LABELS), "multilabel", {}, "micro_f1", 0.85),
        (tokens, "next_token", {"model": {"name": Small}, "local": {"lr": 0.5}}, "token_accuracy", 0.4),
    ],
)
def test_every_task_is_learned(data: Any, task: str, keys: dict[str, Any], metric: str, least: float) -> None:
    display = Heard()
    result = fedcluster.run(experiment(data(), **keys), display=display)
    assert result.history[-1][f"test_{metric}"] > least
    named = [f"test_{one}" for one in TASKS[task].metrics]
    assert [key for key in result.history[-1] if key.startswith("test_")] == ["test_loss", *named]
    assert any('"natural" is used instead (the devices that the data name)' in said for said in display.said)
    assert any(f"so the task is {task}" in said for said in display.said) == ("name" not in keys.get("task", {}))


def test_a_model_of_tokens_is_named_in_a_file() -> None:
    described = experiment(tokens(), model={"name": "tests.models.test_tasks:Small"}, rounds=1)
    by_name, itself = (
        fedcluster.run(one, display=Display()).history[-1]["test_loss"]
        for one in (described, experiment(tokens(), model={"name": Small}, rounds=1))
    )
    assert by_name == itself
    with pytest.raises(BadExperiment, match=r"TOKENS is a ndarray"):
        fedcluster.run(experiment(tokens(), model={"name": "tests.models.test_tasks:TOKENS"}), display=Display())


def test_classes_can_be_learned_as_numbers() -> None:
    ratings = dataset(X, np.clip(NUMBERS[:, 0].round() + 3, 0, 6).astype(int))
    result = fedcluster.run(experiment(ratings, task={"name": "regression"}), display=Display())
    assert result.history[-1]["test_rmse"] < 0.6
    with pytest.raises(BadData, match="task = next_token needs targets that are next tokens, but those of data are cl"):
        fedcluster.run(experiment(ratings, task={"name": "next_token"}), display=Display())


def test_ignored_positions_do_not_count() -> None:
    outputs, targets = torch.randn(2, 3, 4), torch.tensor([[1, -100, 2], [-100, -100, -100]])
    expected = nn.functional.cross_entropy(outputs[0, [0, 2]], targets[0, [0, 2]])
    torch.testing.assert_close(token_cross_entropy(outputs, targets), expected)
    assert token_cross_entropy(outputs[1:], targets[1:]) == 0
    sums = METRICS["perplexity"].sums(outputs, targets)
    assert METRICS["perplexity"].values(sums)["perplexity"] == pytest.approx(float(expected.exp()), rel=1e-5)
    right = (outputs[0].argmax(1) == targets[0]).sum() / 2
    assert METRICS["token_accuracy"].values(METRICS["token_accuracy"].sums(outputs, targets)) == {
        "token_accuracy": right
    }


def scores(target: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = {"class": (200, 7), "number": (200, 2), "multilabel": (200, 4), "token": (20, 10, 7)}[target]
    outputs = torch.randn(shape, generator=generator)
    noisy = outputs + torch.randn(shape, generator=generator)
    if target in ("class", "token"):
        return outputs, noisy.argmax(-1)
    return outputs, noisy if target == "number" else (noisy > 0.5).float()


def by_scikit(name: str, outputs: Any, targets: Any) -> Any:
    predicted = outputs.argmax(-1)
    match name:
        case "accuracy" | "token_accuracy":
            return truth.accuracy_score(targets.ravel(), predicted.ravel())
        case "top5_accuracy":
            return truth.top_k_accuracy_score(targets, outputs, k=5)
        case "macro_f1":
            return truth.f1_score(targets, predicted, average="macro")
        case "per_class_accuracy":
            return truth.recall_score(targets, predicted, average=None)
        case "mse":
            return truth.mean_squared_error(targets, outputs)
        case "rmse":
            return truth.mean_squared_error(targets, outputs) ** 0.5
        case "mae":
            return truth.mean_absolute_error(targets, outputs)
        case "r2":
            return truth.r2_score(targets, outputs)
        case "micro_f1":
            return truth.f1_score(targets, outputs > 0, average="micro")
        case "map":
            return truth.average_precision_score(targets, outputs, average="macro")
        case "perplexity":
            probabilities = torch.softmax(torch.tensor(outputs), -1).reshape(-1, outputs.shape[-1]).numpy()
            return np.exp(truth.log_loss(targets.ravel(), probabilities, labels=np.arange(outputs.shape[-1])))
    raise AssertionError(name)


@pytest.mark.parametrize("name", METRICS)
def test_metrics_are_scikit_learns_and_their_sums_add_up(name: str) -> None:
    metric = METRICS[name]
    outputs, targets = scores(metric.targets[0])
    chunks = zip(torch.split(outputs, 7), torch.split(targets, 7), strict=True)
    parts = [{name: metric.sums(*chunk)} for chunk in chunks]
    found = metric.values(add(parts)[name])
    expected = np.atleast_1d(by_scikit(name, outputs.numpy(), targets.numpy()))
    tolerance = 5e-3 if name == "map" else 1e-6  # its scores are binned
    np.testing.assert_allclose(list(found.values()), expected, rtol=tolerance)
    assert list(found) == ([name] if len(expected) == 1 else [f"{name}/{c}" for c in range(len(expected))])


@pytest.mark.parametrize(("middle", "spread"), [(9.0, 3.0), (-6.0, 1.0), (0.0, 0.3), (-12.0, 2.0)])
def test_average_precision_of_rare_and_of_saturated_labels(middle: float, spread: float) -> None:
    """Probabilities that are all near 0 or 1 are still in an order."""
    generator = torch.Generator().manual_seed(0)
    outputs = middle + spread * torch.randn(1000, 2, generator=generator)
    targets = (outputs + spread * torch.randn(1000, 2, generator=generator) > middle + 1.5 * spread).float()
    found = METRICS["map"].values(METRICS["map"].sums(outputs, targets))["map"]
    assert found == pytest.approx(truth.average_precision_score(targets, outputs), rel=1e-2)


class Share:
    """A metric with sums and a value of its own."""

    higher_is_better = False

    def statistics(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.stack([(outputs - targets).abs().sum(), targets.abs().sum()])

    def value(self, sums: Tensor) -> float:
        return float(sums[0] / sums[1])


def test_a_metric_of_ones_own_has_sums_and_a_value() -> None:
    result = fedcluster.run(experiment(dataset(X, NUMBERS), metrics=["mae", Share]), display=Display())
    assert 0 < result.history[-1]["test_Share"] < 0.5
    assert not find_metrics([Share])[0].higher_is_better
    outputs, targets = scores("number")
    sums = {"loss": torch.tensor([1.0, 2.0]), "Share": find_metrics([Share()])[0].sums(outputs, targets)}
    expected = float((outputs - targets).abs().sum() / targets.abs().sum())
    assert values(sums, find_metrics([Share]))["Share"] == pytest.approx(expected)


def test_several_values_are_recorded_and_not_shown() -> None:
    keys = {"metrics": ["accuracy", "per_class_accuracy"]}
    line = fedcluster.run(experiment(dataset(X, LABELS[:, 0]), **keys), display=Display()).history[-1]
    assert {"test_accuracy", "test_per_class_accuracy/0", "test_per_class_accuracy/1"} <= line.keys()
    assert [metric.name for metric in recorded_metrics(line)] == ["accuracy"]


def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().mean()


class Autoencoder(Regression):
    """Learns the samples themselves."""

    target = "class"
    metrics = ("mse",)

    def batch(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, x

    def output_shape(self, spec: Any) -> tuple[int, ...]:
        return tuple(spec.shape)


def test_a_loss_and_a_task_of_ones_own() -> None:
    losses = (absolute, "tests.models.test_tasks:absolute", "mae")
    runs = [fedcluster.run(experiment(dataset(X, NUMBERS), task={"loss": loss}), display=Display()) for loss in losses]
    own, named, ours = (result.history[-1]["test_loss"] for result in runs)
    assert own == named == pytest.approx(ours, rel=1e-4)
    data = dataset(X, LABELS[:, 0])
    for task in (Autoencoder, Autoencoder(), "tests.models.test_tasks:Autoencoder"):
        keys: dict[str, Any] = {"model": {"name": nn.Linear(5, 5)}, "fleet": {"partition": "natural"}}
        described = experiment(data, task={"name": task}, **keys)
        result = fedcluster.run(described, display=Display())
        assert result.history[-1]["test_loss"] < 0.2
        assert described.to_dict()["task"]["name"] == "tests.models.test_tasks:Autoencoder"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"metrics": ["accuracy"]}, "metrics: accuracy cannot be used, because the targets are numbers: use mse, rmse"),
        ({"task": {"name": "regressoin"}}, "task.name = 'regressoin' is not allowed: use one of classification, regr"),
        (
            {"task": {"name": "regression", "loss": "hinge"}},
            "task.loss = 'hinge' is not allowed: use one of mse, mae, h",
        ),
        ({"task": {"loss": "hinge"}}, "task.loss = 'hinge' is not allowed: use one of mse, mae, huber"),
        ({"task": {"name": Small}}, "task.name: Small is not a task: give a subclass of fedcluster.Task"),
        ({"task": {"loss": lambda outputs, targets: outputs - targets}}, "the loss must be one number, .* of shape"),
        ({"task": {"loss": lambda outputs: outputs}}, "task: the loss fails on outputs"),
        ({"algorithm": {"name": "fedmax"}}, "fedmax is defined for targets that are classes, and those of task = regr"),
        ({"model": {"name": nn.Linear(5, 3)}}, r"the model gives outputs \[3\] for a sample, but the data have 2 num"),
        ({"model": {"name": "lstm"}}, "needs token ids, but a sample is"),
        ({"fleet": {"partition": "dirichlet"}}, 'fleet.partition = "dirichlet" needs class labels, but the targets of'),
        ({"clusters": {"method": "major_class", "count": 2}}, "the label counts of the devices are not known"),
    ],
)
def test_what_does_not_fit_a_task_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(fedcluster.FedClusterError, match=said):
        fedcluster.run(experiment(dataset(X, NUMBERS), **keys), display=Display())


def test_devices_that_the_data_name_are_not_ignored_in_silence() -> None:
    display = Heard()
    described = experiment(dataset(X, LABELS[:, 0]), rounds=1, fleet={"devices": 4, "samples": 10})
    fedcluster.run(described, display=display)
    assert any('names the device of every row, and fleet.partition = "major_class"' in said for said in display.said)


def test_features_that_are_not_scaled_are_named_where_a_run_diverges() -> None:
    large = dataset(X * 1e4, NUMBERS * 300)
    with pytest.raises(Diverged, match=r"standardise the features, which reach .*e\+04 and the targets, which reach "):
        fedcluster.run(experiment(large, local={"steps": 10, "batch": 10, "lr": 1.0}), display=Display())


def test_a_constant_target_is_refused() -> None:
    with pytest.raises(BadData, match="the target is the same in all training rows"):
        fedcluster.run(experiment(dataset(X, np.full(120, 0.5))), display=Display())


def test_the_model_follows_from_the_samples() -> None:
    for data, name in ((dataset(X, NUMBERS), "MLP"), (tokens(), "LSTM")):
        described = experiment(data, rounds=1).override(**{"model": {"name": None}, "local.steps": 1})
        display = Heard()
        result = fedcluster.run(described, display=display)
        assert type(result.model).__name__ == name
        assert any(f"so the model is {name.lower()}" in said for said in display.said)
    with pytest.raises(BadExperiment, match=r'model.name = "mlp" takes numbers, but samples are token ids: use lstm'):
        fedcluster.run(experiment(tokens(), model={"name": "mlp"}), display=Display())


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (lambda: dataset(X, NUMBERS), {"task": {"loss": "huber"}}),
        (tokens, {"model": {"name": Small}, "local": {"steps": 4, "batch": 5, "lr": 0.5}}),
        (lambda: dataset(X, LABELS), {}),
        (lambda: table(), {"data": {"features": ["a", "kind"], "target": "price", "device": "shop"}}),
    ],
    ids=["regression", "next_token", "multilabel", "table"],
)
def test_workers_and_resuming_change_nothing(data: Any, keys: dict[str, Any], tmp_path: Path) -> None:
    def model(name: str, rounds: int = 3, workers: int = 1, resume: bool = False) -> bytes:
        described = experiment(data(), rounds=rounds).override(**keys)
        fedcluster.run(described, tmp_path / name, resume=resume, workers=workers, display=Display())
        return (tmp_path / name / "model.safetensors").read_bytes()

    whole = model("whole")
    assert model("two workers", workers=2) == whole
    assert model("longer", rounds=1) != whole
    assert model("longer", rounds=3, resume=True) == whole
