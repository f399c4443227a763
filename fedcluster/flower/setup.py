"""Preparation of a federation: the straight line from the roster to the first cycle, as in simulation."""

import json
from dataclasses import dataclass, replace

from fedcluster import algorithms
from fedcluster.data import sources
from fedcluster.errors import BadExperiment
from fedcluster.experiment import WITH_DEVICES
from fedcluster.flower.device import PLAN
from fedcluster.flower.executor import REMEMBERS, Federation, NodeDirectory, NoExecutor, Say
from fedcluster.flower.registry import ROOM, LiveSchedule, Registry
from fedcluster.models.schedules import Rates
from fedcluster.models.tasks import find_metrics
from fedcluster.training.evaluation import Evaluator
from fedcluster.training.setup import Setup, build_trainer, check_output


@dataclass(frozen=True)
class ServeOptions:
    """How long is waited for whom: `nodes` devices before the first round, `wait` seconds at most, then and whenever
    all are lost, and `deadline` seconds for a cohort's turn, which needs `min_updates` updates."""

    nodes: int = 1
    wait: float = 600.0
    deadline: float = 600.0
    min_updates: int = 1


def prepare(schedule: LiveSchedule, say: Say) -> Setup:
    """What stands before the first cycle, as in simulation, but for what only devices have, and for the devices."""
    registry = schedule.registry
    experiment = registry.experiment
    dataset = None if experiment.data.name == WITH_DEVICES else sources.open_dataset(experiment.data.name, say)
    shape, classes = tuple(registry.entries[0].shape), registry.classes
    if dataset is not None:
        if dataset.shape != shape:
            raise BadExperiment(
                f"data.name: {dataset.name} has samples {list(dataset.shape)}, but the devices have {list(shape)}"
            )
        classes = dataset.classes
    trainer, optimizer = build_trainer(experiment, shape, classes), algorithms.optimizer(experiment.server)
    algorithm, flat_model = trainer.algorithm, trainer.flat_model
    if dataset is not None:
        check_output(flat_model, dataset)
    start = algorithms.first_state(algorithm, optimizer, flat_model.w.clone(), flat_model.size, schedule)
    keeps = bool(algorithm.initial_device_state(flat_model.w, flat_model.size))
    return Setup(
        experiment=experiment,
        dataset=dataset,
        shape=shape,
        classes=classes,
        fleet=schedule.fleet,
        partition=None,
        clusters=schedule.clusters,
        schedule=schedule,
        rates=Rates(experiment, schedule.clusters.count),
        flat_model=flat_model,
        algorithm=algorithm,
        transforms=trainer.transforms,
        optimizer=optimizer,
        executor=NoExecutor(),
        clock=None,
        evaluate=Evaluator(flat_model, dataset, None, find_metrics(experiment.metrics)),
        evaluate_devices=None,
        start=start,
        initial_device_state=REMEMBERS if keeps else {},
        devices=ROOM,
    )


def connected(setup: Setup, directory: NodeDirectory, most: int, serve_options: ServeOptions) -> Setup:
    """Let devices train. `most` is how many bytes one may have reason to send."""
    plan = plan_for(setup, directory.registry)
    executor = Federation(
        directory, setup.algorithm, plan, most, bool(setup.initial_device_state), serve_options.deadline
    )
    return replace(setup, executor=executor, min_updates=serve_options.min_updates)


def check_updates(schedule: LiveSchedule, serve_options: ServeOptions) -> None:
    """Cycles that can never have enough updates would be tried in vain."""
    asked = schedule.largest_cohort()
    if serve_options.min_updates > asked:
        raise BadExperiment(
            f"--min-updates {serve_options.min_updates}, but no cycle asks for more than {asked}: lower it, or raise "
            "clusters.participation"
        )


def plan_for(setup: Setup, registry: Registry) -> str:
    """What a device has to know to train as the simulator would."""
    experiment, dataset = setup.experiment, setup.dataset
    keys = experiment.to_dict()
    scaled = dataset is not None and dataset.scale is not None and dataset.shift is not None
    values = (
        experiment.seed,
        list(registry.entries[0].shape),
        registry.classes if dataset is None else dataset.classes,
        keys["model"]["name"],
        setup.flat_model.frozen_digest(),
        keys["algorithm"],
        keys["local"],
        keys["transforms"],
        dataset.scale.reshape(-1).tolist() if scaled and dataset and dataset.scale is not None else None,
        dataset.shift.reshape(-1).tolist() if scaled and dataset and dataset.shift is not None else None,
    )
    return json.dumps(dict(zip(PLAN, values, strict=True)), sort_keys=True)
