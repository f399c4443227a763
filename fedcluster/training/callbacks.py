"""Callbacks: code that watches a run, at the start and end of the run, of rounds and of cycles.

`fedcluster.run(experiment, callbacks=[...])` calls every callback in order. Under torchrun they run on rank 0 only.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fedcluster.errors import BadExperiment, CallbackFailed, FedClusterError
from fedcluster.fleet.schedule import Cycle
from fedcluster.privacy.mechanism import Mechanism
from fedcluster.runs.ledger import COUNTS
from fedcluster.runs.metrics import Line
from fedcluster.runs.progress import Display
from fedcluster.state import State
from fedcluster.training.setup import Setup

REPORTED = 3  # refusals of a cycle that are reported one by one


class StopTraining(Exception):
    """Raised by a callback, it ends the run after the current round, as if that had been the last."""


class Callback:
    """Does nothing; a subclass overrides what it needs. A line is what metrics.jsonl or cycles.jsonl holds."""

    def on_run_start(self, setup: Setup, state: State, history: list[Line]) -> None:
        """`history` has the rounds of an earlier run that this one resumes."""

    def on_round_start(self, state: State) -> None:
        pass

    def on_cycle_start(self, cycle: Cycle, state: State) -> None:
        pass

    def on_cycle_end(self, line: Line, state: State) -> None:
        pass

    def on_devices_evaluated(self, line: Line, state: State) -> None:
        """`line` has the scores of each device, as devices.jsonl holds them. It comes before the end of the round."""

    def on_round_end(self, line: Line, state: State) -> None:
        pass

    def on_round_failed(self, state: State) -> None:
        """No cycle of a federation's round succeeded; the round is repeated from `state`, once devices are back."""

    def on_run_end(self, history: list[Line], state: State) -> None:
        """All rounds are trained and saved; not called when the run fails or is interrupted."""

    def on_exception(self, error: BaseException) -> None:
        """The run was interrupted, diverged, lost a rank or the server, or a callback failed."""


class CallbackList:
    """Calls the run's own callbacks, then the user's, each in order. The user's may raise anything; errors of the run's
    own pass as they are. `stopped` is the reason that a callback gave for stopping, None if none did."""

    def __init__(self, own: Sequence[Callback] = (), callbacks: Sequence[Callback] = (), saved: bool = False) -> None:
        self.own, self.callbacks, self.saved = own, callbacks, saved
        self.stopped: str | None = None

    def call(self, method: str, *arguments: Any) -> None:
        for callback in self.own:
            getattr(callback, method)(*arguments)
        for callback in self.callbacks:
            try:
                getattr(callback, method)(*arguments)
            except StopTraining as stop:
                self.stopped = str(stop) or type(callback).__name__
            except FedClusterError:
                raise
            except Exception as error:
                then = "; progress is saved, continue with --resume" if self.saved else ""
                raise CallbackFailed(
                    f"callback {type(callback).__name__} failed in {method} ({type(error).__name__}: {error}){then}"
                ) from error


class Progress(Callback):
    """Shows cycles and rounds on the display, and what went wrong in them. `name` gives a device's name."""

    def __init__(self, display: Display, name: Callable[[int], str] = str) -> None:
        self.display, self.name = display, name

    def on_cycle_end(self, line: Line, state: State) -> None:
        where, reasons = f"round {line['round']}", line["reasons"]
        for device, reason in reasons[:REPORTED]:
            self.display.say(f"{where}: refused the update of device {self.name(device)} ({reason})")
        if len(reasons) > REPORTED:
            self.display.say(f"{where}: refused {len(reasons) - REPORTED} more updates of this cycle")
        if "too_few" in line:
            few = f"too few updates ({line['too_few']}), so the model stays as it is"
            self.display.say(f"{where}, cluster {line['cluster']}: {few}")
        if "clipped" in line:
            far = "moved the model by {moved:.3g}, clipped to the {allowed:.3g} that accept.cycle_bound allows"
            self.display.say(f"{where}, cluster {line['cluster']}: the cycle {far.format(**line['clipped'])}")
        for device, reason in line.get("faults", ())[:REPORTED]:
            self.display.say(f"{where}: device {self.name(device)}: {reason}")
        if "no_sum" in line:
            self.display.say(f"{where}, cluster {line['cluster']}: {line['no_sum']}")
        if "undone" in line:
            self.display.say(f"{where}, {line['undone']}")
        rate = len(line["cohort"]) / max(line["seconds"], 1e-9)
        self.display.cycle(line["round"] - 1, line["cycle"], rate)

    def on_round_end(self, line: Line, state: State) -> None:
        self.display.round(line)


def check_score(score: str, setup: Setup, asked_by: str, others: Iterable[str] = ()) -> None:
    """Refuse what is not a score with one value a round, nor one of `others`."""
    scores = setup.evaluate.directions()
    if score not in (*scores, *others):
        there = f"there are {', '.join(scores)}" if scores else "this process has no test data, and so no scores"
        raise BadExperiment(f"{asked_by}: {score!r} is not a score with one value a round; {there}")


def counted(setup: Setup) -> list[str]:
    """What a line of metrics.jsonl counts besides scores, such as bytes and time."""
    spent = ["epsilon"] if setup.privacy and math.isfinite(setup.privacy.epsilon(1)) else []
    return [*COUNTS, *spent, "elapsed", *(["simulated_seconds"] if setup.clock else [])]


def direction(score: str, setup: Setup, asked_by: str) -> float:
    """1 where a higher value of this key of metrics.jsonl is better, -1 where a lower one is."""
    if score.startswith(("test_", "train_")):
        check_score(score, setup, asked_by)
    return 1.0 if setup.evaluate.directions().get(score, True) else -1.0


class EarlyStopping(Callback):
    """Stops when `metric`, a key of metrics.jsonl, has reached `target`, or has not improved for `patience` rounds.
    `higher` says which direction is better where the metric itself does not."""

    def __init__(
        self,
        metric: str = "test_loss",
        patience: int | None = None,
        target: float | None = None,
        higher: bool | None = None,
    ) -> None:
        if (patience is None and target is None) or (patience is not None and patience < 1):
            raise BadExperiment("EarlyStopping needs a target, or a patience of at least 1 round")
        self.metric, self.patience, self.target, self.higher = metric, patience, target, higher

    def on_run_start(self, setup: Setup, state: State, history: list[Line]) -> None:
        known = direction(self.metric, setup, "early stopping")
        self.sign = known if self.higher is None else 1.0 if self.higher else -1.0
        self.best, self.waited = -float("inf"), 0
        for line in history:
            self.on_round_end(line, state)

    def on_round_end(self, line: Line, state: State) -> None:
        if self.metric not in line:
            raise BadExperiment(f"early stopping: there is no score {self.metric!r}; there are {', '.join(line)}")
        value = self.sign * line[self.metric]
        self.waited = 0 if value > self.best else self.waited + 1
        self.best = max(self.best, value)
        if self.target is not None and value >= self.sign * self.target:
            reached = line[self.metric]
            raise StopTraining(f"{self.metric} has reached {reached:{',' if isinstance(reached, int) else '.6g'}}")
        if self.patience is not None and self.waited >= self.patience:
            raise StopTraining(f"{self.metric} has not improved for {self.waited} rounds")


def stop_rule(setup: Setup) -> list[Callback]:
    """The callback that [stop] describes, if the experiment has one."""
    stop = setup.experiment.stop
    if stop is None:
        return budget_rule(setup)
    check_score(stop.metric, setup, "stop.metric", counted(setup))  # refused before the run begins
    return [EarlyStopping(stop.metric, stop.patience, stop.target), *budget_rule(setup)]


class Budget(Callback):
    """Stops before a round after which more than `privacy.epsilon` would be spent, because a run was stopped and has
    released cycles twice."""

    def __init__(self, mechanism: Mechanism, epsilon: float) -> None:
        self.mechanism, self.epsilon = mechanism, epsilon

    def on_run_start(self, setup: Setup, state: State, history: list[Line]) -> None:
        self.rounds = setup.experiment.rounds
        self.check(state)

    def on_round_end(self, line: Line, state: State) -> None:
        self.check(state)

    def check(self, state: State) -> None:
        if state.round < self.rounds and self.mechanism.epsilon(state.round + 1) > self.epsilon:
            raise StopTraining(f"another round would spend more than epsilon = {self.epsilon:g}")


def budget_rule(setup: Setup) -> list[Callback]:
    """The callback that keeps to the budget of [privacy], if there is one."""
    mechanism = setup.privacy
    if mechanism is None or mechanism.section.epsilon is None:
        return []
    return [Budget(mechanism, mechanism.section.epsilon)]
