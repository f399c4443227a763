"""Two natural federations beside a baseline each: Shakespeare by speaking role, and flights by aircraft.

FedAvg (M = 1) and FedCluster train from the same start on the same number of device updates, by `fedcluster compare`,
each at its own best learning rate. The baselines see the pooled training data: the frequencies of characters and of
pairs of characters, and least squares.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedcluster import Dataset, Experiment, compare, load
from fedcluster.analysis.compare import Comparison
from fedcluster.data.sources import open_dataset
from fedcluster.data.targets import IGNORED
from fedcluster.models.tasks import target_of
from fedcluster.runs.progress import stages

ROOT = Path(__file__).parent.parent
Row = tuple[Any, ...]  # method, M, rate, and two scores


class SmallLSTM(nn.Module):
    """An embedding of 8, one LSTM layer of 128, a linear layer: a tenth of the time of LEAF's model, `lstm`."""

    def __init__(self, shape: tuple[int, ...], outputs: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 8)
        self.lstm = nn.LSTM(8, 128, batch_first=True)
        self.output = nn.Linear(128, outputs)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.output(self.lstm(self.embedding(x))[0])
        return scores


def shakespeare(runs: Path, out: Path, rounds: int, seeds: int) -> None:
    experiment = load(ROOT / "examples" / "shakespeare.toml").override(rounds=rounds, **{"model.name": SmallLSTM})
    rows = character_baselines(opened(experiment))
    out = out / "shakespeare"
    rows += compared(experiment, runs / "shakespeare", out, seeds, "tuned", "token_accuracy", "perplexity")
    write_table(rows, out, "token accuracy", "perplexity")


def flights(runs: Path, out: Path, rounds: int, seeds: int) -> None:
    experiment = load(ROOT / "examples" / "flights.toml").override(rounds=rounds)
    rows = line_baselines(opened(experiment))
    out = out / "flights"
    rows += compared(experiment, runs / "flights", out, seeds, "tuned", "rmse", "mae")
    write_table(rows, out, "test RMSE", "test MAE")


def opened(experiment: Experiment) -> Dataset:
    return open_dataset(experiment.data, target=target_of(experiment))


def compared(experiment: Experiment, runs: Path, out: Path, seeds: int, lr: str, first: str, second: str) -> list[Row]:
    """A row for each method. The curves and all seeds are written to `out`."""
    with stages() as progress:
        comparison = compare(experiment, ("fedavg", "fedcluster"), seeds, lr, out=runs, resume=True, progress=progress)
    out.mkdir(parents=True, exist_ok=True)
    for name in ("comparison.json", "curves.png"):
        (out / name).write_bytes((runs / name).read_bytes())
    return [method_row(comparison, k, first, second) for k in range(len(comparison.outcomes))]


def method_row(comparison: Comparison, k: int, first: str, second: str) -> Row:
    outcome = comparison.outcomes[k]
    scores = (score_text(name, *outcome.final(f"test_{name}")) for name in (first, second))
    return ({"fedavg": "FedAvg", "fedcluster": "FedCluster"}[outcome.method], outcome.clusters, outcome.lr, *scores)


def score_text(name: str, mean: float, deviation: float = 0.0) -> str:
    percent = name.endswith("accuracy")
    mean, deviation = (100 * mean, 100 * deviation) if percent else (mean, deviation)
    return f"{mean:.2f}{f' ± {deviation:.2f}' if deviation else ''}{' %' if percent else ''}"


def character_baselines(dataset: Dataset) -> list[Row]:
    """Of the next character: p(c) from the counts of characters, p(c | b) = (n_bc + p(c)) / (n_b + 1) from pairs."""
    size = dataset.outputs
    pairs = np.zeros((size, size))
    np.add.at(pairs, counted(dataset.x_train, dataset.y_train), 1)
    alone = (pairs.sum(axis=0) + 1) / (pairs.sum() + size)
    after = (pairs + alone) / (pairs.sum(axis=1, keepdims=True) + 1)
    before, following = counted(dataset.x_test, dataset.y_test)
    rows: list[Row] = []
    for name, chances in (("unigram", np.broadcast_to(alone, (size, size))), ("bigram", after)):
        accuracy = np.mean(chances.argmax(axis=1)[before] == following)
        perplexity = np.exp(-np.log(chances[before, following]).mean())
        rows.append((name, "", "", score_text("accuracy", accuracy), score_text("perplexity", perplexity)))
    return rows


def counted(x: Tensor, y: Tensor) -> tuple[Any, Any]:
    """The characters and what follows each, where it counts."""
    there = y != IGNORED
    return x[there].numpy(), y[there].numpy()


def line_baselines(dataset: Dataset) -> list[Row]:
    """The mean, and least squares in the departure delay alone and in all columns."""
    y, truth = dataset.y_train.double().numpy(), dataset.in_units(dataset.y_test).numpy()
    rows: list[Row] = []
    for name, columns in (("the mean", 0), ("least squares in dep_delay", 1), ("least squares", dataset.shape[0])):
        train, test = (with_ones(x.double().numpy()[:, :columns]) for x in (dataset.x_train, dataset.x_test))
        line = np.linalg.lstsq(train, y, rcond=None)[0]
        error = dataset.in_units(torch.from_numpy(test @ line)).numpy() - truth
        scores = np.sqrt(np.mean(error**2)), np.abs(error).mean()
        rows.append((name, "", "", *(score_text("rmse", score) for score in scores)))
    return rows


def with_ones(x: Any) -> Any:
    return np.column_stack([x, np.ones(len(x))])


def write_table(rows: Sequence[Row], out: Path, first: str, second: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    lines = [f"| method | M | rate | {first} | {second} |", "| --- " * 5 + "|"]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    (out / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
