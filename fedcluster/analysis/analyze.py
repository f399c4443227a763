"""The theorem's constants, measured on this fleet: at the start and at every model along a trajectory.

The suprema over w in the theorem are approximated by the largest value seen, and called that. Suprema over devices are
taken over all of them, or over the sample of a large fleet, and are given as ranges.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from fedcluster.analysis import heterogeneity
from fedcluster.analysis.bound import Bound, Constants
from fedcluster.analysis.measures import around, batch_noise, device_sample, largest_square, mean_loss, measures
from fedcluster.analysis.smoothness import smoothness
from fedcluster.errors import BadData
from fedcluster.experiment import Experiment
from fedcluster.fleet.clustering.clusters import Clusters
from fedcluster.fleet.fleet import Ints
from fedcluster.fleet.schedule import cohort_sizes
from fedcluster.models.flat_model import FlatModel
from fedcluster.runs import checkpoint
from fedcluster.runs.metrics import read_lines
from fedcluster.runs.progress import Display
from fedcluster.training.setup import Setup, load_weights, prepare, unequal_clusters
from fedcluster.training.survey import survey
from fedcluster.training.threads import repeatable


@dataclass(frozen=True)
class Point:
    """What was measured at one model. Errors are standard errors, 0 where a value is exact; L and G2 are the upper ends
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
    sampling: float  # what cohorts of part of a cluster add to H_cluster
    s2_mean: float  # of s_k^2, by p_k
    s2_most: float
    V: float  # sum_K q_K^-1 sum_k p_k^2 s_k^2, for the clusters
    V_error: float
    V_one: float  # and for one cluster of everybody
    V_one_error: float
    G2: float
    G2_low: float
    L: float
    L_low: float


@dataclass(frozen=True)
class Analysis:
    """All points, the largest value seen of each constant, and what the theorem makes of them."""

    points: list[Point]
    most: Point
    lowest: float  # the lowest loss known
    epsilon: float
    clustered: Bound
    one: Bound
    remarks: list[str]
    sampled: bool = False  # whether only a sample of the devices was looked at


def analyze(
    experiment: Experiment,
    at: list[Path] | None = None,
    epsilon: float | None = None,
    display: Display | None = None,
    workers: int = 1,
) -> Analysis:
    """Measure at W_0 and at the models of `at`. `epsilon`: what ||grad f||^2 is to come down to, a tenth of the
    start's if left out. The number of `workers`, which are threads, changes nothing but the time."""
    display = display or Display()
    with repeatable():
        setup = prepare(experiment.override(method="fedcluster"), display)
        heterogeneity.check_whole(setup.clusters)
        # learners of their own, for cross-entropy: algorithms may add to the loss
        flat_models = [FlatModel(setup.flat_model.module) for _ in range(workers)]
        models, lowest = [("start", setup.start.model)], math.inf
        for path in at or []:
            models += models_at(path, setup, flat_models[0])
            lowest = min([lowest, *(line.get("train_loss", lowest) for line in read_lines(path / "metrics.jsonl"))])
        devices = device_sample(setup.fleet, experiment.seed, setup.clusters)
        points = [measure(name, w, setup, devices, flat_models, display) for name, w in models]
    lowest = min([lowest, *(point.loss for point in points)])
    names = [name for name in Point.__dataclass_fields__ if name not in ("name", "loss")]
    most = Point("largest seen", points[0].loss, **{key: max(getattr(p, key) for p in points) for key in names})
    epsilon = epsilon or max(points[0].gradient / 10, 1e-12)
    return Analysis(
        points=points,
        most=most,
        lowest=lowest,
        epsilon=epsilon,
        clustered=bound_of(points, experiment, setup.clusters.count),
        one=bound_of(points, experiment, 1),
        remarks=remarks(experiment, setup, devices, most),
        sampled=len(devices) < len(setup.fleet),
    )


def bound_of(points: list[Point], experiment: Experiment, M: int) -> Bound:
    """The theorem with the largest values of all points, each at the upper end of its range, and at the lower one."""

    def constants(end: str) -> Constants:
        H = max(getattr(around(p.H_cluster, p.error), end) for p in points) if M > 1 else 0.0
        noise = [(p.V, p.V_error) if M > 1 else (p.V_one, p.V_one_error) for p in points]
        V = max(getattr(around(*one), end) for one in noise)
        L, G2 = (max(getattr(p, name + ("_low" if end == "low" else "")) for p in points) for name in ("L", "G2"))
        # cross-entropy is never below 0: with inf f = 0 the bound does not understate the way to go
        return Constants(gap=points[0].loss, L=L, H=H, V=V, G2=G2)

    return Bound(M, experiment.local.mean_steps, experiment.rounds, constants("high"), constants("low"))


def measure(name: str, w: Tensor, setup: Setup, devices: Ints, flat_models: list[FlatModel], display: Display) -> Point:
    """One pass over the devices at w, then L."""
    experiment, fleet, clusters = setup.experiment, setup.fleet, setup.clusters
    assert setup.dataset is not None, "only a federation may be without"
    assert setup.partition is not None, "only a federation may be without"
    parts = setup.dataset, setup.partition, devices, experiment.local, experiment.seed, display
    found = survey(flat_models, w, fleet, *parts, clusters, f"gradients at {name}")
    sizes = np.bincount(clusters.assignment, minlength=clusters.count)
    seen = measures(found, fleet, clusters, cohort_sizes(experiment.clusters.participation, sizes), experiment.seed)
    one = Clusters(np.zeros(len(fleet), np.int32), 1)
    V_one, V_one_error = batch_noise(found, fleet, one)
    G2, L = largest_square(found), smoothness(flat_models, w, *parts)
    weights = fleet.weights[devices]
    return Point(
        name=name,
        loss=mean_loss(found, fleet),
        H_within=seen.H_device - seen.H_cluster,
        s2_mean=float(weights @ found.variances / weights.sum()),
        s2_most=float(found.variances.max()),
        V_one=V_one,
        V_one_error=V_one_error,
        G2=G2.high,
        G2_low=G2.low,
        L=L.high,
        L_low=L.low,
        **asdict(seen),
    )


def models_at(path: Path, setup: Setup, flat_model: FlatModel) -> list[tuple[str, Tensor]]:
    """The models of a run's folder (its checkpoints, then its last), of a checkpoint, or of a safetensors file."""
    if path.is_dir():
        stored = sorted(checkpoint.names(path / "checkpoint"))
        found = [checkpointed(file, setup) for file in stored]
        rounds = [line["round"] for line in read_lines(path / "metrics.jsonl")]
        if (path / "model.safetensors").exists():
            last = f"round {rounds[-1] if rounds else '?'}"
            final = load_weights(path / "model.safetensors", flat_model, "--at")
            found = [one for one in found if one[0] != last] + [(last, final)]
        if not found:
            raise BadData(f"--at: {path} holds neither a model.safetensors nor a checkpoint: give a run's folder")
        return [(f"{path.name}, {name}", model) for name, model in found]
    beside = path.with_suffix(".json")
    if path.suffix in (".json", ".safetensors") and beside.exists() and path.parent.name == "checkpoint":
        name, model = checkpointed(beside, setup)
        return [(f"{path.parent.parent.name or path.parent}, {name}", model)]
    return [(path.stem, load_weights(path, flat_model, "--at"))]


def checkpointed(path: Path, setup: Setup) -> tuple[str, Tensor]:
    try:
        state = checkpoint.restore(
            path, setup.start, setup.initial_device_state, setup.devices, setup.clusters.count
        ).state
    except ValueError as error:
        raise BadData(f"--at: the checkpoint {path} is {error}: give another") from None
    return f"round {state.round}" + (f", cycle {state.cycle}" if state.cycle else ""), state.model


def remarks(experiment: Experiment, setup: Setup, devices: Ints, most: Point) -> list[str]:
    """What the theorem assumes and this experiment does not do."""
    said, options = [], experiment.clusters
    local, algorithm = experiment.local, experiment.algorithm.name
    plain = algorithm == "fedavg" and local.optimizer == "sgd"
    server = experiment.server
    averages = (server.optimizer, server.lr) == ("none", 1.0)
    if not plain or not averages:
        name = algorithm if isinstance(algorithm, str) else "your own algorithm"
        said.append(
            f"The theorem is about plain SGD on the devices; this experiment uses {name} with {local.optimizer}"
            + ("." if averages else f" and server.optimizer = {server.optimizer}, server.lr = {server.lr:g}.")
        )
    if options.order != "reshuffle" and setup.clusters.count > 1:
        said.append("The theorem reshuffles the clusters in every round; this experiment keeps their order.")
    if inequality := unequal_clusters(setup):
        said.append(inequality)
    if options.participation < 1:
        said.append(
            f"The theorem lets all devices of a cluster take part. Here {setup.schedule.cohort_size():,} of "
            f"{len(setup.fleet):,} do in a round, and a cohort's gradient is further from the fleet's than its "
            f"cluster's is: by {most.sampling:.3g} on top of H_cluster = {most.H_cluster:.3g}."
        )
    if len(devices) < len(setup.fleet):
        said.append(sample_remark(len(devices), len(setup.fleet)))
    elif most.error:
        said.append("H_cluster comes from sketches of the gradients; its standard error is in the table.")
    return said


def sample_remark(surveyed: int, devices: int) -> str:
    """What it means that only some devices were looked at."""
    beyond = 1 - 0.05 ** (1 / surveyed)
    return (
        f"{surveyed:,} of {devices:,} devices were surveyed, a sample stratified by cluster, major class and size; "
        "standard errors include what that costs. L and G² are the largest of the sample: with 95 % confidence, no "
        f"more than {beyond:.2%} of all devices have a larger one."
    )
