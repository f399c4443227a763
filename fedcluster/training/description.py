"""What a run says of itself before it starts."""

from fedcluster.algorithms import phase_tensor_names
from fedcluster.errors import BudgetExceeded
from fedcluster.training.setup import Setup


def describe(setup: Setup) -> str:
    """What is about to be trained, in a line."""
    experiment = setup.experiment
    name = model_name(setup)
    data = setup.dataset.name if setup.dataset else "the devices' data"
    frozen = sum(tensor.numel() for tensor in setup.flat_model.frozen.values())
    also = f" and {frozen:,} frozen ones" if frozen else ""
    what = f"{name} with {setup.flat_model.parameters:,} parameters{also} on {data}"
    if experiment.method == "centralized":
        return f"{what}: centralized on {setup.fleet.sizes[0]:,} pooled samples"
    sizes = f"{len(setup.fleet):,} devices in {setup.clusters.count:,} cluster{'s' * (setup.clusters.count > 1)}"
    return f"{what}: {sizes}, {setup.schedule.cohort_size():,} devices a round"


def model_name(setup: Setup) -> str:
    """The name of the model, also where the experiment leaves it to the data."""
    given, kind = setup.experiment.model.name, type(setup.flat_model.module).__name__
    if given is None:
        return kind.lower()  # one of ours
    return given if isinstance(given, str) else kind


def over_budget(setup: Setup, strict: bool) -> str | None:
    """A sentence where the algorithm needs more than FedCluster's budget of one download and one upload a device and
    round; with `strict` it is refused."""
    down, up = (len(messages) for messages in phase_tensor_names(setup.algorithm, setup.start))
    if (down, up) == (1, 1) or not setup.devices:
        return None
    name = setup.experiment.to_dict()["algorithm"]["name"]
    needs = f"{name} needs {down} downloads and {up} upload{'s' * (up != 1)} per device and round"
    if strict:
        raise BudgetExceeded(f"{needs}; the budget is one of each: choose another algorithm or drop --strict-budget")
    return f"{needs}, more than the budget of one of each; the ledger counts them"


def never_scored(setup: Setup) -> str | None:
    """A sentence where devices hold out samples, and the run ends before they are scored on them."""
    every, rounds = setup.experiment.eval.every, setup.experiment.rounds
    if setup.evaluate_devices is None or every <= rounds:
        return None
    return (
        f"devices are scored every {every} rounds (eval.every), and the run has {rounds}: lower eval.every, or score "
        "them with fedcluster evaluate --devices"
    )
