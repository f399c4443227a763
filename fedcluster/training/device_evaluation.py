"""Evaluation by device: the global model on each device's own held-out samples. The devices of a federation are asked
for their scores in `flower.evaluation`."""

import json
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedcluster.data.partition import HeldOut, Ints
from fedcluster.experiment import Eval
from fedcluster.fleet.clustering.clusters import Clusters
from fedcluster.rng import stream
from fedcluster.runs.devices import column_names, device_line, summarize
from fedcluster.runs.metrics import Line
from fedcluster.training.evaluation import Evaluator
from fedcluster.training.executors.distributed import all_gather_text, all_reduce_table, rank_and_world


class DeviceEvaluation(Protocol):
    """Scores devices: a line of devices.jsonl, and its summary. Called, it does so only in the rounds in which this is
    due. Devices are served w or, where there is a model for each cluster, that of their own."""

    def __call__(
        self, w: Tensor, round: int, by_cluster: Sequence[Tensor] = ()
    ) -> tuple[Line, dict[str, Any]] | None: ...
    def measure(self, w: Tensor, round: int, by_cluster: Sequence[Tensor] = ()) -> tuple[Line, dict[str, Any]]: ...


def served(cluster: int, w: Tensor, by_cluster: Sequence[Tensor]) -> Tensor:
    """The model that the devices of this cluster are served; w where they are in none."""
    return by_cluster[cluster] if by_cluster and cluster >= 0 else w


class DeviceEvaluator:
    """Scores the devices, or a fixed sample of them, every `eval.every` rounds. Threads and ranks share the devices;
    their number changes nothing but the time."""

    def __init__(self, evaluate: Evaluator, held_out: HeldOut, clusters: Clusters, options: Eval, seed: int) -> None:
        self.evaluate, self.held_out, self.every = evaluate, held_out, options.every
        self.devices = evaluated_devices(np.flatnonzero(held_out.sizes), options, seed)
        self.clusters = clusters.assignment[self.devices]

    def __call__(self, w: Tensor, round: int, by_cluster: Sequence[Tensor] = ()) -> tuple[Line, dict[str, Any]] | None:
        return self.measure(w, round, by_cluster) if round % self.every == 0 else None

    def measure(self, w: Tensor, round: int, by_cluster: Sequence[Tensor] = ()) -> tuple[Line, dict[str, Any]]:
        rank, world = rank_and_world()
        groups = self.clusters if by_cluster else np.zeros_like(self.clusters)
        scores: dict[int, dict[str, float]] = {}
        for K in np.unique(groups).tolist():
            self.evaluate.load(served(K, w, by_cluster))
            mine = np.flatnonzero(groups == K)[rank::world].tolist()
            scores |= zip(mine, self.evaluate.shared(self.score, mine), strict=True)
        names = column_names(json.loads(text) for text in all_gather_text(json.dumps(column_names(scores.values()))))
        table = torch.zeros(len(self.devices), len(names), dtype=torch.float64)
        for row, one in scores.items():
            table[row] = torch.tensor([one.get(name, math.nan) for name in names], dtype=torch.float64)
        columns = dict(zip(names, all_reduce_table(table).T.tolist(), strict=True))
        sizes = self.held_out.sizes[self.devices]
        line = device_line(round, self.devices.tolist(), self.clusters.tolist(), sizes.tolist(), columns)
        return line, summarize(line, self.evaluate.metrics)

    def score(self, row: int) -> dict[str, float]:
        """The mean loss and the metrics of one device."""
        x, y = self.held_out.samples(int(self.devices[row]))
        return self.evaluate.score(x, y)


def evaluated_devices(devices: Ints, options: Eval, seed: int) -> Ints:
    """All of these devices or, where `eval.devices` is a number, a fixed sample."""
    if options.devices == "all" or options.devices >= len(devices):
        return devices
    return np.sort(stream(seed, "evaluated devices").choice(devices, options.devices, replace=False))
