"""fedcluster.run: one experiment, from its description to a trained model."""

from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path

import torch

from fedcluster.allocator import keep_memory
from fedcluster.errors import BadExperiment
from fedcluster.experiment import Experiment
from fedcluster.models.kernels import supports
from fedcluster.models.precision import PRECISIONS, emulated
from fedcluster.processes import leave_if_importing
from fedcluster.runs.directory import Folder
from fedcluster.runs.progress import Display, default_display
from fedcluster.runs.result import Result
from fedcluster.training.best_model import keep_best
from fedcluster.training.callbacks import Callback, CallbackList, Progress, stop_rule
from fedcluster.training.checkpoints import Checkpoints
from fedcluster.training.description import describe, never_scored, over_budget
from fedcluster.training.executors.choice import choose_executor
from fedcluster.training.executors.distributed import (
    all_reduce_sum,
    broadcast_state,
    check_ranks_match,
    is_main_rank,
    process_group,
    restart_count,
)
from fedcluster.training.loop import train
from fedcluster.training.output import begin, finish, load_finished, versions
from fedcluster.training.recorder import Recorder
from fedcluster.training.setup import prepare, unequal_clusters
from fedcluster.training.threads import repeatable
from fedcluster.training.tracking.registry import tracking

COHORTS = ("sequential", "stacked", "auto")


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    resume: bool = False,
    display: Display | None = None,
    workers: int = 1,
    device: str = "cpu",
    cohorts: str = "sequential",
    precision: str = "float32",
    strict_budget: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train. With `out`, the run is written to this folder, and `resume` continues the run that the folder holds.

    `workers` processes share the work; their number changes nothing but the time. `cohorts` are trained
    "sequential", "stacked" (see `executors.stacked`), or whichever "auto" finds faster. With `precision` "bf16" devices
    compute gradients in mixed precision (see `models.precision`). `strict_budget` refuses
    algorithms that need more than one download and one upload per device and round. `callbacks` watch the run and may
    stop it early (see `callbacks`).
    """
    leave_if_importing()
    check_options(workers, cohorts, device, precision)
    keep_memory()
    main_rank = is_main_rank()
    display = (display or default_display()) if main_rank else Display()
    folder = Folder(Path(out), experiment, resume or restart_count() > 0) if out is not None and main_rank else None
    with closing(folder) if folder else nullcontext(), repeatable(), display, process_group(device):
        if precision == "bf16" and (why := emulated(torch.device(device))):
            display.say(f"{why}, so that --precision bf16 is emulated, and slower than float32")
        setup = prepare(experiment, display.say, device, precision, display.track)
        if precision == "bf16" and supports(setup.flat_model.module) and device == "cpu":
            display.say("in float32 the compiled engine trains this model, which may be faster than bf16")
        if warning := over_budget(setup, strict_budget):
            display.say(warning)
        if all_reduce_sum(folder is not None and folder.finished):
            history = load_finished(folder, setup, display.say) if folder else []
            display.say(f"{out} is finished: nothing to do")
            return Result(history, setup.flat_model.module, folder.path if folder else None)
        display.announce(describe(setup))
        for sentence in setup.privacy.describe(experiment.rounds) if setup.privacy else ():
            display.say(sentence)
        if inequality := unequal_clusters(setup):
            display.say(inequality)
        if unscored := never_scored(setup):
            display.say(unscored)
        if cohorts == "auto" and folder:
            cohorts = folder.noted("cohorts") or cohorts
        setup = choose_executor(setup, workers, cohorts, display.say)
        check_ranks_match(
            versions()
            | {
                "arithmetic": setup.flat_model.arithmetic,
                "frozen weights": setup.flat_model.frozen_digest() or "none",
                "experiment": experiment.digest(),
            }
        )
        rules, keeping = stop_rule(setup), keep_best(setup, folder, display.say) if folder else []
        tracked = tracking(experiment, folder, display.say) if main_rank else []
        state, record, kept = begin(setup, folder, display.say)
        display.begin(experiment.rounds, setup.clusters.count, done=state.round)
        recorder = Recorder(folder.path, kept) if folder else None
        own: list[Callback] = [Progress(display, setup.schedule.name)]
        if folder and recorder:
            own = [recorder, *own, *keeping, Checkpoints(recorder, record, folder.run), *tracked]
        watching = CallbackList(own, [*rules, *callbacks], folder is not None) if main_rank else CallbackList()
        with closing(setup.executor), closing(recorder) if recorder else nullcontext():
            state = train(setup, record, broadcast_state(state, setup.initial_device_state), watching)
        if watching.stopped:
            display.say(f"stopped after round {state.round}: {watching.stopped}")
        if folder:
            finish(folder, setup, state, record.history)
        for tracker in tracked:
            tracker.finish()
        setup.flat_model.load(state.model)
        return Result(record.history, setup.flat_model.module, folder.path if folder else None)


def check_options(workers: int, cohorts: str, device: str, precision: str) -> None:
    if type(workers) is not int or workers < 1:
        raise BadExperiment(f"workers = {workers!r} is not allowed: use a whole number of at least 1")
    if cohorts not in COHORTS:
        raise BadExperiment(f"cohorts = {cohorts!r} is not allowed: use one of {', '.join(COHORTS)}")
    if precision not in PRECISIONS:
        raise BadExperiment(f"precision = {precision!r} is not allowed: use one of {', '.join(PRECISIONS)}")
    try:
        torch.zeros(1, device=device).item()  # "meta" has none
    except (RuntimeError, AssertionError, ValueError) as error:
        raise BadExperiment(f"--device {device} cannot be used here ({str(error).splitlines()[0]}): try cpu") from None
