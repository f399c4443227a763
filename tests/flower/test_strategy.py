"""FedCluster as a Flower Strategy, over a real SuperLink, with devices that are not ours."""

import math
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

from fedcluster.flower import FedCluster, strategy
from fedcluster.flower._compat import TaskIdentity, generate_key_pairs, set_message_id
from fedcluster.flower.node import FleetConnection, connect
from fedcluster.flower.superlink import SuperLink
from fedcluster.state import Accepted
from tests.federation import until

pytestmark = pytest.mark.xdist_group("federation")

START = {"w": Array(np.zeros(3, np.float32)), "b": Array(np.zeros((2, 2), np.float32))}


def answer(number: int, message: Message) -> Message:
    """Device n adds n + 1 to all arrays; some devices are hostile."""
    (record,) = message.content.array_records.values()
    arrays = {name: array.numpy() + np.float32(number + 1) for name, array in record.items()}
    examples: float = 10 * (number + 1)
    if number == 4:
        arrays["w"][1] = np.nan
    elif number == 5:
        arrays["b"] = np.ones((1, 1), np.float32)
    elif number == 6:
        arrays["x"] = arrays.pop("w")
    elif number == 7:
        examples = -1
    elif number == 8:
        examples = 1e12
    content = ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})
    if number == 9:  # a few bytes of header that promise a terabyte
        content["w"] = Array("float32", (3,), "numpy.ndarray", content["w"].data.replace(b"(3,), ", b"(9**9,)"))
    return Message(
        RecordDict({"arrays": content, "metrics": MetricRecord({"num-examples": examples})}), reply_to=message
    )


def device(number: int, address: str, over: threading.Event) -> None:
    with connect(address, None, generate_key_pairs(), registered=False) as connection:
        numbers[connection.node.node_id] = number
        serve(connection, number, over)


def serve(connection: FleetConnection, number: int, over: threading.Event) -> None:
    while not over.is_set():
        try:
            message = connection.receive()
            if message is not None:
                connection.send(answer(number, message))
        except httpx.HTTPError:
            return
        time.sleep(0.1)


numbers: dict[int, int] = {}


@contextmanager
def devices(count: int, address: str) -> Iterator[None]:
    over = threading.Event()
    threads = [threading.Thread(target=device, args=(number, address, over)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(30)


def by_parity(nodes: list[int]) -> list[int]:
    return [numbers[node] % 2 for node in nodes]


def test_it_wraps_other_strategies_and_lets_no_attacker_through(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Clusters of even and odd devices take turns; of devices 4 to 9 only 8 is accepted, with a bounded weight."""
    superlink = SuperLink(None, None, tmp_path / "superlink.log")
    with superlink.running(), devices(10, superlink.address), superlink.run() as grid:
        until(lambda: len(list(grid.get_node_ids())) == 10)
        strategy = FedCluster(FedAvg(fraction_evaluate=0.0), clusters=by_parity, order="cyclic")
        strategy.examples = dict.fromkeys(range(20), 20.0)  # a fleet whose median is known
        result = strategy.start(grid, ArrayRecord(START), num_rounds=1, timeout=60)
        # even cluster: devices 0 and 2 with 10 and 30 examples, 8 with at most 5 times the median;
        # then the odd one, 1 and 3 with 20 and 40
        even = (1 * 10 + 3 * 30 + 9 * 100) / (10 + 30 + 100)
        odd = (2 * 20 + 4 * 40) / 60
        for array in result.arrays.values():
            np.testing.assert_allclose(array.numpy(), even + odd, rtol=1e-6)
        refused = "\n".join(record.getMessage() for record in caplog.records)
        for why in ("not finite", "wrong shape or type", "wrong names", "num-examples is not a positive number"):
            assert why in refused

        private = DifferentialPrivacyServerSideFixedClipping(
            FedAvg(fraction_evaluate=0.0), noise_multiplier=0.0, clipping_norm=1e9, num_sampled_clients=3
        )
        nested = FedCluster(private, clusters=2, seed=1)
        assert nested.start(grid, ArrayRecord(START), num_rounds=1, timeout=60).arrays["w"].numpy().shape == (3,)


class Filling(Grid):
    """A grid that has one more node at every look, and whose nodes answer at once."""

    def __init__(self) -> None:
        self.looks, self.replies = -1, dict[str, Message]()

    def get_node_ids(self) -> list[int]:
        self.looks += 1
        return [1, 2, 3, 4][: self.looks]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        for message in messages:
            name = f"{self.looks}/{message.metadata.dst_node_id}"
            set_message_id(message, name)
            self.replies[name] = answer(message.metadata.dst_node_id, message)
        return list(self.replies)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.replies.pop(name) for name in message_ids]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Any: ...
    def create_message(self, *words: Any, **named: Any) -> Any: ...
    def set_run(self, run: Any) -> None: ...

    run: Any = None


def test_it_waits_for_the_nodes_that_the_inner_strategy_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy, "POLL_SECONDS", 0.0)
    for name in ("_run_id", "_task_id", "_node_id"):  # as within a ServerApp
        monkeypatch.setattr(TaskIdentity, name, 1)
    inner = FedAvg(fraction_train=0.5, fraction_evaluate=0.0, min_available_nodes=3)
    turns, grid = FedCluster(inner, clusters=1), Filling()
    result = turns.start(grid, ArrayRecord(START), num_rounds=1, timeout=60)
    assert set(turns.members) == {1, 2, 3}
    assert result.arrays["w"].numpy()[0] == pytest.approx((2 * 20 + 3 * 30 + 4 * 40) / 90)
    assert (inner.fraction_train, inner.min_train_nodes, inner.min_available_nodes) == (0.5, 2, 3)


def test_it_refuses_what_moves_much_too_far(caplog: pytest.LogCaptureFixture) -> None:
    """In the first cycle by the cohort's own median, then by the median of the cohorts before."""
    upload_spec = {"w": torch.ones(3), "b": torch.ones(2, 2)}

    def kept(**moved: float) -> list[int]:
        updates = [Accepted(int(k[1:]), 1.0, {n: t + by for n, t in upload_spec.items()}) for k, by in moved.items()]
        return strategy_.bounded(updates, upload_spec, {int(k[1:]): (int(k[1:]), None) for k in moved})  # type: ignore[misc]

    strategy_ = FedCluster(FedAvg())
    assert kept(_0=1.0, _1=2.0, _2=1e6) == [0, 1]
    assert kept(_3=1e6) == []
    assert kept(_3=9.0) == [3]
    assert "refused the update of node 3: moved by 2.65e+06" in caplog.text
    strategy_ = FedCluster(FedAvg(), norm_bound=math.inf)
    assert kept(_0=1.0, _1=1e9) == [0, 1]
