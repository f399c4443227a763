"""One cycle of one cluster: broadcast, local training, acceptance, aggregation, server step."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from fedcluster.algorithms import FedAvg, overlap, pair_balance, past_models, pluralistic
from fedcluster.algorithms.aggregation.registry import Aggregator
from fedcluster.algorithms.aggregation.robust import Cohort, TooFewUpdates
from fedcluster.fleet.clock import CycleOutcome, all_report, select_devices
from fedcluster.fleet.schedule import Cycle
from fedcluster.models.optimizers import learning_rate
from fedcluster.rng import stream
from fedcluster.runs.ledger import Ledger
from fedcluster.runs.metrics import Line
from fedcluster.state import Accepted, Aggregate, State, Tensors
from fedcluster.training import divergence
from fedcluster.training.acceptance import accept
from fedcluster.training.cycle_bound import Clipped, bounded
from fedcluster.training.executors.distributed import (
    all_gather_norms,
    all_gather_refusals,
    all_reduce_aggregate,
    all_reduce_any,
)
from fedcluster.training.executors.in_process import BeginsEarly, DeviceStates
from fedcluster.training.executors.secure import Asked
from fedcluster.training.norm_bound import Norms, usual_steps
from fedcluster.training.secure_sum import SumFailed, run_secure_phase
from fedcluster.training.setup import Setup

Failure = TooFewUpdates | SumFailed


@dataclass(frozen=True, eq=False)
class CycleResult:
    """The state after a cycle, who took part, and the updates that moved furthest. `undone` says why the cycle was
    undone; `failure` is what it failed of; `clipped` says how far it would have moved the model; `malicious` are the
    devices of the cohort that are, in a simulated attack."""

    state: State
    outcome: CycleOutcome
    furthest: list[divergence.Moved]
    undone: str | None = None
    failure: Failure | None = None
    clipped: Clipped | None = None
    malicious: list[int] = field(default_factory=list)

    @property
    def remarks(self) -> Line:
        """What the cycle's line says of it besides what every line says."""
        return {
            "undone": self.undone,
            "too_few": self.failure.count if isinstance(self.failure, TooFewUpdates) else None,
            "no_sum": str(self.failure) if isinstance(self.failure, SumFailed) else None,
            "clipped": self.clipped and asdict(self.clipped),
            "malicious": self.malicious,
        }


def run_cycle(setup: Setup, ledger: Ledger, state: State, cycle: Cycle) -> CycleResult:
    """W_{jM+K} -> W_{jM+K+1}. The model stays as it is if the cycle fails or its result is not finite."""
    outcome = setup.clock.outcome(cycle, state.time) if setup.clock else all_report(cycle, state.time)
    phases, state = setup.algorithm.phases, start_round(setup, state) if state.cycle == 0 else state
    before, cycle = state, outcome.reported
    rows = ledger.rows(outcome.started.cohort) if setup.min_updates else []
    depth, kept = setup.schedule.options.overlap, Tensors()
    device_states = {k: state.devices[k] for k in cycle.cohort.tolist() if k in state.devices}
    received = setup.rates.local(cycle) | (setup.privacy.broadcast(state) if setup.privacy else {})
    furthest: list[divergence.Moved] = []
    failure: Failure | None = None
    if depth and setup.secure is None and isinstance(setup.executor, BeginsEarly):
        begin_early(setup, setup.executor, state)
    for number, phase in enumerate(phases):  # nearly every algorithm has one
        sent, upload_spec = phase.broadcast(state), phase.upload_spec(state)
        kept |= overlap.remember(state, sent, depth)
        sent = overlap.download(state, sent, cycle, depth)
        sent = sent if number else received | sent
        received = received | sent  # a device keeps what it was sent earlier in the cycle
        ledger.send(cycle if number else outcome.started, sent, number)
        try:
            state, accepted, far = run_phase(setup, ledger, state, cycle, received, phase, number, device_states)
            if upload_spec and len(accepted) < setup.min_updates:
                raise TooFewUpdates(len(accepted), setup.min_updates)
        except (TooFewUpdates, SumFailed) as error:
            if setup.min_updates:
                ledger.fail(outcome.started.cohort, rows)
            state, cycle, failure = before, only(cycle, set()), error
            break
        furthest += far
        if setup.initial_device_state or len(phases) > 1:
            cycle = only(cycle, accepted)  # a device that is missing or refused is out for the rest of the cycle
    clipped = None
    if setup.experiment.accept.cycle_bound is not None and setup.devices:
        state, clipped = bounded(before, state, setup.experiment.accept.cycle_bound)
    if setup.optimizer is not None:
        state = setup.optimizer.step(before, state, setup.rates.server(before.round, before.cycle))
    ledger.refusals = all_gather_refusals(ledger.refusals)
    undone = None
    if not divergence.is_finite(state):
        undone = divergence.undone(cycle.cycle, furthest, setup.schedule.name)
        state = setup.privacy.kept(before, state) if setup.privacy else before
    elif device_states:  # the others keep the state that they had before the cycle
        finished = {k: device_states[k] for k in cycle.cohort.tolist() if k in device_states}
        state = replace(state, devices=state.devices | finished)
    state = past_models.step(before, state)
    if setup.schedule.options.order == "balanced":
        state = pair_balance.step(before, state, cycle)
    if setup.experiment.pluralistic is not None:
        state = pluralistic.step(setup.experiment.pluralistic, before, state, cycle)
    state = replace(state, server=state.server | kept, cycle=cycle.cycle + 1, time=outcome.time)
    malicious = [k for k in outcome.reported.cohort.tolist() if setup.attacker and k in setup.attacker.devices]
    return CycleResult(state, outcome, furthest, undone, failure, clipped, malicious)


def start_round(setup: Setup, state: State) -> State:
    """The state with what changes as a round begins, whether or not its cycles fail."""
    changed = setup.optimizer.start_round(state) if setup.optimizer else Tensors()
    for phase in setup.algorithm.phases:
        changed |= phase.start_round(state)
    return replace(state, server=state.server | changed)


def begin_early(setup: Setup, executor: BeginsEarly, state: State) -> None:
    """Let all cohorts begin whose model is there."""
    depth, sent = setup.schedule.options.overlap, setup.algorithm.broadcast(state)
    for ahead, cycle in enumerate(setup.schedule.following(state.round, state.cycle)):
        behind = cycle.staleness - ahead  # how many cycles its model is behind that of now
        if behind >= 0 and cycle.round < setup.experiment.rounds:
            message = overlap.download(state, sent, replace(cycle, staleness=behind), depth)
            executor.begin(cycle, setup.rates.local(cycle) | message, state.devices)


def run_phase(
    setup: Setup,
    ledger: Ledger,
    state: State,
    cycle: Cycle,
    received: Tensors,
    phase: FedAvg,
    number: int,
    device_states: DeviceStates,
) -> tuple[State, set[int], list[divergence.Moved]]:
    """One download and upload: the next state, the devices whose updates were accepted, and the update that moved
    furthest. The executor writes what devices keep to `device_states`."""
    experiment, upload_spec = setup.experiment, phase.upload_spec(state)
    private = setup.privacy is not None and setup.privacy.central  # its clip bounds updates
    bound = experiment.accept.max_movement if setup.devices and not private else math.inf
    lr, steps = learning_rate(experiment.local, received), usual_steps(experiment.local, cycle)
    seen = overlap.downloaded(state, cycle, received)
    norms = Norms(bound, seen, received, upload_spec, lr, steps, setup.task.first_gradients)
    accepted: set[int] = set()
    aggregate: Aggregate | None
    if setup.secure is not None and upload_spec:
        asked = Asked(cycle, received, number, device_states, norms.limits)
        aggregate = run_secure_phase(setup, ledger, asked, upload_spec, norms, accepted)
    else:
        sent = setup.executor.train(cycle, received, number, device_states)
        uploads = ledger.receive(sent, cycle, upload_spec, number)
        updates = collect_devices(accept(uploads, cycle, upload_spec, ledger.refuse, norms), accepted)
        aggregate = run_aggregation(setup, seen, updates, cycle, received, phase, number)
    if aggregate is not None:
        state = phase.combine(state, overlap.move(aggregate, state, cycle, received), cycle)
        ledger.discarded += aggregate.discarded
        state = replace(state, server=state.server | aggregate.kept)
    measured = all_gather_norms(norms.kept, cycle.cohort, upload_spec)
    furthest = [divergence.Moved(*one, cycle.cycle) for one in norms.furthest(measured) if setup.secure is None]
    return replace(state, norms=state.norms | norms.after(measured)), accepted, furthest


def run_aggregation(
    setup: Setup,
    state: State,
    updates: Iterable[Accepted],
    cycle: Cycle,
    received: Tensors,
    phase: FedAvg,
    number: int,
) -> Aggregate | None:
    """The aggregate of the accepted updates, those of all ranks. None when there is none, or nothing is uploaded."""
    transforms, section, spec = setup.transforms, setup.experiment.aggregation, phase.aggregate_spec(state)
    if not spec:
        for _ in updates:
            pass
        return None
    if setup.privacy is not None and setup.privacy.central:
        aggregator: Aggregator = setup.privacy.aggregator(spec, state, cycle)
    else:
        rng = stream(setup.experiment.seed, f"aggregation {number}", cycle.round, cycle.cycle)
        aggregator = section.find()(spec, section.options, rng)
    if hasattr(aggregator, "start"):
        aggregator.start(Cohort(cycle.cohort.tolist(), received.get("model", state.model), state.norms))
    for update in updates:
        if transforms:
            place = (cycle.round, cycle.cycle, update.device)
            update = replace(update, message=transforms.on_server(update.message, received, number, place))
        aggregator.accumulate(*phase.contribution(state, update, cycle), update.device)
    all_reduce_aggregate(aggregator)
    aggregate: Aggregate | None = aggregator.finish()
    if aggregate is None or not transforms:
        return aggregate
    message = transforms.on_aggregate(aggregate.message, received, number, cycle.round, cycle.cycle)
    return replace(aggregate, message=message)


def collect_devices(updates: Iterable[Accepted], devices: set[int]) -> Iterator[Accepted]:
    """Pass updates on and add their devices to the set."""
    for update in updates:
        devices.add(update.device)
        yield update


def only(cycle: Cycle, devices: set[int]) -> Cycle:
    """The cycle with these devices of its cohort, gathered from all ranks."""
    return select_devices(cycle, np.flatnonzero(all_reduce_any(np.isin(cycle.cohort, list(devices)))))
