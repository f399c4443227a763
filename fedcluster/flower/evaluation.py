"""Evaluation by device in a federation: devices score the global model on samples of their own, and send numbers only.

A device that allows it (`join --evaluate`) replies with its number of samples and, for the loss and each metric, the
sums that its value is made from. The values, lines and summaries are made from these by the simulation's own code.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Message
from torch import Tensor

from fedcluster import __version__
from fedcluster.data.dataset import Dataset, DataSpec
from fedcluster.errors import BadExperiment
from fedcluster.flower.executor import NodeDirectory
from fedcluster.flower.messages import LARGEST, Fields, InvalidMessage, get_int, pack_tensors, pack_with, unpack_sums
from fedcluster.flower.transport import OFFLINE, Transport, unpack_outcome
from fedcluster.runs.devices import column_names, device_line, summarize
from fedcluster.runs.metrics import Line
from fedcluster.training.device_evaluation import evaluated_devices, served
from fedcluster.training.evaluation import Evaluator, Sums, values
from fedcluster.training.setup import Setup


def expected_sums(setup: Setup) -> Sums:
    """The sums of the loss and the metrics on two samples that are all zeros: their names and shapes."""
    zeros = Evaluator(setup.flat_model, zero_samples(setup.spec), None, setup.task, setup.evaluate.metrics)
    assert zeros.dataset is not None
    zeros.load(setup.start.model)
    return zeros.sums(map, zeros.dataset.x_test, zeros.dataset.y_test, zeros.metrics)


def zero_samples(spec: DataSpec) -> Dataset:
    x = np.zeros((2, *spec.shape), np.int64 if spec.vocabulary else np.float32)
    match spec.target:
        case "class":
            y = np.zeros(2, np.int64)
        case "token":
            y = np.zeros((2, *spec.shape), np.int64)
        case _:
            y = np.zeros((2, spec.outputs), np.float32)
    return Dataset(x, y, x, y, target=spec.target, outputs=spec.outputs, vocabulary=spec.vocabulary)


class RemoteEvaluation:
    """The `DeviceEvaluation` of a federation. Every `eval.every` rounds it asks the devices that allow it, or a fixed
    sample of them. Devices that are offline, do not answer within `deadline` seconds, or send what is refused, are
    missing."""

    def __init__(self, directory: NodeDirectory, setup: Setup, plan: str, max_bytes: int, deadline: float) -> None:
        self.directory, self.plan, self.deadline = directory, plan, deadline
        self.options, self.seed, self.metrics = setup.experiment.eval, setup.experiment.seed, setup.evaluate.metrics
        sums = expected_sums(setup)
        self.shapes = {name: tensor.shape for name, tensor in sums.items()}
        self.transport = Transport(directory.grid, max_bytes, notifier=directory.notifier)

    def __call__(self, w: Tensor, round: int, by_cluster: Sequence[Tensor] = ()) -> tuple[Line, dict[str, Any]] | None:
        if round % self.options.every or not self.directory.registry.test_sizes(round - 1).any():
            return None
        line, summary = self.measure(w, round, by_cluster)
        return (line, summary) if line["device"] else None

    def measure(self, w: Tensor, round: int, by_cluster: Sequence[Tensor] = ()) -> tuple[Line, dict[str, Any]]:
        registry = self.directory.registry
        sizes, clusters = registry.test_sizes(round - 1), registry.clusters(round - 1).assignment
        asked = evaluated_devices(np.flatnonzero(sizes), self.options, self.seed)
        models = {K: served(K, w, by_cluster) for K in np.unique(clusters[asked]).tolist()}
        scores = dict(self.ask(models, round, {int(k): (int(sizes[k]), int(clusters[k])) for k in asked}))
        self.directory.say(f"round {round}: {len(scores)} of {len(sizes)} devices have sent their scores")
        devices = np.array(sorted(scores), np.int64)
        names = column_names(scores[k] for k in devices.tolist())
        columns = {name: [scores[k].get(name, math.nan) for k in devices.tolist()] for name in names}
        line = device_line(round, devices.tolist(), clusters[devices].tolist(), sizes[devices].tolist(), columns)
        return line, summarize(line, self.metrics)

    def ask(
        self, models: Mapping[int, Tensor], round: int, devices: Mapping[int, tuple[int, int]]
    ) -> Iterator[tuple[int, dict[str, float]]]:
        """The scores of these devices, in the order of arrival. Each has its number of samples and its cluster, whose
        model it is sent."""
        self.directory.update()
        tensors, messages = {K: pack_tensors({"model": model}) for K, model in models.items()}, {}
        for k, (_, K) in devices.items():
            node = self.directory.node(k)
            fields = {"plan": self.plan, "version": __version__, "round": round, "device": k}
            if node is None:
                self.say(round, k, OFFLINE)
            else:
                content, group = pack_with(fields, tensors[K]), str(round)
                messages[k] = Message(content, node, "evaluate", ttl=self.deadline, group_id=group)
        for k, outcome in self.transport.exchange(messages, self.deadline) if messages else ():
            reply = unpack_outcome(outcome)
            if isinstance(reply, str):
                self.say(round, k, reply)
                continue
            try:
                if isinstance(reply, InvalidMessage):
                    raise reply
                yield k, self.scores(reply[0], round, k, devices[k][0])
            except InvalidMessage as error:
                self.say(round, k, f"refused its scores ({error})")

    def scores(self, fields: Fields, round: int, k: int, samples: int) -> dict[str, float]:
        """The loss and the metrics that a reply comes to, checked."""
        if (get_int(fields, "round"), get_int(fields, "device")) != (round, k):
            raise InvalidMessage("for another round or device")
        if get_int(fields, "samples") != samples:
            raise InvalidMessage(f"not on the {samples:,} samples that it has for this")
        sums = unpack_sums(fields, self.shapes)
        try:
            found = values(sums, self.metrics)
        except BadExperiment:
            raise InvalidMessage("sums that no samples have") from None
        shares = {metric.name for metric in self.metrics if metric.percent}
        for name, value in found.items():
            if abs(value) > LARGEST or (name.partition("/")[0] in shares and not 0 <= value <= 1):
                raise InvalidMessage(f"{name}: out of range")
        return found

    def say(self, round: int, k: int, reason: str) -> None:
        device = self.directory.registry.entries[k].device
        self.directory.say(f"round {round}, scores: device {device}: {reason}")
