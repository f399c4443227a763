"""The theorem's constants, measured on this fleet at the start and at models along a trajectory.

The theorem's suprema over w are approximated by the largest value seen, and named so. Suprema over devices are over all
devices, or over the sample of a large fleet, and are given as ranges.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from fedcluster.analysis import heterogeneity
from fedcluster.analysis.bound import Bound, Constants
from fedcluster.analysis.measures import (
    batch_variance,
    device_sample,
    error_range,
    largest_square,
    mean_loss,
    measures,
)
from fedcluster.analysis.smoothness import smoothness
from fedcluster.errors import BadData
from fedcluster.experiment import Experiment
from fedcluster.fleet.clustering import registry as clusterings
from fedcluster.fleet.clustering.clusters import Clusters
from fedcluster.fleet.fleet import Ints
from fedcluster.fleet.schedule import mean_steps
from fedcluster.models.flat_model import FlatModel
from fedcluster.reporting import Track
from fedcluster.runs import checkpoint
from fedcluster.runs.metrics import read_lines
from fedcluster.runs.progress import Display
from fedcluster.training.setup import Setup, prepare, unequal_clusters
from fedcluster.training.survey import survey
from fedcluster.training.threads import repeatable
from fedcluster.training.weights import load_weights


@dataclass(frozen=True)
class Point:
    """The measurements at one model. Errors are standard errors, 0 where a value is exact. L and G2 are the upper ends
    of their ranges."""

    name: str
    loss: float  # f(w)
    gradient: float  # ||grad f(w)||^2
    H_device: float
    H_within: float
    H_cluster: float
    error: float
    sketched: float  # H_cluster from the sketches alone, and its standard error
    sketched_error: float
    sampling: float  # what sampled cohorts add to H_cluster
    s2_mean: float  # sum_k p_k s_k^2
    s2_max: float
    V: float  # sum_K q_K^-1 sum_k p_k^2 s_k^2
    V_error: float
    V_one: float  # V of one cluster of all devices
    V_one_error: float
    G2: float
    G2_low: float
    L: float
    L_low: float


@dataclass(frozen=True)
class Analysis:
    """All points, the largest value seen of each constant, and the theorem's bounds."""

    points: list[Point]
    largest: Point
    lowest_loss: float  # the lowest that is known
    epsilon: float
    clustered: Bound
    one: Bound
    remarks: list[str]
    sampled: bool = False  # whether only a sample of the devices was surveyed


def analyze(
    experiment: Experiment,
    at: list[Path] | None = None,
    epsilon: float | None = None,
    display: Display | None = None,
    workers: int = 1,
) -> Analysis:
    """Measure at W_0 and at the models of `at`.

    `epsilon` is the target for ||grad f||^2, by default a tenth of its value at W_0. The number of `workers` (threads)
    does not change the result.
    """
    display = display or Display()
    with repeatable():
        setup = prepare(experiment.override(method="fedcluster"), display.say, track=display.track)
        heterogeneity.check_whole(setup.clusters)
        # for the task's loss alone: the algorithm's own objective may have more terms
        flat_models = [FlatModel(setup.flat_model.module, objective=setup.task.objective) for _ in range(workers)]
        models, losses = [("start", setup.start.model)], list[float]()
        for path in at or []:
            models += models_at(path, setup, flat_models[0])
            losses += [line["train_loss"] for line in read_lines(path / "metrics.jsonl") if "train_loss" in line]
        devices = device_sample(setup.fleet, experiment.seed, setup.clusters)
        points = [measure(name, w, setup, devices, flat_models, display.track) for name, w in models]
    names = [name for name in Point.__dataclass_fields__ if name not in ("name", "loss")]
    largest = Point("largest seen", points[0].loss, **{key: max(getattr(p, key) for p in points) for key in names})
    epsilon = epsilon or max(points[0].gradient / 10, 1e-12)
    return Analysis(
        points=points,
        largest=largest,
        lowest_loss=min([*losses, *(point.loss for point in points)]),
        epsilon=epsilon,
        clustered=bound_of(points, setup, setup.clusters.count),
        one=bound_of(points, setup, 1),
        remarks=remarks(experiment, setup, devices, largest),
        sampled=len(devices) < len(setup.fleet),
    )


def bound_of(points: list[Point], setup: Setup, M: int) -> Bound:
    """The theorem with the largest values over all points, at the upper and at the lower ends of their ranges."""

    def constants(end: str) -> Constants:
        H = max(getattr(error_range(p.H_cluster, p.error), end) for p in points) if M > 1 else 0.0
        variances = [(p.V, p.V_error) if M > 1 else (p.V_one, p.V_one_error) for p in points]
        V = max(getattr(error_range(*estimate), end) for estimate in variances)
        L, G2 = (max(getattr(p, name + ("_low" if end == "low" else "")) for p in points) for name in ("L", "G2"))
        # inf f = 0: no loss is below. The theorem is also true with a gap that is too large, provided that its bound
        # and its conditions have the same C.
        return Constants(gap=points[0].loss, L=L, H=H, V=V, G2=G2)

    steps = mean_steps(setup.experiment.local, setup.fleet.sizes)
    return Bound(M, steps, setup.experiment.rounds, constants("high"), constants("low"))


def measure(name: str, w: Tensor, setup: Setup, devices: Ints, flat_models: list[FlatModel], track: Track) -> Point:
    """Survey the devices at w, then estimate L there."""
    experiment, fleet, clusters = setup.experiment, setup.fleet, setup.clusters
    assert setup.dataset is not None, "only a federation may be without"
    assert setup.partition is not None, "only a federation may be without"
    parts = setup.dataset, setup.partition, devices, experiment.local, experiment.seed, track
    surveyed = survey(flat_models, w, fleet, *parts, clusters, f"gradients at {name}")
    cohorts = heterogeneity.mean_cohort_sizes(setup.schedule)
    measured = measures(surveyed, fleet, clusters, cohorts, experiment.seed)
    V_one, V_one_error = batch_variance(surveyed, fleet, Clusters(np.zeros(len(fleet), np.int32), 1))
    G2, L = largest_square(surveyed), smoothness(flat_models, w, *parts)
    weights = fleet.weights[devices]
    return Point(
        name=name,
        loss=mean_loss(surveyed, fleet),
        H_within=measured.H_device - measured.H_cluster,
        s2_mean=float(weights @ surveyed.variances / weights.sum()),
        s2_max=float(surveyed.variances.max()),
        V_one=V_one,
        V_one_error=V_one_error,
        G2=G2.high,
        G2_low=G2.low,
        L=L.high,
        L_low=L.low,
        **asdict(measured),
    )


def models_at(path: Path, setup: Setup, flat_model: FlatModel) -> list[tuple[str, Tensor]]:
    """Names and models of a run's folder (checkpoints, then the final model), a checkpoint or a safetensors file."""
    if path.is_dir():
        saved_models = [restore(file, setup) for file in sorted(checkpoint.names(path / "checkpoint"))]
        rounds = [line["round"] for line in read_lines(path / "metrics.jsonl")]
        if (path / "model.safetensors").exists():
            last = f"round {rounds[-1] if rounds else '?'}"
            final = load_weights(path / "model.safetensors", flat_model, "--at")
            saved_models = [(name, model) for name, model in saved_models if name != last] + [(last, final)]
        if not saved_models:
            raise BadData(f"--at: {path} holds neither a model.safetensors nor a checkpoint: give a run's folder")
        return [(f"{path.name}, {name}", model) for name, model in saved_models]
    beside = path.with_suffix(".json")
    if path.suffix in (".json", ".safetensors") and beside.exists() and path.parent.name == "checkpoint":
        name, model = restore(beside, setup)
        return [(f"{path.parent.parent.name or path.parent}, {name}", model)]
    return [(path.stem, load_weights(path, flat_model, "--at"))]


def restore(path: Path, setup: Setup) -> tuple[str, Tensor]:
    """The model of a checkpoint, named by its round and cycle."""
    try:
        state = checkpoint.restore(
            path, setup.start, setup.initial_device_state, setup.devices, setup.clusters.count
        ).state
    except ValueError as error:
        raise BadData(f"--at: the checkpoint {path} is {error}: give another one") from None
    return f"round {state.round}" + (f", cycle {state.cycle}" if state.cycle else ""), state.model


def remarks(experiment: Experiment, setup: Setup, devices: Ints, largest: Point) -> list[str]:
    """Assumptions of the theorem that this experiment does not meet, and what was not measured exactly."""
    remarks, options = [], experiment.clusters
    local, algorithm = experiment.local, experiment.algorithm.name
    server = experiment.server
    plain_sgd = algorithm == "fedavg" and local.optimizer == "sgd"
    plain_server = (server.optimizer, server.lr) == ("none", 1.0)
    if not plain_sgd or not plain_server:
        name = algorithm if isinstance(algorithm, str) else "your own algorithm"
        remarks.append(
            f"The theorem is about plain SGD on the devices; this experiment uses {name} with {local.optimizer}"
            + ("." if plain_server else f" and server.optimizer = {server.optimizer}, server.lr = {server.lr:g}.")
        )
    if local.decay or local.clip_norm is not None:
        remarks.append("The theorem is about plain gradients; this experiment has weight decay or clips gradients.")
    if local.epochs is not None:
        remarks.append(
            "The theorem draws every batch independently; this experiment shuffles, which has less variance, and E is "
            "the mean number of steps of a device."
        )
    if options.order != "reshuffle" and setup.clusters.count > 1:
        remarks.append(
            f'The theorem reshuffles the clusters every round; this experiment has clusters.order = "{options.order}".'
        )
    if clusterings.find(options).every_round or setup.clusters.second is not None:
        remarks.append("The theorem's clusters are fixed; here they change, and those of the first round are measured.")
    if inequality := unequal_clusters(setup):
        remarks.append(inequality)
    if options.participation < 1:
        remarks.append(
            f"In the theorem all devices of a cluster take part. Here {setup.schedule.cohort_size():,} of "
            f"{len(setup.fleet):,} take part in a round, and a cohort's gradient is further from the fleet's than its "
            f"cluster's gradient: this adds {largest.sampling:.3g} to H_cluster = {largest.H_cluster:.3g}."
        )
    if len(devices) < len(setup.fleet):
        remarks.append(sample_remark(len(devices), len(setup.fleet)))
    elif largest.error:
        remarks.append("H_cluster is estimated from sketches of the gradients; its standard error is in the table.")
    return remarks


def sample_remark(surveyed: int, devices: int) -> str:
    """What a survey of a sample can say about the fleet."""
    larger = 1 - 0.05 ** (1 / surveyed)
    return (
        f"{surveyed:,} of {devices:,} devices were surveyed, a sample stratified by cluster, major class and size; "
        "standard errors include the sampling error. L and G² are the largest of the sample: with 95 % confidence, at "
        f"most {larger:.2%} of all devices have a larger one."
    )
