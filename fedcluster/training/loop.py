"""Training: Algorithm 1, and what a run leaves behind."""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

import fedcluster
from fedcluster.algorithms import phase_tensor_names
from fedcluster.allocator import keep_memory
from fedcluster.errors import BadExperiment, BadRun, BudgetExceeded, CallbackFailed, LostRank, LostServer, NotAlike
from fedcluster.experiment import Experiment
from fedcluster.processes import leave_if_importing
from fedcluster.runs import fingerprints as code
from fedcluster.runs.directory import Folder
from fedcluster.runs.ledger import Ledger
from fedcluster.runs.metrics import Line, Recorder, read_lines
from fedcluster.runs.plots import curves
from fedcluster.runs.progress import Display, suited
from fedcluster.state import State
from fedcluster.training import divergence
from fedcluster.training.callbacks import Callback, CallbackList, Progress
from fedcluster.training.checkpoints import Checkpoints
from fedcluster.training.cycle import run_cycle
from fedcluster.training.executors.distributed import (
    all_reduce_sum,
    broadcast_state,
    check_ranks_match,
    check_same_state,
    is_main_rank,
    process_group,
    restart_count,
)
from fedcluster.training.executors.stacked import Stacked
from fedcluster.training.setup import Setup, choose_executor, prepare, unequal_clusters

COHORTS = ("sequential", "stacked", "auto")
ONE_AT_A_TIME = RLock()


@dataclass(frozen=True)
class Result:
    """What came of a run: the lines of metrics.jsonl, the trained module, and where it was written."""

    history: list[Line]
    model: nn.Module
    out: Path | None = None


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    resume: bool = False,
    display: Display | None = None,
    workers: int = 1,
    device: str = "cpu",
    cohorts: str = "sequential",
    strict_budget: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train. With `out`, everything is written there, and `resume` goes on where an earlier run stopped.

    `workers` processes share the work; their number changes nothing but the time. `cohorts` may be trained
    "sequential", "stacked" (see `stacked`), or in whichever way "auto" finds faster. `strict_budget` refuses
    algorithms that need more than one download and one upload a device and round. `callbacks` watch the run and may
    stop it early; see `callbacks`.
    """
    leave_if_importing()
    check_options(workers, cohorts, device)
    keep_memory()
    display = (display or suited()) if is_main_rank() else Display()
    folder = (
        Folder(Path(out), experiment, resume or restart_count() > 0) if out is not None and is_main_rank() else None
    )
    with closing(folder) if folder else nullcontext(), repeatable(), display, process_group(device):
        setup = prepare(experiment, display, device)
        keep_budget(setup, strict_budget, display)
        if all_reduce_sum(folder is not None and folder.finished):
            if folder:
                folder.compare(fingerprints(setup))
            display.say(f"{out} is finished: nothing to do")
            return finished(folder, setup, display) if folder else Result([], setup.flat_model.module)
        display.announce(banner(setup))
        if inequality := unequal_clusters(setup):
            display.say(inequality)
        if cohorts == "auto" and folder:
            cohorts = folder.noted("cohorts") or cohorts
        setup = choose_executor(setup, workers, cohorts, display)
        check_ranks_match(
            versions()
            | {
                "arithmetic": setup.flat_model.arithmetic,
                "frozen weights": setup.flat_model.frozen_digest() or "none",
                "experiment": experiment.digest(),
            }
        )
        recorder, state = begin(setup, folder, display)
        saving = [Checkpoints(recorder, folder.run)] if folder else []
        own = [Progress(display), *saving]
        watchers = CallbackList(own, callbacks, folder is not None) if is_main_rank() else CallbackList()
        with closing(setup.executor), closing(recorder):
            state = train(setup, recorder, broadcast_state(state, setup.initial_device_state), watchers)
        if folder:
            finish(folder, setup, state, recorder.history)
        setup.flat_model.load(state.model)
        return Result(recorder.history, setup.flat_model.module, folder.path if folder else None)


def check_options(workers: int, cohorts: str, device: str) -> None:
    if type(workers) is not int or workers < 1:
        raise BadExperiment(f"workers = {workers!r} is not allowed: use a whole number from 1 on")
    if cohorts not in COHORTS:
        raise BadExperiment(f"cohorts = {cohorts!r} is not allowed: use one of {', '.join(COHORTS)}")
    try:
        torch.zeros(1, device=device).item()  # "meta" has none
    except (RuntimeError, AssertionError, ValueError) as error:
        raise BadExperiment(f"--device {device} cannot be used here ({str(error).splitlines()[0]}): try cpu") from None


def keep_budget(setup: Setup, strict: bool, display: Display) -> None:
    """FedCluster's budget is one download and one upload a device and round; say so when an algorithm needs more."""
    down, up = (len(messages) for messages in phase_tensor_names(setup.algorithm, setup.start))
    if (down, up) == (1, 1) or not setup.devices:
        return
    name = setup.experiment.to_dict()["algorithm"]["name"]
    needs = f"{name} needs {down} downloads and {up} upload{'s' * (up != 1)} a device and round"
    if strict:
        raise BudgetExceeded(f"{needs}, and the budget is one of each: take another algorithm, or not --strict-budget")
    display.say(f"{needs}, more than the budget of one of each; the ledger counts them")


def begin(setup: Setup, folder: Folder | None, display: Display) -> tuple[Recorder, State]:
    """From the start, or from where the folder's run stopped."""
    rounds, cycles, timed = setup.experiment.rounds, setup.clusters.count, setup.clock is not None
    if folder is None:
        display.begin(rounds, cycles, done=0)
        return Recorder(None, display, Ledger(setup.devices), timed=timed, name=setup.schedule.name), setup.start
    known = facts(setup, folder.facts(check=False).get("start"))
    folder.begin(known, display)
    state, ledger, seconds, history, turns = folder.restore(
        setup.start, setup.initial_device_state, setup.devices, cycles, display
    )
    folder.note(known)
    if folder.begun:
        display.say(f"resuming {folder.path} after {state.round} of {rounds} rounds")
    display.begin(rounds, cycles, done=state.round)
    name = setup.schedule.name
    return Recorder(folder.path, display, ledger, seconds, history, turns, timed, name), state


def train(setup: Setup, recorder: Recorder, state: State, callbacks: CallbackList | None = None) -> State:
    """All rounds that are left. When a run is interrupted or loses the others, callbacks can save the last cycle."""
    callbacks = callbacks or CallbackList()
    try:
        state = rounds(setup, recorder, state, callbacks)
        if callbacks.stopped:
            recorder.display.say(f"stopped after round {state.round}: {callbacks.stopped}")
        callbacks.call("on_run_end", recorder.history, state)
        return state
    except (CallbackFailed, KeyboardInterrupt, LostRank, LostServer, NotAlike):
        callbacks.call("on_exception")
        raise


def rounds(setup: Setup, recorder: Recorder, state: State, callbacks: CallbackList) -> State:
    """Algorithm 1: T rounds of M cycles, from wherever an earlier run stopped."""
    callbacks.call("on_run_start", setup, state, recorder.history)
    while state.round < setup.experiment.rounds and not all_reduce_sum(callbacks.stopped is not None):
        callbacks.call("on_round_start", state)
        start, moved = state, list[divergence.Moved]()
        for cycle in setup.schedule.round(state.round)[state.cycle :]:
            callbacks.call("on_cycle_start", cycle, state)
            began = time.perf_counter()
            result = run_cycle(setup, recorder, state, cycle)  # W_{jM+K} -> W_{jM+K+1}
            seconds, changed = time.perf_counter() - began, result.state.model is not state.model
            state, moved = result.state, moved + result.furthest
            line = recorder.cycle(result.outcome, seconds, changed, failed(setup, start, state), result.undone)
            callbacks.call("on_cycle_end", line, state)
        if failed(setup, start, state):
            if not any(turn["missing"] for turn in recorder.cycles.lines[-setup.clusters.count :]):
                divergence.check(setup, recorder, start.round, {}, moved)
            recorder.drop()
            state = start
            callbacks.call("on_round_failed", state)
            continue
        state = replace(state, round=state.round + 1, cycle=0)
        check_same_state(state)
        if is_main_rank():
            scores = setup.evaluate(state.model)
            divergence.check(setup, recorder, start.round, scores, moved)
            callbacks.call("on_round_end", recorder.round(state, scores), state)
    return state


def failed(setup: Setup, start: State, state: State) -> bool:
    """Whether no cycle of the round has succeeded so far. In a federation such a round is taken again."""
    return setup.min_updates > 0 and start.cycle == 0 and state.model is start.model


def banner(setup: Setup) -> str:
    """What is about to be trained, in a line."""
    experiment = setup.experiment
    name = experiment.model.name if isinstance(experiment.model.name, str) else type(setup.flat_model.module).__name__
    data = setup.dataset.name if setup.dataset else "the devices' data"
    frozen = sum(tensor.numel() for tensor in setup.flat_model.frozen.values())
    also = f" and {frozen:,} frozen ones" if frozen else ""
    what = f"{name} with {setup.flat_model.parameters:,} parameters{also} on {data}"
    if experiment.method == "centralized":
        return f"{what}: centralized on {setup.fleet.sizes[0]:,} pooled samples"
    sizes = f"{len(setup.fleet):,} devices in {setup.clusters.count:,} cluster{'s' * (setup.clusters.count > 1)}"
    return f"{what}: {sizes}, {setup.schedule.cohort_size():,} devices a round"


def facts(setup: Setup, start: Line | None = None) -> dict[str, Any]:
    """What the run stands on; `start` are the scores of W_0, where they are known."""
    return {
        **versions(),
        "parameters": setup.flat_model.parameters,
        "devices": len(setup.fleet),
        "clusters": setup.clusters.count,
        "arithmetic": setup.flat_model.arithmetic,
        "cohorts": "stacked" if isinstance(setup.executor, Stacked) else "sequential",
        "fingerprints": fingerprints(setup),
        "start": setup.evaluate(setup.start.model) if start is None else start,
    }


def versions() -> dict[str, str]:
    return {"fedcluster": fedcluster.__version__, "torch": torch.__version__, "numpy": np.__version__}


def fingerprints(setup: Setup) -> dict[str, str]:
    """Digests of what names stand for, which may change while the names do not."""
    found = {
        "data": setup.dataset.digest() if setup.dataset else "with the devices",
        "clusters": setup.clusters.digest(),
        "model": sha256(setup.start.model.cpu().numpy().tobytes()).hexdigest(),
    }
    if frozen := setup.flat_model.frozen_digest():
        found["frozen weights"] = frozen
    if setup.fleet.known.columns():
        found["fleet"] = setup.fleet.known.digest()
    experiment = setup.experiment
    given = {
        "model code": experiment.model.name,
        "algorithm": experiment.algorithm.name,
        "aggregation": experiment.aggregation.name,
        **{f"transform {number}": given for number, given in enumerate(experiment.transforms)},
        **{f"metric {number}": given for number, given in enumerate(experiment.metrics)},
    }
    return found | {what: code.digest(thing) for what, thing in given.items() if code.is_own(thing)}


def finish(folder: Folder, setup: Setup, state: State, history: list[Line]) -> None:
    """The picture, then the model: its presence says that everything else is there."""
    start = {"round": 0, **folder.noted("start")}
    if "test_loss" in start:
        curves({"run": [[start, *history]]}, folder.path / "curves.png", title=banner(setup))
    folder.finish(save(setup.flat_model.state_dict(state.model)))


def finished(folder: Folder, setup: Setup, display: Display) -> Result:
    """The result of a run that ended earlier, checked against what it noted when it ended."""
    folder.check_finished(display)
    path = folder.path / "model.safetensors"
    try:
        setup.flat_model.load(setup.flat_model.from_state_dict(load_file(path)))
    except (OSError, SafetensorError, ValueError, RuntimeError):
        raise BadRun(f"{path} is damaged: delete it, and --resume writes it again from the checkpoint") from None
    return Result(read_lines(folder.path / "metrics.jsonl"), setup.flat_model.module, folder.path)


@contextmanager
def repeatable() -> Iterator[None]:
    """One thread, so that sums do not depend on the number of cores; torch's generator left as it was. That generator
    belongs to the process, so that runs in several threads of one process wait for one another."""
    with ONE_AT_A_TIME:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with torch.random.fork_rng(devices=[]):
                yield
        finally:
            torch.set_num_threads(threads)
