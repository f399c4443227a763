"""The setup of a federation's server: as in simulation, with the registry for a fleet and devices for an executor."""

import json
from dataclasses import dataclass, replace

import numpy as np

from fedcluster.data import sources
from fedcluster.data.dataset import DataSpec
from fedcluster.data.held_out import check_share
from fedcluster.data.targets import PLURALS
from fedcluster.errors import BadExperiment
from fedcluster.experiment import WITH_DEVICES, Data
from fedcluster.flower.device import PLAN
from fedcluster.flower.evaluation import RemoteEvaluation, expected_sums
from fedcluster.flower.executor import REMOTE_STATE, FlowerExecutor, NodeDirectory, NoExecutor
from fedcluster.flower.registry import MAX_DEVICES, Registry, RegistrySchedule
from fedcluster.flower.secure_exchange import FlowerDevices
from fedcluster.models import tasks, zoo
from fedcluster.models.tasks import Task
from fedcluster.reporting import Say
from fedcluster.runs.ledger import size
from fedcluster.secure_aggregation.checks import is_secure
from fedcluster.secure_aggregation.integers import WIDTH
from fedcluster.training.model_check import check_output
from fedcluster.training.open_data import with_targets
from fedcluster.training.setup import Setup, assemble
from fedcluster.training.trainer import build_trainer

OVERHEAD = 2**16  # bytes of a reply besides its numbers
SHARES = 512  # bytes of a reply for each other device of a secure sum


@dataclass(frozen=True)
class ServeOptions:
    """The server waits for `nodes` devices before the first round, for `wait` seconds at most, then and whenever rounds
    fail. A cohort has `deadline` seconds, and a cycle needs `min_updates` updates."""

    nodes: int = 1
    wait: float = 600.0
    deadline: float = 600.0
    min_updates: int = 1


def prepare(schedule: RegistrySchedule, say: Say) -> Setup:
    """The setup without an executor. Samples and device state are with the devices."""
    registry = schedule.registry
    experiment = registry.experiment
    check_share(np.array([entry.samples for entry in registry.members(0)]), experiment.fleet.test_share)
    dataset = None
    if experiment.data.name != WITH_DEVICES:
        dataset = sources.open_dataset(server_data(registry), say, tasks.target_of(experiment))
    spec = registry.spec
    task = tasks.build(experiment, spec.target if dataset is None else dataset.target)
    if dataset is not None:
        dataset = with_targets(dataset, task)
        if dataset.shape != spec.shape:
            raise BadExperiment(
                f"data.name: {dataset.name} has samples {list(dataset.shape)}, but the devices have {list(spec.shape)}"
            )
    spec = learned(spec, task) if dataset is None else dataset.spec
    trainer = build_trainer(experiment, spec)
    if dataset is not None:
        check_output(trainer.flat_model, dataset, task)
    setup = assemble(experiment, trainer, schedule, NoExecutor(), spec, dataset)
    return replace(setup, initial_device_state=REMOTE_STATE if setup.initial_device_state else {}, devices=MAX_DEVICES)


def server_data(registry: Registry) -> Data:
    """The server's own data, standardised as the devices' are."""
    data = registry.experiment.data
    given = data.standardise if isinstance(data.standardise, dict) else {}
    keys = {key: value for key, value in data if value is not None}
    return Data(**keys | {"standardise": given | (registry.scales or {}) or False})


def learned(spec: DataSpec, task: Task) -> DataSpec:
    """What the data of the devices are for this task: classes may be taken as numbers."""
    if spec.target == task.target:
        return spec
    if (spec.target, task.target) == ("class", "number"):
        return spec._replace(target="number", outputs=1)
    raise BadExperiment(
        f"task = {task.name} needs targets that are {PLURALS[task.target]}, but those of the devices are "
        f"{PLURALS[spec.target]}"
    )


def with_executor(setup: Setup, directory: NodeDirectory, max_bytes: int, serve_options: ServeOptions) -> Setup:
    """Let devices train and, where they allow it, score the model. `max_bytes` bounds their replies."""
    plan, deadline = plan_for(setup, directory.registry.scales), serve_options.deadline
    keeps_state = bool(setup.initial_device_state)
    overlap = setup.schedule.options.overlap
    executor = FlowerExecutor(directory, setup.algorithm, plan, max_bytes, keeps_state, deadline, overlap)
    scores = RemoteEvaluation(directory, setup, plan, max_bytes, deadline)
    never_fails = setup.privacy is not None and setup.privacy.central  # how many updates came must not decide anything
    least = 0 if never_fails else serve_options.min_updates
    setup = replace(setup, executor=executor, evaluate_devices=scores, min_updates=least)
    if not is_secure(setup.experiment):
        return setup
    assert directory.keys is not None
    return replace(setup, secure=FlowerDevices(executor, directory.keys))


def largest_reply(setup: Setup) -> int:
    """Bytes of the largest reply that a device may send."""
    updates = [size(phase.upload_spec(setup.start)) for phase in setup.algorithm.phases]
    scores = sum(8 * tensor.numel() for tensor in expected_sums(setup).values())
    if is_secure(setup.experiment):
        updates = [bytes_ // 4 * WIDTH for bytes_ in updates] + [OVERHEAD + SHARES * setup.devices]
    return max(*updates, scores) + OVERHEAD


def check_min_updates(schedule: RegistrySchedule, serve_options: ServeOptions) -> None:
    """A cycle that can never get enough updates would be repeated for ever."""
    if schedule.sampling is not None and schedule.sampling.poisson:
        return  # it is the number of devices that have to be online
    largest = schedule.largest_cohort()
    if serve_options.min_updates > largest:
        raise BadExperiment(
            f"--min-updates {serve_options.min_updates} is more than the largest cohort has ({largest}): lower it, or "
            "raise clusters.participation"
        )


def plan_for(setup: Setup, scales: dict[str, tuple[float, float]] | None) -> str:
    """What a device has to know to train as the simulator would, as JSON."""
    experiment, dataset, spec = setup.experiment, setup.dataset, setup.spec
    keys = experiment.to_dict()
    scale, shift = (None, None) if dataset is None else (dataset.scale, dataset.shift)
    values = (
        experiment.seed,
        spec._asdict(),
        keys.get("model", {}).get("name") or zoo.default_name(spec),
        setup.flat_model.frozen_digest(),
        {"name": setup.task.name} | keys.get("task", {}),
        keys.get("metrics"),
        experiment.fleet.test_share,
        keys["algorithm"],
        keys["local"],
        keys["transforms"],
        None if scale is None else scale.reshape(-1).tolist(),
        None if shift is None else shift.reshape(-1).tolist(),
        scales,
        None if setup.privacy is None else setup.privacy.on_device(),
    )
    return json.dumps(dict(zip(PLAN, values, strict=True)), sort_keys=True)
