"""Preparation: the straight line from the experiment to the first cycle."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from fedcluster import algorithms
from fedcluster.algorithms import overlap
from fedcluster.algorithms.aggregation import checks as aggregation
from fedcluster.algorithms.transforms import Transforms
from fedcluster.attacks import attacker as attackers
from fedcluster.attacks.attacker import Attacker
from fedcluster.data import sources
from fedcluster.data.dataset import Dataset, DataSpec
from fedcluster.data.partition import Ints, Partition, one_device
from fedcluster.data.partitions import registry as partitions
from fedcluster.data.targets import PLURALS
from fedcluster.errors import BadData, BadExperiment
from fedcluster.experiment import Aggregation, Experiment, Local
from fedcluster.fleet import clock as clocks
from fedcluster.fleet import fleet as fleets
from fedcluster.fleet.clustering import registry as clusterings
from fedcluster.fleet.clustering.clusters import Clusters
from fedcluster.fleet.clustering.clusters import build as cluster_fleet
from fedcluster.fleet.schedule import Cycle, Schedule, mean_steps
from fedcluster.inputs import check_size, located
from fedcluster.models import tasks, zoo
from fedcluster.models.flat_model import FlatModel, Objective, output_tensor
from fedcluster.models.kernels import unavailable_reason
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
from fedcluster.training.executors.attacked import Attacked
from fedcluster.training.executors.distributed import Distributed, broadcast_array, is_distributed
from fedcluster.training.executors.in_process import Executor, InProcess, Trainer
from fedcluster.training.executors.processes import Workers, sendable
from fedcluster.training.executors.secure import SecureDevices, SimulatedDevices
from fedcluster.training.executors.stacked import Stacked, faster, stackable
from fedcluster.training.survey import gradient_sketches

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
    """Experiment -> dataset -> fleet -> clusters -> schedule, and the model at its start W_0."""
    seed, options = experiment.seed, experiment.clusters
    dataset, task = open_data(experiment, say)
    fleet, partition = fleets.build(experiment.fleet, dataset, seed, experiment.accept.cap(claimed=False))
    dataset = partition.dataset or dataset
    if partition.repeats:
        say(f"{dataset.name}: a class is smaller than a device's share of it, so devices hold samples more than once")
    clusters = build_clusters(experiment, dataset, fleet, partition, say, track)
    if clusters.left_out():
        say(f"{clusters.left_out():,} of {len(fleet):,} devices are in no cluster, so they take no part")
    over_select = 1.0 if experiment.clock is None else experiment.clock.over_select
    schedule = Schedule(options, fleet, clusters, seed, over_select, mechanisms.sampling(experiment, seed))
    central = experiment.method == "centralized"
    local = pooled_budget(experiment, fleet, schedule, say) if central else experiment.local
    attacker = build_attacker(experiment, dataset, clusters, say)
    trainer = build_trainer(experiment, dataset.spec, device, local, precision)
    flat_model = trainer.flat_model
    check_output(flat_model, dataset, task)
    if slower := without_engine(flat_model):
        say(slower)
    sample, held_out = partition.pooled(SAMPLE, seed), partition.held_out
    if central:
        partition = pool(partition, dataset, seed)
        alone = options.model_copy(update={"overlap": 0})
        schedule = Schedule(alone, fleets.Fleet(partition.sizes), Clusters(np.zeros(1, np.int32), 1), seed)
    setup = assemble(
        experiment,
        trainer,
        schedule,
        InProcess(trainer, dataset, partition, attacker),
        dataset.spec,
        dataset,
        partition,
        sample,
    )
    if attacker is not None:
        setup = replace(setup, attacker=attacker)
        setup.evaluate.triggered = attacker.attack.triggered(dataset.x_test, dataset.y_test)
    if held_out is not None:
        by_device = DeviceEvaluator(setup.evaluate, held_out, clusters, experiment.eval, seed)
        setup = replace(setup, evaluate_devices=by_device)
    if central:
        return replace(setup, devices=0)  # the data are in one place: nothing travels
    if experiment.clock is None:
        return setup
    clocks.check(experiment.clock, schedule)
    down, up = (sum(map(size, messages)) for messages in algorithms.messages(setup.algorithm, setup.start))
    return replace(setup, clock=clocks.Clock(experiment.clock, fleet, local, seed, down, up))


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
    if by_cluster and clusterings.find(experiment.clusters).every_round:
        raise BadExperiment(
            f'clusters.method = "{experiment.clusters.method}" draws clusters anew in every round, and [pluralistic] '
            "needs clusters that keep their devices: use another method, or remove [pluralistic]"
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


def open_data(experiment: Experiment, say: Say) -> tuple[Dataset, Task]:
    """The data, with targets as the task takes them. Messages name what the data decide: the task, the partition and
    the model, where the experiment leaves them open or they need what the data do not have."""
    dataset = sources.open_dataset(experiment.data, say, tasks.target_of(experiment))
    task = tasks.build(experiment, dataset.target)
    dataset = with_targets(dataset, task)
    if dataset.target == "number" and bool((dataset.y_train == dataset.y_train[:1]).all()):
        raise BadData(f"{dataset.name}: the target is the same in all training rows, so there is nothing to learn")
    if experiment.task.name is None and task.name != "classification":
        say(f"{dataset.name}: the targets are {PLURALS[dataset.target]}, so the task is {task.name}")
    chosen = partitions.usable(experiment.fleet, dataset).partition
    if chosen != experiment.fleet.partition:
        devices = "the devices that the data name" if chosen == "natural" else "every device draws from all rows"
        say(
            f'fleet.partition = "{experiment.fleet.partition}" needs class labels, which {dataset.name} does not have: '
            f'"{chosen}" is used instead ({devices})'
        )
    if experiment.model.name is None:
        say(f"{dataset.name}: samples are {kind_of_samples(dataset)}, so the model is {zoo.default_name(dataset.spec)}")
    return dataset, task


def kind_of_samples(dataset: Dataset) -> str:
    """What the samples are, as the choice of a model sees it."""
    if dataset.vocabulary:
        return "token ids"
    return "pictures of {1}x{2}".format(*dataset.shape) if len(dataset.shape) == 3 else "rows of numbers"


def with_targets(dataset: Dataset, task: Task) -> Dataset:
    """The data with the kind of targets that the task takes; classes may be taken as numbers, for example."""
    return dataset.with_target(task.target, f"task = {task.name}")


def build_model(experiment: Experiment, dataset: Dataset, device: str = "cpu") -> FlatModel:
    """The model at its start W_0, for the task's loss. It is checked against the data."""
    task = tasks.build(experiment, dataset.target)
    flat_model = start_model(experiment, dataset.spec, device, task.objective)
    check_output(flat_model, dataset, task)
    return flat_model


def start_model(
    experiment: Experiment, spec: DataSpec, device: str, objective: Objective, precision: str = "float32"
) -> FlatModel:
    module = zoo.build(experiment.model.name, spec, experiment.seed)
    flat_model = FlatModel(module, device, objective, precision)
    if experiment.model.init is not None:
        path = located(experiment.model.init, "model.init")
        flat_model.load_frozen(read_tensors(path, "model.init"))
        flat_model.load(load_weights(path, flat_model, "model.init"))
    return flat_model


def build_trainer(
    experiment: Experiment,
    spec: DataSpec,
    device: str = "cpu",
    local: Local | None = None,
    precision: str = "float32",
    secret: int | None = None,
) -> Trainer:
    """What trains on a device: the same for the simulator, a worker process, a rank, and a federation's server and
    devices. `local` replaces the experiment's, for centralized training. `secret` is the seed of a device's own noise,
    the experiment's where none is given."""
    local = local or experiment.local
    central = experiment.method == "centralized"
    task = tasks.build(experiment, spec.target)
    algorithm = (
        algorithms.Centralized(local) if central else algorithms.build(experiment.algorithm, local, experiment.seed)
    )
    if algorithm.targets and task.target not in algorithm.targets:
        raise BadExperiment(
            f"algorithm.name: {algorithm.name} is defined for targets that are "
            f"{' or '.join(PLURALS[kind] for kind in algorithm.targets)}, and those of task = {task.name} are "
            f"{PLURALS[task.target]}: use another algorithm"
        )
    flat_model = start_model(experiment, spec, device, algorithm.objective(task.objective), precision)
    clip = mechanisms.clip_on_device(experiment, experiment.seed if secret is None else secret)
    transforms = Transforms(experiment.transforms, experiment.seed, clip)
    return Trainer(task, algorithm, flat_model, local, experiment.seed, transforms)


def without_engine(flat_model: FlatModel) -> str | None:
    """A sentence where the compiled engine could train this model, and is not available."""
    if not flat_model.could_be_compiled or flat_model.network is not None:
        return None
    return f"training with torch, which is slower for this model: {unavailable_reason()}"


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
    return cluster_fleet(options, fleet, seed, sketches)


def build_attacker(experiment: Experiment, dataset: Dataset, clusters: Clusters, say: Say) -> Attacker | None:
    """The attacker, where the experiment has one, and a sentence on who is malicious."""
    if experiment.attack is None:
        return None
    found = attackers.build(experiment.attack, dataset.spec, clusters, experiment.clusters, experiment.seed)
    hit = [len(found.devices.intersection(members.tolist())) for members in clusters.members]
    say(f"{len(found.devices):,} devices in {np.count_nonzero(hit):,} of {len(hit):,} clusters are malicious")
    return found


def unequal_clusters(setup: Setup) -> str | None:
    """A sentence where the clusters' weights q_K differ. Clusters that are redrawn every round are equal on average."""
    options = setup.experiment.clusters
    if clusterings.find(options).every_round or options.weighting == "sample":
        return None
    return setup.clusters.inequality(setup.fleet)


def executor_of(
    experiment: Experiment, dataset: Dataset, precision: str = "float32", attacker: Attacker | None = None
) -> InProcess:
    """What a worker process needs, built from the experiment: every process builds the same one. The data set is
    the one that is trained on, after the partition has changed its features, if it does."""
    _, partition = fleets.build(experiment.fleet, dataset, experiment.seed)
    trainer = build_trainer(experiment, dataset.spec, precision=precision)
    return InProcess(trainer, dataset, partition, attacker)


def choose_executor(setup: Setup, workers: int, cohorts: str, say: Say = silent) -> Setup:
    """The executor for this many processes, with the attacker between it and the server, and with updates summed
    securely, if the experiment says so."""
    attacker, secure = setup.attacker, secure_checks.is_secure(setup.experiment)
    if secure and is_distributed():
        raise BadExperiment("privacy.secure_aggregation is not possible under torchrun: run it without")
    setup = share_out(setup, workers, cohorts, say)
    if attacker is not None and attacker.forges:
        upload_specs = [phase.upload_spec(setup.start) for phase in setup.algorithm.phases]
        setup = replace(setup, executor=Attacked(setup.executor, attacker, upload_specs))
    return replace(setup, secure=SimulatedDevices(setup.executor)) if secure else setup


def share_out(setup: Setup, workers: int, cohorts: str, say: Say) -> Setup:
    """Let a cohort be trained at once, or by several processes, torchrun's or our own, where there is something to
    share out."""
    experiment, here = setup.experiment, setup.executor
    assert isinstance(here, InProcess)
    setup.evaluate.threads = workers
    if is_distributed():
        if not hasattr(experiment.aggregation.find(), "reduce"):
            raise BadExperiment(
                f"aggregation.name: {experiment.to_dict()['aggregation']['name']} has no method reduce, by which ranks "
                "merge their parts of a cohort: run it without torchrun, or add reduce"
            )
        return replace(setup, executor=Distributed(here))
    largest = max(setup.schedule.round(0), key=lambda cycle: len(cycle.cohort))
    count = min(workers, len(largest.cohort)) if here.flat_model.device.type == "cpu" else 1
    if should_stack(here, cohorts, largest, setup.algorithm.phases[0].broadcast(setup.start), count, say):
        return replace(setup, executor=Stacked(here))
    if count < 2:
        return setup
    if not sendable(experiment):
        say("training in one process: a function of the experiment cannot be imported by another")
        return setup
    cycles = experiment.rounds * setup.clusters.count
    return replace(setup, executor=Workers(count, cycles, here, experiment, setup.start, say))


def should_stack(here: InProcess, cohorts: str, largest: Cycle, sent: Tensors, count: int, say: Say) -> bool:
    """Whether a cohort is to be trained in stacks; what cannot be, is not."""
    if cohorts == "sequential" or len(largest.cohort) < 2:
        return False
    why = stackable(here)
    if why is not None:
        say(f"training one device after the other: this model cannot be stacked ({why})")
        return False
    if cohorts == "stacked":
        return True
    won = faster(here, largest, sent, count)
    say(f"cohorts are trained {'in stacks' if won else 'one device after the other'}, which is faster here")
    return won


def read_tensors(path: Path, key: str) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file that `key` asks for."""
    try:
        return load_file(path)
    except FileNotFoundError:
        raise BadData(f"{key}: there is no file {path}") from None
    except (OSError, SafetensorError) as error:
        raise BadData(f"{key}: {path} is not a safetensors file ({error})") from None


def load_weights(path: Path, flat_model: FlatModel, key: str) -> torch.Tensor:
    """The vector w of a safetensors file whose tensors are named as in the model's state dict; `key` asks for it."""
    tensors = read_tensors(path, key)
    try:
        vector = flat_model.from_state_dict(tensors)
    except ValueError as error:
        wanted = format_shapes(flat_model.state_shapes())
        raise BadData(f"{key}: {path} must have the tensors {wanted}, but {error} does not fit") from None
    if not torch.isfinite(vector).all():
        raise BadData(f"{key}: {path} has values that are not finite")
    return vector


def format_shapes(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())


def check_output(flat_model: FlatModel, dataset: Dataset, task: Task) -> None:
    """A model or a task of one's own may not fit the data: find out now, and say how."""
    flat_model.module.eval()
    x, y = dataset.inputs(dataset.x_train[:2]).to(flat_model.device), dataset.y_train[:2].to(flat_model.device)
    given, _ = task.batch(x, y)
    try:
        with torch.no_grad():
            returned = flat_model.module(given)
    except Exception as error:  # a model may do anything
        raise BadExperiment(
            f"model.name: the model does not take samples {list(dataset.shape)} ({first_line(error)})"
        ) from None
    expected, actual = task.output_shape(dataset.spec), list(output_tensor(returned).shape)
    if expected is not None and not fits(actual, [len(x), *expected], dataset):
        raise BadExperiment(
            f"model.name: the model gives outputs {actual[1:]} for a sample, but the data have {dataset.outputs} "
            f"{OUTPUTS[dataset.target]}, which take {list(expected)}"
        )
    try:
        with torch.no_grad():
            loss = task.mean_loss(flat_model.module, x, y)
    except Exception as error:  # as may a loss
        raise BadExperiment(f"task: the loss fails on outputs {actual} ({first_line(error)})") from None
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise BadExperiment(f"task: the loss must be one number, the mean over a batch, but is {describe_value(loss)}")


def fits(actual: list[int], expected: list[int], dataset: Dataset) -> bool:
    """Whether outputs have the shape that the targets need. One number may come without an axis of its own, and a model
    may know more tokens than the data have."""
    if dataset.target == "number" and dataset.y_train.ndim == 1 and actual == expected[:1]:
        return True
    if dataset.target == "token" and actual[:-1] == expected[:-1]:
        return actual[-1] >= expected[-1]
    return actual == expected


OUTPUTS = {"class": "classes", "number": "numbers a sample", "multilabel": "labels", "token": "tokens"}


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def describe_value(value: object) -> str:
    return f"of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def pooled_budget(experiment: Experiment, fleet: fleets.Fleet, schedule: Schedule, say: Say) -> Local:
    """Centralized SGD spends in a round the samples that the fleet's cohorts spend: the paper's 1000 x 60. A sentence
    says so where whole steps cannot."""
    options, local = experiment.centralized, experiment.local
    spent = samples_a_round(schedule, fleet, local)
    one_step = int(fleet.sizes.sum()) if options.batch == "full" else options.batch
    steps = options.steps or max(1, round(spent / one_step))
    if options.steps is None and steps * one_step != spent:
        average = "" if isinstance(local.steps, int) and local.batch != "full" else " on average"
        say(
            f"centralized training takes {steps:,} step{'s' * (steps > 1)} of {one_step:,} samples a round, "
            f"{steps * one_step:,} in all; the fleet's cohorts use {spent:,.0f}{average}"
        )
    return local.model_copy(update={"steps": steps, "epochs": None, "batch": options.batch})


def samples_a_round(schedule: Schedule, fleet: fleets.Fleet, local: Local) -> float:
    """Samples that the cohorts of a round use in their local steps, on average over the draws of cohorts and steps."""
    if local.epochs is None and local.batch != "full":
        return schedule.cohort_size() * mean_steps(local, fleet.sizes) * local.batch
    members = schedule.clusters.members_in(0, schedule.seed)
    sizes = [cycle.wanted * fleet.sizes[members[cycle.cluster]].mean() for cycle in schedule.round(0)]
    return float(sum(sizes)) * (local.epochs or mean_steps(local, fleet.sizes))


def pool(partition: Partition, dataset: Dataset, seed: int) -> Partition:
    """One device that holds all data: centralized training is the same code with M = n = 1."""
    total = int(partition.sizes.sum())
    check_size("the fleet's pooled data, as a list of rows,", 8 * total)
    return one_device(partition.pooled(total, seed), dataset)
