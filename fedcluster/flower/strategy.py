"""A Flower Strategy in which clusters take turns within every round, wrapped around another strategy.

    strategy = FedCluster(FedAvg(), clusters=4)
    result = strategy.start(grid, initial_arrays, num_rounds=10)

The inner strategy decides what devices are sent and how their replies are aggregated. FedCluster decides which devices
take part in each cycle, and passes on only replies that `accept` would accept. Wrappers for differential privacy go
inside: FedCluster(DP(FedAvg())).
"""

import io
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.lib import format as npy

from fedcluster.experiment import CLAIM_CAP, NORM_BOUND, sections
from fedcluster.fleet.clustering.clusters import Clusters
from fedcluster.fleet.fleet import Fleet
from fedcluster.fleet.schedule import Cycle, Schedule
from fedcluster.flower.messages import InvalidMessage
from fedcluster.flower.transport import OBJECT_TYPES, Outcome, Transport
from fedcluster.models.kernels.vectors import sum_of_squares
from fedcluster.state import Accepted, Tensors, Update
from fedcluster.training.acceptance import accept
from fedcluster.training.norm_bound import lower_median, norm_limit, remember, too_far

LOG = logging.getLogger("flwr")
ARRAY_TYPES = OBJECT_TYPES | {"ArrayRecord", "Array", "ArrayChunk", "MetricRecord"}
OVERHEAD = 2**20  # bytes of a reply besides its arrays
MIN_CHUNK = 2**20  # bytes: the smallest chunks in which Flower sends large arrays
POLL_SECONDS = 1.0  # between two looks for nodes, as in Flower's strategies
LOG_SECONDS = 30.0  # between two messages that we are waiting for nodes
SELECTION = ("fraction_train", "min_train_nodes", "min_evaluate_nodes", "min_available_nodes")

Assign = Callable[[list[int]], list[int]]
"""A clustering function: from node ids to the cluster of each, from 0."""


class VisibleNodes(Grid):
    """A grid of which the inner strategy sees only some nodes."""

    def __init__(self, grid: Grid, nodes: list[int]) -> None:
        self.grid, self.nodes = grid, nodes

    def get_node_ids(self) -> Iterable[int]:
        return self.nodes

    @property
    def run(self) -> Any:
        return self.grid.run

    def set_run(self, run: Any) -> None:
        self.grid.set_run(run)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        return self.grid.create_message(*args, **kwargs)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self.grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.grid.send_and_receive(messages, timeout=timeout)


class FedCluster(Strategy):
    """`clusters` is the number of random clusters, or a function from node ids to clusters. A device's weight is the
    number of examples that it claimed at first, at most `sample_cap` times the median. An update is refused if it moves
    the arrays by more than their own norm and more than `norm_bound` times the median of recent cohorts; `math.inf`
    refuses none. A round starts when at least one node and the inner strategy's `min_available_nodes` are online."""

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
        self.options = sections.Clusters(count=count, participation=participation, order=order)
        self.members: dict[int, int] = {}  # the cluster of every node that has been online
        self.examples: dict[int, float] = {}  # what each claimed at first
        self.norms: tuple[float, ...] = ()  # the medians of recent cohorts
        self.weighted_by = "num-examples"
        self.min_nodes = 1
        for part in unwrap(inner):
            self.weighted_by = getattr(part, "weighted_by_key", self.weighted_by)
            self.min_nodes = max(self.min_nodes, getattr(part, "min_available_nodes", 1))

    def summary(self) -> None:
        LOG.info("\t├──> FedCluster: clusters take turns in %s order, each with:", self.options.order)
        self.inner.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        with selecting_all(self.inner):
            return list(self.inner.configure_train(server_round, arrays, config, grid))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return self.inner.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        with selecting_all(self.inner):
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
        """Train for `num_rounds` rounds of one cycle per cluster. A round starts when enough nodes are online.
        `timeout` is for a cohort; a cluster without a node online is skipped. The inner strategy counts cycles as its
        rounds."""
        self.summary()
        train_config, evaluate_config = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        result, arrays = Result(), initial_arrays
        if evaluate_fn is not None:
            record(result.evaluate_metrics_serverapp, 0, evaluate_fn(0, arrays))
        number = 0
        for j in range(num_rounds):
            for cycle, nodes in self.round(j, self.wait_for_nodes(grid)):
                number += 1
                online = set(grid.get_node_ids()) & set(nodes)
                if not online:
                    LOG.warning("round %s: no node of cluster %s is online", j + 1, cycle.cluster)
                    continue
                sent = self.configure_train(
                    number, arrays, train_config, VisibleNodes(grid, sorted(online, key=nodes.index))
                )
                replies = self.accepted(cycle, nodes, arrays, self.exchange(grid, sent, arrays, timeout))
                new, metrics = self.aggregate_train(number, replies)
                arrays = new or arrays
                record(result.train_metrics_clientapp, number, metrics)
            sent = list(self.configure_evaluate(number, arrays, evaluate_config, grid))
            answers = [reply for _, reply in self.exchange(grid, sent, arrays, timeout) if isinstance(reply, Message)]
            metrics = self.aggregate_evaluate(number, answers) if answers else None
            record(result.evaluate_metrics_clientapp, j + 1, metrics)
            if evaluate_fn is not None:
                record(result.evaluate_metrics_serverapp, j + 1, evaluate_fn(j + 1, arrays))
            LOG.info("[round %s of %s] %s cycles so far", j + 1, num_rounds, number)
        result.arrays = arrays
        return result

    def wait_for_nodes(self, grid: Grid) -> list[int]:
        """The nodes online, once there are enough, however long that takes, as in Flower's own strategies."""
        logged_at = -math.inf
        while len(nodes := list(grid.get_node_ids())) < self.min_nodes:
            if time.monotonic() - logged_at >= LOG_SECONDS:
                logged_at = time.monotonic()
                LOG.info("Waiting for nodes to connect: %s of %s are online", len(nodes), self.min_nodes)
            time.sleep(POLL_SECONDS)
        return nodes

    def round(self, j: int, online: list[int]) -> Iterator[tuple[Cycle, list[int]]]:
        """The cycles of a round, each with the node ids of its cohort. Late nodes join the smallest cluster."""
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
    ) -> Iterator[tuple[int, Outcome]]:
        """Send the messages, and yield an outcome for every node. Replies are bounded by the size of the arrays."""
        messages = {message.metadata.dst_node_id: message for message in sent}
        if not messages:
            return
        for message in messages.values():
            message.metadata.ttl = timeout
        array_bytes = sum(len(array.data) for array in arrays.values())
        max_objects = 16 + 3 * len(arrays) + array_bytes // MIN_CHUNK
        transport = Transport(grid, 2 * array_bytes + OVERHEAD, max_objects, ARRAY_TYPES)
        for node, outcome in transport.exchange(messages, timeout):
            if not isinstance(outcome, Message):
                LOG.warning("node %s: %s", node, outcome)
            yield node, outcome

    def accepted(
        self, cycle: Cycle, nodes: list[int], arrays: ArrayRecord, outcomes: Iterable[tuple[int, Outcome]]
    ) -> list[Message]:
        """The replies for the inner strategy: of the right names and shapes, finite, bounded, and with bounded
        weights."""
        number, messages = {node: int(k) for k, node in zip(cycle.cohort, nodes, strict=True)}, {}
        updates = []
        for node, reply in outcomes:
            if isinstance(reply, Message):
                messages[number[node]] = (node, reply)
                updates.append(self.update(number[node], cycle, arrays, reply))

        def refuse(update: Update, reason: str, diverged: bool) -> None:
            LOG.warning("refused the update of node %s: %s", messages[update.device][0], reason)

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
        """The devices whose updates are within the norm bound; in the first cycle the cohort's own median counts."""
        moved = {one.device: distance(one.message, upload_spec) for one in updates}
        if not moved:
            return []
        usual = lower_median(list(moved.values()))
        limit = norm_limit(self.norm_bound, self.norms, distance(upload_spec), usual)
        kept = [k for k, norm in moved.items() if norm <= limit]
        for k in moved.keys() - kept:
            node = messages[k][0]
            LOG.warning("refused the update of node %s: %s", node, too_far(moved[k], limit, "norm_bound"))
        if kept:
            self.norms = remember(self.norms, [moved[k] for k in kept])
        return kept

    def update(self, k: int, cycle: Cycle, arrays: ArrayRecord, reply: Message) -> Update:
        try:
            records, metrics = list(reply.content.array_records.values()), list(reply.content.metric_records.values())
            if len(records) != 1 or len(metrics) != 1:
                raise InvalidMessage("not one record of arrays and one of metrics")
            claim = metrics[0].get(self.weighted_by)
            if not isinstance(claim, int | float) or not math.isfinite(claim) or claim <= 0:
                raise InvalidMessage(f"{self.weighted_by} is not a positive number")
            return Update(k, cycle.round, cycle.cycle, tensors_of(records[0], arrays))
        except InvalidMessage as error:
            return Update(k, cycle.round, cycle.cycle, {}, fault=str(error))


def unwrap(strategy: Any) -> Iterator[Any]:
    """A strategy and the strategies that it wraps."""
    while strategy is not None:
        yield strategy
        strategy = getattr(strategy, "strategy", None)


@contextmanager
def selecting_all(inner: Strategy) -> Iterator[None]:
    """FedCluster chooses cohorts; meanwhile the inner strategy selects all nodes that it sees."""
    given = [(part, name, getattr(part, name)) for part in unwrap(inner) for name in SELECTION if hasattr(part, name)]
    try:
        for part, name, value in given:
            setattr(part, name, type(value)(1))
        yield
    finally:
        for part, name, value in given:
            setattr(part, name, value)


def record(where: dict[int, MetricRecord], number: int, metrics: MetricRecord | None) -> None:
    if metrics is not None:
        where[number] = metrics


def distance(tensors: Tensors, origin: Tensors | None = None) -> float:
    """The norm of all tensors together, or of their difference from `origin`."""
    return math.sqrt(sum(sum_of_squares(tensor, origin[name] if origin else None) for name, tensor in tensors.items()))


def tensors_of(record: ArrayRecord, like: ArrayRecord) -> Tensors:
    """The arrays of a record. Each is decoded only if its header has the shape and type of `like`."""
    if set(record) != set(like):
        raise InvalidMessage("wrong names")
    return {name: tensor_of(array, like[name]) for name, array in record.items()}


def tensor_of(array: Array, like: Array) -> torch.Tensor:
    if (array.stype, array.dtype, tuple(array.shape)) != (like.stype, like.dtype, tuple(like.shape)):
        raise InvalidMessage("wrong shape or type")
    if len(array.data) != len(like.data) or header(array.data) != header(like.data):
        raise InvalidMessage("wrong shape or type")
    return torch.from_numpy(np.array(array.numpy()))


def header(data: bytes) -> tuple[Any, ...]:
    """Shape, order and type that a .npy file claims; numpy would allocate memory for them before it reads on."""
    try:
        file = io.BytesIO(data)
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        return read(file)
    except ValueError:
        raise InvalidMessage("not an array") from None
