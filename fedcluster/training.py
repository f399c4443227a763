"""Training: Algorithm 1, and what a run leaves behind."""

import math
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

import fedcluster
from fedcluster.accept import accept
from fedcluster.algorithms import exchanged
from fedcluster.clock import everybody
from fedcluster.display import Display, suited
from fedcluster.errors import BadExperiment, BadRun, BudgetExceeded, Diverged
from fedcluster.experiment import Experiment
from fedcluster.folder import Folder
from fedcluster.ledger import Ledger
from fedcluster.plots import curves
from fedcluster.prepare import Setup, prepare, spread
from fedcluster.ranks import agree, everywhere, joined, leading, restarts
from fedcluster.record import Line, Recorder, read_lines
from fedcluster.stacked import Stacked
from fedcluster.state import State


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
) -> Result:
    """Train. With `out`, everything is written there, and `resume` goes on where an earlier run stopped.

    `workers` processes share the work; their number changes nothing but the time. `cohorts` may be trained
    "sequential", "stacked" (see `stacked`), or in whichever way "auto" finds faster. `strict_budget` refuses
    algorithms that need more than one download and one upload a device and round.
    """
    check_device(device)
    display = (display or suited()) if leading() else Display()
    folder = Folder(Path(out), experiment, resume or restarts() > 0) if out is not None and leading() else None
    with closing(folder) if folder else nullcontext(), repeatable(), display, joined(device):
        setup = prepare(experiment, display, device)
        keep_budget(setup, strict_budget, display)
        if everywhere(folder is not None and folder.finished):
            display.say(f"{out} is finished: nothing to do")
            return finished(folder, setup) if folder else Result([], setup.learner.module)
        display.announce(banner(setup))
        if cohorts == "auto" and folder:
            cohorts = folder.noted("cohorts") or cohorts
        setup = spread(setup, workers, cohorts, display)
        recorder, state = begin(setup, folder, display)
        with closing(setup.executor), closing(recorder):
            state = train(setup, recorder, agree(state, setup.new))
            recorder.save(state, now=True)
        if folder:
            finish(folder, setup, state, recorder.history)
        setup.learner.load(state.model)
        return Result(recorder.history, setup.learner.module, folder.path if folder else None)


def check_device(device: str) -> None:
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise BadExperiment(f"--device {device} cannot be used here ({str(error).splitlines()[0]}): try cpu") from None


def keep_budget(setup: Setup, strict: bool, display: Display) -> None:
    """FedCluster's budget is one download and one upload a device and round; say so when an algorithm needs more."""
    down, up = (len(messages) for messages in exchanged(setup.algorithm, setup.start))
    if (down, up) == (1, 1) or not setup.devices:
        return
    name = setup.experiment.local.algorithm
    needs = f"{name} needs {down} downloads and {up} upload{'s' * (up != 1)} a device and round"
    if strict:
        raise BudgetExceeded(f"{needs}, and the budget is one of each: take another algorithm, or not --strict-budget")
    display.say(f"{needs}, more than the budget of one of each; the ledger counts them")


def begin(setup: Setup, folder: Folder | None, display: Display) -> tuple[Recorder, State]:
    """From the start, or from where the folder's run stopped."""
    rounds, cycles = setup.experiment.rounds, setup.clusters.count
    if folder is None:
        display.begin(rounds, cycles, done=0)
        return Recorder(None, display, Ledger(setup.devices), timed=setup.clock is not None), setup.start
    known = facts(setup)
    before, now = folder.noted("arithmetic"), known["arithmetic"]
    if before not in (None, now):
        display.say(f"begun with {before} steps, going on with {now} ones: the last digits will differ")
    folder.begin(known)
    state, ledger, seconds, history, turns = folder.restore(setup.start, setup.new, setup.devices, cycles, display)
    if folder.begun:
        display.say(f"resuming {folder.path} after {state.round} of {rounds} rounds")
    display.begin(rounds, cycles, done=state.round)
    return Recorder(folder.path, display, ledger, seconds, history, turns, setup.clock is not None), state


def train(setup: Setup, recorder: Recorder, state: State) -> State:
    """Algorithm 1: T rounds of M cycles, from wherever an earlier run stopped."""
    ledger = recorder.ledger
    for j in range(state.round, setup.experiment.rounds):
        for cycle in setup.schedule.round(j)[state.cycle :]:
            before = state
            turn = setup.clock.turn(cycle, state.time) if setup.clock else everybody(cycle, state.time)
            cycle = turn.back  # those who come back in time
            for number, exchange in enumerate(setup.algorithm.exchanges):  # of nearly every algorithm: one
                sent, form = exchange.broadcast(state), exchange.form(state)
                ledger.send(cycle if number else turn.begin, sent, number)
                uploads = setup.executor.train(cycle, sent, number, state.devices)
                updates = accept(ledger.receive(uploads, cycle, form, number), cycle, form, ledger.refuse)
                state = exchange.combine(state, updates, cycle)  # W_{jM+K} -> W_{jM+K+1}
            if setup.optimizer is not None:
                state = setup.optimizer.step(before, state)
            state = replace(state, cycle=cycle.cycle + 1, time=turn.time)
            recorder.cycle(turn, state, changed=state.model is not before.model)
        state = replace(state, round=j + 1, cycle=0)
        if leading():
            scores = setup.evaluate(state.model)
            check_finite(setup, recorder, j, scores)
            recorder.round(state, scores)
    return state


def check_finite(setup: Setup, recorder: Recorder, j: int, scores: dict[str, float]) -> None:
    """Stop a run that can no longer learn, before anything of this round is written."""
    turns = recorder.cycles.lines[-setup.clusters.count :]
    reasons = [why for turn in turns for _, why in turn["reasons"]]
    astray = any(turn["refused"] for turn in turns) and (not reasons or any("not finite" in why for why in reasons))
    nothing = astray and not any(turn["changed"] for turn in turns)
    if nothing or not all(math.isfinite(score) for score in scores.values()):
        what = "every update was refused as not finite" if nothing else "the loss is not finite"
        kept = f"; rounds 1 to {j} are in {recorder.folder}" if recorder.folder and j else ""
        rate = setup.experiment.local.lr
        raise Diverged(f"round {j + 1}: {what}, so training has diverged: lower local.lr (now {rate:g}){kept}")


def banner(setup: Setup) -> str:
    """What is about to be trained, in a line."""
    experiment = setup.experiment
    name = experiment.model.name if isinstance(experiment.model.name, str) else type(setup.learner.module).__name__
    data = setup.dataset.name if setup.dataset else "the devices' data"
    what = f"{name} with {setup.learner.parameters:,} parameters on {data}"
    if experiment.method == "centralized":
        return f"{what}: centralized on {setup.fleet.sizes[0]:,} pooled samples"
    sizes = f"{len(setup.fleet):,} devices in {setup.clusters.count:,} cluster{'s' * (setup.clusters.count > 1)}"
    return f"{what}: {sizes}, {setup.schedule.cohort_size():,} devices a round"


def facts(setup: Setup) -> dict[str, Any]:
    """What the run stands on."""
    return {
        "fedcluster": fedcluster.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "parameters": setup.learner.parameters,
        "devices": len(setup.fleet),
        "clusters": setup.clusters.count,
        "arithmetic": "torch" if setup.learner.chain is None else "compiled",
        "cohorts": "stacked" if isinstance(setup.executor, Stacked) else "sequential",
        "fingerprints": {
            "data": setup.dataset.digest() if setup.dataset else "with the devices",
            "clusters": setup.clusters.digest(),
            "model": sha256(setup.start.model.cpu().numpy().tobytes()).hexdigest(),
        }
        | ({"fleet": setup.fleet.known.digest()} if setup.fleet.known.columns() else {}),
        "start": setup.evaluate(setup.start.model),
    }


def finish(folder: Folder, setup: Setup, state: State, history: list[Line]) -> None:
    """The picture, then the model: its presence says that everything else is there."""
    start = {"round": 0, **setup.evaluate(setup.start.model)}
    if "test_loss" in start:
        curves({"run": [[start, *history]]}, folder.path / "curves.png", title=banner(setup))
    named = setup.learner.named(state.model)
    folder.write("model.safetensors", save({name: tensor.contiguous().cpu() for name, tensor in named.items()}))


def finished(folder: Folder, setup: Setup) -> Result:
    """The result of a run that ended earlier."""
    path = folder.path / "model.safetensors"
    try:
        tensors = load_file(path)
        setup.learner.load(setup.learner.vector(tensors))
    except (OSError, SafetensorError, KeyError, RuntimeError):
        raise BadRun(f"{path} is damaged: delete it, and --resume writes it again from the checkpoint") from None
    return Result(read_lines(folder.path / "metrics.jsonl"), setup.learner.module, folder.path)


@contextmanager
def repeatable() -> Iterator[None]:
    """One thread, so that sums do not depend on the number of cores; torch's generator left as it was."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(threads)
