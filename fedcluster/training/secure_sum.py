"""One phase of a cycle under secure aggregation: the server learns the mean of the updates and no single one.

    keys -> shares -> local training, masked updates -> signatures -> shares in the clear -> mean -> combine

Devices withdraw updates beyond the norm bound. The mean of updates that keep a bound keeps it too, so the server holds
the mean to it; `state.norms` has the norms of means.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from fedcluster.fleet.schedule import Cycle
from fedcluster.runs.ledger import Ledger
from fedcluster.secure_aggregation import integers
from fedcluster.secure_aggregation.ciphers import Words
from fedcluster.secure_aggregation.messages import ProtocolError
from fedcluster.secure_aggregation.server import Reply, Sum
from fedcluster.state import Aggregate, Tensors, Unsent, Update
from fedcluster.training.executors.secure import MASKED, Asked, Exchange, Withdrawn
from fedcluster.training.norm_bound import Norms, measure
from fedcluster.training.setup import Setup

ROUNDING = 1e-6  # by how much, relatively, rounding may carry a mean over the bound of its updates


class SumFailed(Exception):
    """The sum of a cycle could not be made. The text says why."""


def run_secure_phase(
    setup: Setup, ledger: Ledger, asked: Asked, spec: Tensors, norms: Norms, accepted: set[int]
) -> Aggregate | None:
    """The aggregate of a phase; the devices whose updates are in it are added to `accepted`. SumFailed where there is
    none. The norms of the mean take the place of those of updates."""
    privacy, cycle = setup.experiment.privacy, asked.cycle
    assert setup.secure is not None
    assert privacy is not None
    if not len(cycle.cohort):  # none is left after an earlier phase
        return None
    exchange = setup.secure.exchange(asked)
    numbers = {exchange.name(k): k for k in cycle.cohort.tolist()}
    shares = asked.weights
    weights = {name: shares[k] for name, k in numbers.items()}
    size = integers.numbers_of(spec)
    sum_ = Sum(exchange.session, weights, size, exchange.verify, privacy.threshold, privacy.min_cohort)
    try:
        total = add_up(sum_, exchange, ledger, cycle, spec, numbers)
    except ProtocolError as error:
        raise SumFailed(f"no secure sum: {error}") from None
    finally:
        ledger.faults += [(numbers[name], reason) for name, reason in sum_.faults.items() if name in numbers]
    mean = integers.mean(spec, total, [weights[name] for name in sum_.masked])
    assert mean is not None
    found = measure(mean.message, norms.origin, {name: limit * (1 + ROUNDING) for name, limit in norms.limits.items()})
    if isinstance(found, str):
        raise SumFailed(f"the mean of the updates is refused ({found}): a device has not kept to the bound")
    accepted |= {numbers[name] for name in sum_.masked}
    norms.kept[min(accepted)] = found
    if not setup.transforms:
        return mean
    place = asked.phase, cycle.round, cycle.cycle
    return replace(mean, message=setup.transforms.on_aggregate(mean.message, asked.received, *place))


def add_up(
    sum_: Sum, exchange: Exchange, ledger: Ledger, cycle: Cycle, spec: Tensors, numbers: Mapping[str, int]
) -> Words:
    """The five exchanges. The ledger counts what they send besides updates."""

    def ask(stage: str, requests: Mapping[str, bytes]) -> Iterator[Reply]:
        ledger.counts["bytes_down"] += sum(map(len, requests.values()))
        for name, content in exchange.ask(stage, requests):
            ledger.counts["bytes_up"] += len(content) if isinstance(content, bytes) else 0
            yield name, content

    def train(requests: Mapping[str, bytes]) -> Iterator[Update | Unsent]:
        ledger.counts["bytes_down"] += sum(map(len, requests.values()))
        yield from (Unsent(k) for name, k in numbers.items() if name not in requests)
        yield from exchange.train(requests)

    phase = exchange.session.phase
    try:
        requests = sum_.share_keys(ask("advertise", sum_.advertise()))
        requests = sum_.ask_updates(ask("share", requests))
    except ProtocolError:
        for _ in ledger.receive(map(Unsent, numbers.values()), cycle, spec, phase):
            pass
        raise
    for update in ledger.receive(train(requests), cycle, spec, phase):
        take(sum_, exchange, update, ledger)
    requests = sum_.unmask(ask("confirm", sum_.confirm()))
    return sum_.finish(ask("unmask", requests))


def take(sum_: Sum, exchange: Exchange, update: Update, ledger: Ledger) -> None:
    """Add a masked update to the sum, or refuse it."""
    session, upload = exchange.session, update.message.get(MASKED)
    if update.fault is not None:
        ledger.refuse(update, update.fault, isinstance(update.fault, Withdrawn))
    elif upload is None or (update.round, update.cycle) != (session.round, session.cycle):
        ledger.refuse(update, "not a masked update for this cycle", False)
    elif reason := sum_.add(exchange.name(update.device), upload.numpy().tobytes()):
        ledger.refuse(update, reason, False)
