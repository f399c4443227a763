"""Overlapping cycles, pipelining: up to d + 1 clusters train at the same time, with d = `clusters.overlap`.

The cohort of cycle t = j M + K downloads the model of d cycles ago, and its movement is applied to the model of now:

    D_t      = A_t - W_{t - d}        A_t: what the updates of the cohort are aggregated to
    W_{t+1}  = W_t + D_t              W_{t - d} = W_0 for t < d;  d = 0 is FedCluster, to the bit

W_t + D_t takes the place of A_t in everything that follows: the algorithm combines it with the server's state of now,
and a server optimizer takes D_t for the cycle's movement. The cohort downloads all that the algorithm would have sent
with W_{t - d}: control variates, momentum, statistics, and the number t - d. The learning rate is that of cycle t.
Running statistics of a model are those of A_t: they are averages, which a difference could make negative.

Cycles are applied in the order of the schedule, also across rounds, so that the result does not depend on which is
ready first. Cycle t can start when W_{t - d} is there, so that cycles t - d to t are under way at once. A device trains
for one cycle at a time: a cycle whose cohort shares a device with cycle p, the latest such one of the d before it,
waits for p and downloads W_{p+1}, which is less stale. Within a round cohorts are disjoint; in consecutive rounds the
same cluster may come again within d cycles, where orders are shuffled.

For algorithms with state this means:

    SCAFFOLD           c_k changes from one turn of device k to its next one, and c by p_k times as much when this is
                       applied, so that c stays the mean of the c_k; a step uses the c that was sent
    FedNova            normalises the movement from the model that was sent
    MimeLite, FEDL     statistics are of gradients at the models that were sent
    GHBM, LocalGHBM,   momentum between the models that were sent, over the number of cycles between these
    FedHBM

Refused are differential privacy, whose accounting is for cycles one after another; algorithms with several exchanges in
a cycle, since the later ones would depend on whether earlier cycles are over; SCAFFOLD that resets its variates at the
start of a round, when cycles of the round before still use them; and an order of clusters that follows from the
movements of the round before.
"""

from dataclasses import replace

import torch

from fedcluster.algorithms.fedavg import FedAvg
from fedcluster.errors import BadExperiment
from fedcluster.fleet.schedule import Cycle, Schedule
from fedcluster.state import Aggregate, State, Tensors, Time


def check(schedule: Schedule, algorithm: FedAvg) -> None:
    """Refuse what cannot overlap."""
    options, clusters = schedule.options, schedule.clusters.count
    overlap, why = options.overlap, None
    if not overlap:
        return
    if overlap >= clusters:
        why = f"at most {clusters - 1} of {clusters} clusters can train beside the one whose turn it is: lower it"
    elif options.order == "balanced":
        why = 'order = "balanced" follows from all movements of the round before: use another order'
    elif schedule.sampling is not None:
        why = "the accounting of [privacy] is for cycles one after another: remove [privacy]"
    elif len(algorithm.phases) > 1:
        why = f"{algorithm.name} exchanges messages {len(algorithm.phases)} times in a cycle: use another algorithm"
    elif fault := algorithm.overlap_fault():
        why = fault
    if why:
        raise BadExperiment(f"clusters.overlap = {overlap}: {why}, or leave it out")


def first_state(start: State, algorithm: FedAvg, overlap: int) -> State:
    """The state before the first cycle with what the server keeps: the downloads of the last `overlap` cycles, that of
    W_t in place t mod `overlap`, and the times at which their models were there."""
    if not overlap:
        return start
    sent = algorithm.phases[0].broadcast(start)
    kept = {key(place, name): tensor for place in range(overlap) for name, tensor in sent.items()}
    return replace(start, server=start.server | kept, time=Time(past=(0,) * overlap))


def remember(state: State, sent: Tensors, overlap: int) -> Tensors:
    """The place that the download of W_t takes, that of W_{t - overlap}."""
    return {key(state.t % overlap, name): tensor for name, tensor in sent.items()} if overlap else {}


def download(state: State, sent: Tensors, cycle: Cycle, overlap: int) -> Tensors:
    """What the algorithm sends with W_{t - staleness}, given what it sends with W_t."""
    if not cycle.staleness:
        return sent
    return {name: state.server[key((state.t - cycle.staleness) % overlap, name)] for name in sent}


def key(place: int, name: str) -> str:
    return f"overlap.{place}.{name}"


def downloaded(state: State, cycle: Cycle, received: Tensors) -> State:
    """The state with the model that the cohort downloaded."""
    return replace(state, model=received["model"]) if cycle.staleness else state


def move(aggregate: Aggregate, state: State, cycle: Cycle, received: Tensors) -> Aggregate:
    """The aggregate with W_t + D_t in place of A_t."""
    model = aggregate.message.get("model")
    if not cycle.staleness or model is None:
        return aggregate
    size = len(state.w)
    w = state.w + (model[:size] - received["model"][:size])
    return replace(aggregate, message=aggregate.message | {"model": torch.cat([w, model[size:]])})
