"""A Flower Strategy in which clusters take turns, around a strategy of one's own.

    strategy = FedCluster(FedAvg(), clusters=4)
    result = strategy.start(grid, initial_arrays, num_rounds=10)

The inner strategy says what devices are sent and how what comes back is aggregated; FedCluster says whose turn it is,
and lets nothing through to it that `accept` would not. DP wrappers go inside: FedCluster(DP(FedAvg())).
"""

import io
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from logging import INFO, WARNING
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.lib import format as npy

from fedcluster.experiment import CLAIM_CAP, NORM_BOUND
from fedcluster.experiment import Clusters as Options
from fedcluster.fleet.clustering.clusters import Clusters
from fedcluster.fleet.fleet import Fleet
from fedcluster.fleet.schedule import Cycle, Schedule
from fedcluster.flower.messages import Unreadable
from fedcluster.flower.transport import KINDS, Transport
from fedcluster.models.kernels.vectors import sum_of_squares
from fedcluster.state import Accepted, Update
from fedcluster.state import Message as Tensors
from fedcluster.training.acceptance import accept
from fedcluster.training.norm_bound import lower_median, most, remember, too_far

ARRAYS = KINDS | {"ArrayRecord", "Array", "ArrayChunk", "MetricRecord"}
ROOM = 2**20  # bytes of a reply besides its arrays
CHUNK = 2**20  # bytes of a chunk, at least, by which the pieces of a reply are counted
LOOK = 1.0  # seconds between two looks for nodes, as in Flower's strategies
SAY = 30.0  # seconds between two remarks that we are waiting for nodes
OURS = ("fraction_train", "min_train_nodes", "min_evaluate_nodes", "min_available_nodes")

Assign = Callable[[list[int]], list[int]]
"""A clustering of one's own: the cluster of every node, from 0."""


class Shown(Grid):
    """Another grid, of which the inner strategy sees only some nodes."""

    def __init__(self, grid: Grid, nodes: list[int]) -> None:
        self.grid, self.nodes = grid, nodes

    def get_node_ids(self) -> Iterable[int]:
        return self.nodes

    @property
    def run(self) -> Any:
        return self.grid.run

    def set_run(self, run: Any) -> None:
        self.grid.set_run(run)

    def create_message(self, *words: Any, **named: Any) -> Message:
        return self.grid.create_message(*words, **named)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self.grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.grid.send_and_receive(messages, timeout=timeout)


class FedCluster(Strategy):
    """`clusters` is their number, nodes dealt out by chance, or a function from node ids to clusters. A device counts
    for the examples that it claimed at first, `sample_cap` times the median at most, whatever it claims later. Refused
    is an update that moves further than the arrays are long and more than `norm_bound` times as far as the median of
    recent cohorts; `math.inf` refuses none. A round begins when the inner strategy's `min_available_nodes` nodes are on
    line, and at least one."""

    def __init__(
        self,
        inner: Strategy,
        clusters: int | Assign = 2,
        participation: float = 1.0,
        order: str = "reshuffle",
        seed: int = 0,
        norm_bound: float = NORM_BOUND,
        sample_cap: float = CLAIM_CAP,
    ) -> None:
        self.inner, self.assign, self.seed = inner, clusters, seed
        self.norm_bound, self.sample_cap = norm_bound, sample_cap
        count = clusters if isinstance(clusters, int) else None
        self.options = Options(count=count, participation=participation, order=order)  # type: ignore[arg-type]
        self.members: dict[int, int] = {}  # the cluster of every node that ever came
        self.examples: dict[int, float] = {}  # what it claimed at first
        self.norms: tuple[float, ...] = ()  # the medians of recent cohorts
        self.weighted_by = "num-examples"
        self.min_nodes = 1
        for part in parts(inner):
            self.weighted_by = getattr(part, "weighted_by_key", self.weighted_by)
            self.min_nodes = max(self.min_nodes, getattr(part, "min_available_nodes", 1))

    def summary(self) -> None:
        log(INFO, "\t├──> clusters take turns, %s order, around:", self.options.order)
        self.inner.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        with taking_all(self.inner):
            return list(self.inner.configure_train(server_round, arrays, config, grid))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return self.inner.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        with taking_all(self.inner):
            return list(self.inner.configure_evaluate(server_round, arrays, config, grid))

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self.inner.aggregate_evaluate(server_round, replies)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """`num_rounds` rounds of a cycle for every cluster, each begun when enough nodes are on line. `timeout` is a
        cohort's; a cluster of which nobody is on line is passed over. The inner strategy counts cycles as its rounds.
        """
        self.summary()
        train_config, evaluate_config = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        result, arrays = Result(), initial_arrays
        if evaluate_fn is not None:
            keep(result.evaluate_metrics_serverapp, 0, evaluate_fn(0, arrays))
        number = 0
        for j in range(num_rounds):
            for cycle, nodes in self.round(j, self.nodes_of(grid)):
                number += 1
                there = [node for node in nodes if node in set(grid.get_node_ids())]
                if not there:
                    log(WARNING, "round %s: nobody of cluster %s is on line", j + 1, cycle.cluster)
                    continue
                sent = self.configure_train(number, arrays, train_config, Shown(grid, there))
                replies = self.accepted(cycle, nodes, arrays, self.exchange(grid, sent, arrays, timeout))
                new, metrics = self.aggregate_train(number, replies)
                arrays = new or arrays
                keep(result.train_metrics_clientapp, number, metrics)
            sent = list(self.configure_evaluate(number, arrays, evaluate_config, grid))
            found = [reply for _, reply in self.exchange(grid, sent, arrays, timeout) if isinstance(reply, Message)]
            keep(result.evaluate_metrics_clientapp, j + 1, self.aggregate_evaluate(number, found) if found else None)
            if evaluate_fn is not None:
                keep(result.evaluate_metrics_serverapp, j + 1, evaluate_fn(j + 1, arrays))
            log(INFO, "[round %s of %s] %s cycles so far", j + 1, num_rounds, number)
        result.arrays = arrays
        return result

    def nodes_of(self, grid: Grid) -> list[int]:
        """The nodes that are on line, once there are enough: however long that takes, as in Flower's own strategies."""
        said = -math.inf
        while len(nodes := list(grid.get_node_ids())) < self.min_nodes:
            if time.monotonic() - said >= SAY:
                said = time.monotonic()
                log(INFO, "Waiting for nodes to connect: %s of %s are here", len(nodes), self.min_nodes)
            time.sleep(LOOK)
        return nodes

    def round(self, j: int, online: list[int]) -> Iterator[tuple[Cycle, list[int]]]:
        """The cycles of a round, each with the node ids of its cohort. Who comes late joins the smallest cluster."""
        new = sorted(set(online) - self.members.keys())
        if new and not self.members and callable(self.assign):
            self.members = dict(zip(new, self.assign(new), strict=True))
        else:
            count = self.options.count or max(self.members.values()) + 1
            for node in new:
                sizes = np.bincount(list(self.members.values()), minlength=count)
                self.members[node] = int(sizes.argmin())
        nodes = list(self.members)
        groups = Clusters(np.array(list(self.members.values())), max(self.members.values()) + 1)
        fleet = Fleet(np.ones(len(nodes), int))
        for cycle in Schedule(self.options, fleet, groups, self.seed).round(j):
            yield cycle, [nodes[k] for k in cycle.cohort]

    def exchange(
        self, grid: Grid, sent: Iterable[Message], arrays: ArrayRecord, timeout: float
    ) -> Iterator[tuple[int, Message | Unreadable | str]]:
        messages = {message.metadata.dst_node_id: message for message in sent}
        if not messages:
            return
        for message in messages.values():
            message.metadata.ttl = timeout
        weight = sum(len(array.data) for array in arrays.values())
        pieces = 16 + 3 * len(arrays) + weight // CHUNK
        for node, found in Transport(grid, 2 * weight + ROOM, pieces, ARRAYS).exchange(messages, timeout):
            if not isinstance(found, Message):
                log(WARNING, "node %s: %s", node, found)
            yield node, found

    def accepted(
        self, cycle: Cycle, nodes: list[int], arrays: ArrayRecord, found: Iterable[tuple[int, Any]]
    ) -> list[Message]:
        """The replies that the inner strategy may see: alike, finite, and weighted by what is known."""
        number, messages = {node: int(k) for k, node in zip(cycle.cohort, nodes, strict=True)}, {}
        updates = []
        for node, reply in found:
            if isinstance(reply, Message):
                messages[number[node]] = (node, reply)
                updates.append(self.update(number[node], cycle, arrays, reply))

        def refuse(update: Update, why: str, diverged: bool) -> None:
            log(WARNING, "refused the update of node %s: %s", messages[update.device][0], why)

        upload_spec = tensors_of(arrays, arrays)
        kept = [
            messages[k] for k in self.bounded(list(accept(updates, cycle, upload_spec, refuse)), upload_spec, messages)
        ]
        for node, reply in kept:
            (metrics,) = reply.content.metric_records.values()
            self.examples.setdefault(node, float(metrics[self.weighted_by]))  # type: ignore[arg-type]
            largest = self.sample_cap * float(np.median(list(self.examples.values())))
            metrics[self.weighted_by] = min(self.examples[node], largest)
        return [reply for _, reply in kept]

    def bounded(
        self, updates: list[Accepted], upload_spec: Tensors, messages: dict[int, tuple[int, Message]]
    ) -> list[int]:
        """The devices whose updates keep to the norm bound; in the first cycle the cohort's own median counts."""
        moved = {one.device: distance(one.message, upload_spec) for one in updates}
        if not moved:
            return []
        usual = lower_median(list(moved.values()))
        limit = most(self.norm_bound, self.norms, distance(upload_spec), usual)
        kept = [k for k, norm in moved.items() if norm <= limit]
        for k in moved.keys() - kept:
            node = messages[k][0]
            log(WARNING, "refused the update of node %s: %s", node, too_far(moved[k], limit, "norm_bound"))
        if kept:
            self.norms = remember(self.norms, [moved[k] for k in kept])
        return kept

    def update(self, k: int, cycle: Cycle, arrays: ArrayRecord, reply: Message) -> Update:
        try:
            records, metrics = list(reply.content.array_records.values()), list(reply.content.metric_records.values())
            if len(records) != 1 or len(metrics) != 1:
                raise Unreadable("not one record of arrays and one of metrics")
            claim = metrics[0].get(self.weighted_by)
            if not isinstance(claim, int | float) or not math.isfinite(claim) or claim <= 0:
                raise Unreadable(f"{self.weighted_by} is not a positive number")
            return Update(k, cycle.round, cycle.cycle, tensors_of(records[0], arrays))
        except Unreadable as error:
            return Update(k, cycle.round, cycle.cycle, {}, fault=str(error))


def parts(strategy: Any) -> Iterator[Any]:
    """A strategy and those that it wraps."""
    while strategy is not None:
        yield strategy
        strategy = getattr(strategy, "strategy", None)


@contextmanager
def taking_all(inner: Strategy) -> Iterator[None]:
    """Cohorts are ours to choose: for the time being the inner strategy takes all whom it is shown."""
    given = [(part, name, getattr(part, name)) for part in parts(inner) for name in OURS if hasattr(part, name)]
    try:
        for part, name, value in given:
            setattr(part, name, type(value)(1))
        yield
    finally:
        for part, name, value in given:
            setattr(part, name, value)


def keep(where: dict[int, MetricRecord], number: int, metrics: MetricRecord | None) -> None:
    if metrics is not None:
        where[number] = metrics


def distance(tensors: Tensors, origin: Tensors | None = None) -> float:
    """The norm of all tensors together, or of how far they are from others."""
    return math.sqrt(sum(sum_of_squares(tensor, origin[name] if origin else None) for name, tensor in tensors.items()))


def tensors_of(record: ArrayRecord, like: ArrayRecord) -> Tensors:
    """The arrays of a record, each read only once its header promises the shape and type of `like`."""
    if set(record) != set(like):
        raise Unreadable("wrong names")
    return {name: tensor_of(array, like[name]) for name, array in record.items()}


def tensor_of(array: Array, like: Array) -> torch.Tensor:
    if (array.stype, array.dtype, tuple(array.shape)) != (like.stype, like.dtype, tuple(like.shape)):
        raise Unreadable("wrong shape or type")
    if len(array.data) != len(like.data) or header(array.data) != header(like.data):
        raise Unreadable("wrong shape or type")
    return torch.from_numpy(np.array(array.numpy()))


def header(data: bytes) -> tuple[Any, ...]:
    """Shape, order and type that a .npy claims; numpy would make room for them before it looks any further."""
    try:
        file = io.BytesIO(data)
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        return read(file)
    except ValueError:
        raise Unreadable("not an array") from None
