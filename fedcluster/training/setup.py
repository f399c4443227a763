"""Preparation: the straight line from the experiment to the first cycle."""

from dataclasses import dataclass, replace

import numpy as np

from fedcluster import algorithms
from fedcluster.algorithms import overlap
from fedcluster.algorithms.aggregation import checks as aggregation
from fedcluster.algorithms.transforms import Transforms
from fedcluster.attacks import attacker as attackers
from fedcluster.attacks.attacker import Attacker
from fedcluster.data.dataset import Dataset, DataSpec
from fedcluster.data.partition import Ints, Partition
from fedcluster.errors import BadExperiment
from fedcluster.experiment import Aggregation, Experiment
from fedcluster.fleet import clock as clocks
from fedcluster.fleet import fleet as fleets
from fedcluster.fleet.clustering import registry as clusterings
from fedcluster.fleet.clustering.clusters import Clusters
from fedcluster.fleet.clustering.clusters import build as cluster_fleet
from fedcluster.fleet.schedule import Schedule
from fedcluster.inputs import total_memory
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.schedules import Rates
from fedcluster.models.tasks import Task, metrics_of
from fedcluster.privacy import checks as privacy_checks
from fedcluster.privacy import mechanism as mechanisms
from fedcluster.privacy.mechanism import Mechanism
from fedcluster.reporting import Say, Track, silent, untracked
from fedcluster.runs.ledger import size
from fedcluster.secure_aggregation import checks as secure_checks
from fedcluster.state import State, Tensors
from fedcluster.training.cycle_bound import CYCLE
from fedcluster.training.device_evaluation import DeviceEvaluation, DeviceEvaluator
from fedcluster.training.evaluation import SAMPLE, Evaluator
from fedcluster.training.executors.distributed import broadcast_array
from fedcluster.training.executors.in_process import Executor, InProcess, Trainer
from fedcluster.training.executors.secure import SecureDevices
from fedcluster.training.model_check import check_output
from fedcluster.training.open_data import open_data
from fedcluster.training.pooled import pool, pooled_budget
from fedcluster.training.survey import gradient_sketches
from fedcluster.training.trainer import build_model, build_trainer, without_engine

SLOW_SEARCH = 20_000  # devices: clusters of so many take more than a moment to find


@dataclass(frozen=True, eq=False)
class Setup:
    """Everything that a run has before its first cycle."""

    experiment: Experiment
    dataset: Dataset | None  # None where only the devices of a federation have data
    spec: DataSpec
    fleet: fleets.Fleet
    partition: Partition | None  # None where the samples are on the devices of a federation
    clusters: Clusters
    schedule: Schedule
    rates: Rates
    task: Task
    flat_model: FlatModel
    algorithm: algorithms.FedAvg
    transforms: Transforms
    optimizer: algorithms.ServerOptimizer | None
    executor: Executor
    clock: clocks.Clock | None
    evaluate: Evaluator
    evaluate_devices: DeviceEvaluation | None  # where devices hold out samples
    start: State
    initial_device_state: Tensors  # what a device keeps that has not taken part
    devices: int  # on the ledger
    privacy: Mechanism | None = None
    attacker: Attacker | None = None  # in a simulation with [attack]
    secure: SecureDevices | None = None  # where the server learns sums of updates only
    min_updates: int = 0  # with fewer a cycle fails, and a round of nothing else is taken again: in a federation


def prepare(
    experiment: Experiment,
    say: Say = silent,
    device: str = "cpu",
    precision: str = "float32",
    track: Track = untracked,
) -> Setup:
    """Experiment -> data -> fleet -> clusters -> schedule, and the model at its start W_0."""
    dataset, task = open_data(experiment, say)
    fleet, partition, dataset = build_fleet(experiment, dataset, say)
    clusters = build_clusters(experiment, dataset, fleet, partition, say, track)
    schedule = build_schedule(experiment, fleet, clusters)
    attacker = build_attacker(experiment, dataset, clusters, say)
    sample, held_out, local = partition.pooled(SAMPLE, experiment.seed), partition.held_out, experiment.local
    central = experiment.method == "centralized"
    if central:
        local = pooled_budget(experiment, fleet, schedule, say)
        partition, schedule = pool(experiment, dataset, partition)
    trainer = build_trainer(experiment, dataset.spec, device, local, precision)
    check_output(trainer.flat_model, dataset, task)
    if slower := without_engine(trainer.flat_model):
        say(slower)
    executor = InProcess(trainer, dataset, partition, attacker)
    setup = assemble(experiment, trainer, schedule, executor, dataset.spec, dataset, partition, sample)
    by_device = None
    if held_out is not None:
        by_device = DeviceEvaluator(setup.evaluate, held_out, clusters, experiment.eval, experiment.seed)
    if attacker is not None:
        setup.evaluate.triggered = attacker.attack.triggered(dataset.x_test, dataset.y_test)
    setup = replace(setup, attacker=attacker, evaluate_devices=by_device)
    if central:
        return replace(setup, devices=0)  # the data are in one place: nothing travels
    return replace(setup, clock=build_clock(setup))


def build_fleet(experiment: Experiment, dataset: Dataset, say: Say) -> tuple[fleets.Fleet, Partition, Dataset]:
    """The fleet, the samples of its devices, and the data with features as devices see them."""
    cap = experiment.accept.cap(claimed=False)
    fleet, partition = fleets.build(experiment.fleet, dataset, experiment.seed, cap)
    if partition.repeats:
        say(f"{dataset.name}: a class is smaller than a device's share of it, so devices hold samples more than once")
    return fleet, partition, partition.dataset or dataset


def build_clusters(
    experiment: Experiment, dataset: Dataset, fleet: fleets.Fleet, partition: Partition, say: Say, track: Track
) -> Clusters:
    """The clusters. A clustering that needs gradients gets sketches of those of the task's loss at W_0; under torchrun
    these are rank 0's."""
    options, seed, sketches = experiment.clusters, experiment.seed, None
    if clusterings.find(options).slow and len(fleet) >= SLOW_SEARCH:
        say(f"looking for {options.method} clusters of {len(fleet):,} devices")
    if clusterings.needs(options) == "gradients":
        flat_model = build_model(experiment, dataset)
        sketches = gradient_sketches(
            [flat_model], flat_model.w.clone(), dataset, partition, experiment.local, seed, track
        )
        sketches = broadcast_array(sketches)
    clusters = cluster_fleet(options, fleet, seed, sketches)
    if clusters.left_out():
        say(f"{clusters.left_out():,} of {len(fleet):,} devices are in no cluster, so they take no part")
    return clusters


def build_schedule(experiment: Experiment, fleet: fleets.Fleet, clusters: Clusters) -> Schedule:
    """Who trains in which cycle. With simulated time, more devices are asked than updates are wanted."""
    over_select = 1.0 if experiment.clock is None else experiment.clock.over_select
    sampling = mechanisms.sampling(experiment, experiment.seed)
    return Schedule(experiment.clusters, fleet, clusters, experiment.seed, over_select, sampling)


def build_attacker(experiment: Experiment, dataset: Dataset, clusters: Clusters, say: Say) -> Attacker | None:
    """The attacker, where the experiment has one, and a sentence on who is malicious."""
    if experiment.attack is None:
        return None
    found = attackers.build(experiment.attack, dataset.spec, clusters, experiment.clusters, experiment.seed)
    hit = [len(found.devices.intersection(members.tolist())) for members in clusters.members]
    say(f"{len(found.devices):,} devices in {np.count_nonzero(hit):,} of {len(hit):,} clusters are malicious")
    return found


def build_clock(setup: Setup) -> clocks.Clock | None:
    """Simulated time, where the experiment has it."""
    experiment = setup.experiment
    if experiment.clock is None:
        return None
    clocks.check(experiment.clock, setup.schedule)
    down, up = (sum(map(size, messages)) for messages in algorithms.messages(setup.algorithm, setup.start))
    return clocks.Clock(experiment.clock, setup.fleet, experiment.local, experiment.seed, down, up)


def assemble(
    experiment: Experiment,
    trainer: Trainer,
    schedule: Schedule,
    executor: Executor,
    spec: DataSpec,
    dataset: Dataset | None,
    partition: Partition | None = None,
    sample: Ints | None = None,
) -> Setup:
    """The setup of a run from its parts: the same for a simulation and for a federation's server. `sample` are the rows
    of the training samples on which the model is evaluated, None where only devices have any."""
    algorithm, flat_model = trainer.algorithm, trainer.flat_model
    if experiment.method == "centralized":  # one "device" holds all data
        experiment = experiment.override(aggregation=Aggregation(), pluralistic=None)
    by_cluster = experiment.pluralistic is not None
    balanced = experiment.clusters.order == "balanced" and experiment.method != "centralized"
    if (by_cluster or balanced) and clusterings.find(experiment.clusters).every_round:
        what = "[pluralistic]" if by_cluster else 'clusters.order = "balanced"'
        raise BadExperiment(
            f'clusters.method = "{experiment.clusters.method}" draws clusters anew in every round, and {what} needs '
            f"clusters that keep their devices: use another method, or remove {what}"
        )
    overlap.check(schedule, algorithm)
    optimizer = None if experiment.method == "centralized" else algorithms.optimizer(experiment.server)
    start = algorithms.first_state(algorithm, optimizer, flat_model.w.clone(), flat_model.size, schedule, by_cluster)
    privacy_checks.check(experiment, schedule, algorithm, start)
    aggregation.check(experiment.aggregation, algorithm, start, schedule)
    secure_checks.check(experiment, algorithm, trainer.transforms, schedule)
    mechanism = mechanisms.build(experiment, schedule)
    if mechanism is not None:
        start = replace(start, server=start.server | mechanism.initial_server_state(start))
    if experiment.accept.cycle_bound is not None:
        start = replace(start, norms=start.norms | {CYCLE: ()})
    check_memory(start)
    return Setup(
        experiment=experiment,
        dataset=dataset,
        spec=spec,
        fleet=schedule.fleet,
        partition=partition,
        clusters=schedule.clusters,
        schedule=schedule,
        rates=Rates(experiment, schedule.clusters.count),
        task=trainer.task,
        flat_model=flat_model,
        algorithm=algorithm,
        transforms=trainer.transforms,
        optimizer=optimizer,
        executor=executor,
        clock=None,
        evaluate=Evaluator(flat_model, dataset, sample, trainer.task, metrics_of(experiment, trainer.task)),
        evaluate_devices=None,
        start=start,
        initial_device_state=algorithm.initial_device_state(flat_model.w, flat_model.size),
        devices=len(schedule.fleet),
        privacy=mechanism,
    )


def check_memory(start: State) -> None:
    """Models of the past, of clusters and of cycles under way are one tensor at first, and many later: refuse now what
    will not fit."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in start.server.values())
    if size > total_memory() / 2:
        raise BadExperiment(
            f"the server would keep {size / 2**30:,.1f} GiB in {len(start.server):,} tensors, more than half of the "
            'memory: use fewer clusters, a smaller model, server.memory = "held" or a smaller algorithm.tau'
        )


def unequal_clusters(setup: Setup) -> str | None:
    """A sentence where the clusters' weights q_K differ. Clusters that are redrawn every round are equal on average."""
    options = setup.experiment.clusters
    if clusterings.find(options).every_round or options.weighting == "sample":
        return None
    return setup.clusters.inequality(setup.fleet)
