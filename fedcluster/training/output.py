"""A run and its folder: what the run depends on, where it begins or resumes, and what it leaves when it ends."""

import json
import platform
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

import fedcluster
from fedcluster.algorithms import pluralistic
from fedcluster.errors import BadRun
from fedcluster.models.schedules import depends_on_rounds
from fedcluster.reporting import Say
from fedcluster.runs import fingerprints as code
from fedcluster.runs.devices import DEVICES, TABLE, write_table
from fedcluster.runs.directory import FLEET, MODEL, Folder, cluster_model
from fedcluster.runs.ledger import Ledger
from fedcluster.runs.metrics import CYCLES, METRICS, Kept, Line, Record, read_lines
from fedcluster.runs.plots import curves, device_plot
from fedcluster.state import State
from fedcluster.training.description import describe
from fedcluster.training.executors.attacked import honest
from fedcluster.training.executors.stacked import Stacked
from fedcluster.training.fleet_summary import summarize
from fedcluster.training.setup import Setup


class Begun(NamedTuple):
    """Where a run begins or resumes: the state, the record so far, and the files of lines that it keeps."""

    state: State
    record: Record
    kept: dict[str, Kept]


def begin(setup: Setup, folder: Folder | None, say: Say) -> Begun:
    """From the start, or from where the folder's run stopped."""
    rounds, cycles, timed = setup.experiment.rounds, setup.clusters.count, setup.clock is not None
    if folder is None:
        return Begun(setup.start, Record(Ledger(setup.devices), timed=timed), {})
    before = folder.planned_rounds
    budget = setup.privacy.section.epsilon if setup.privacy else None
    if budget is not None and before not in (None, rounds):
        raise BadRun(
            f"{folder.path}: the noise was chosen to spend epsilon = {budget:g} in {before} rounds, so that more "
            "rounds would spend more: begin another run with another --out"
        )
    known = facts(setup, folder.facts(check=False).get("start"))
    folder.begin(known, say)
    if folder.ended:  # and shall train longer
        folder.check_finished(say)
    files = [METRICS, CYCLES, *([DEVICES] if setup.evaluate_devices else [])]
    resumed = folder.restore(setup.start, setup.initial_device_state, setup.devices, cycles, files, say)
    folder.reopen(resumed.state.round)
    folder.note(known)
    folder.write(FLEET, json.dumps(summarize(setup)) + "\n")
    state, kept = resumed.state, resumed.kept
    if folder.begun:
        say(f"resuming {folder.path} after {state.round} of {rounds} rounds")
    if before not in (None, rounds) and (state.round or state.cycle):
        for key in depends_on_rounds(setup.experiment):
            say(
                f"{key} depends on the number of rounds: rounds up to {state.round} followed that of {before} rounds, "
                f"the others follow that of {rounds}, so the result is not that of {rounds} rounds at once"
            )
    lines = kept[METRICS].lines, kept[CYCLES].lines
    record = Record(resumed.ledger, resumed.seconds, *lines, timed, resumed.movement)
    return Begun(state, record, kept)


def facts(setup: Setup, start: Line | None = None) -> dict[str, Any]:
    """What the run depends on; `start` are the scores of W_0, where they are known."""
    return {
        **versions(),
        "python": platform.python_version(),
        "machine": platform.platform(terse=True),
        "data": setup.spec._asdict(),
        "preparation": json.loads(setup.dataset.preparation) if setup.dataset else {},
        "parameters": setup.flat_model.parameters,
        "devices": len(setup.fleet),
        "clusters": setup.clusters.count,
        "task": setup.task.name,
        "arithmetic": setup.flat_model.arithmetic,
        "precision": setup.flat_model.precision,
        "cohorts": "stacked" if isinstance(honest(setup.executor), Stacked) else "sequential",
        "fingerprints": fingerprints(setup),
        "start": setup.evaluate(setup.start.model) if start is None else start,
    }


def versions() -> dict[str, str]:
    return {"fedcluster": fedcluster.__version__, "torch": torch.__version__, "numpy": np.__version__}


def fingerprints(setup: Setup) -> dict[str, str]:
    """Digests of what names stand for, which may change while the names do not."""
    digests = {
        "data": setup.dataset.digest() if setup.dataset else "with the devices",
        "clusters": setup.clusters.digest(),
        "model": sha256(setup.start.model.cpu().numpy().tobytes()).hexdigest(),
    }
    if frozen := setup.flat_model.frozen_digest():
        digests["frozen weights"] = frozen
    if setup.privacy is not None:
        digests["noise multiplier"] = f"{setup.privacy.noise_multiplier:.9g}"
        digests["noise seed"] = sha256(f"noise seed {setup.privacy.sampling.seed}".encode()).hexdigest()
    if setup.fleet.known.columns():
        digests["fleet"] = setup.fleet.known.digest()
    experiment = setup.experiment
    given = {
        "model code": experiment.model.name,
        "task": experiment.task.name,
        "loss": getattr(experiment.task.options, "loss", None),
        "algorithm": experiment.algorithm.name,
        "aggregation": experiment.aggregation.name,
        "attack": experiment.attack and experiment.attack.name,
        **{f"transform {number}": given for number, given in enumerate(experiment.transforms)},
        **{f"metric {number}": given for number, given in enumerate(experiment.metrics or ())},
    }
    given = {what: value for what, value in given.items() if value is not None and code.is_own(value)}
    return digests | {what: code.digest(value) for what, value in given.items()}


def finish(folder: Folder, setup: Setup, state: State, history: list[Line]) -> None:
    """The plot and the models, that of all clusters last: its presence says that everything else is there."""
    start = {"round": 0, **folder.noted("start")}
    if "test_loss" in start:
        curves({"run": [[start, *history]]}, folder.path / "curves.png", title=describe(setup))
    if lines := read_lines(folder.path / DEVICES):
        write_table(lines, folder.path / TABLE, setup.fleet.names)
        device_plot(lines, folder.path / "devices.png", setup.evaluate.metrics, title=describe(setup))
    for K, model in enumerate(pluralistic.models(state)):
        folder.write(cluster_model(K), save(setup.flat_model.state_dict(model)))
    folder.finish(save(setup.flat_model.state_dict(state.model)))


def load_finished(folder: Folder, setup: Setup, say: Say) -> list[Line]:
    """The lines of a run that is finished. Its model is loaded into the setup's. Files are checked against the digests
    that the run noted when it ended."""
    folder.compare(fingerprints(setup))
    folder.check_finished(say)
    path = folder.path / MODEL
    try:
        setup.flat_model.load(setup.flat_model.from_state_dict(load_file(path)))
    except (OSError, SafetensorError, ValueError, RuntimeError):
        raise BadRun(f"{path} is damaged: delete it, and --resume writes it again from the checkpoint") from None
    return read_lines(folder.path / METRICS)
