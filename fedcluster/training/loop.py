"""The training loop: the paper's Algorithm 1."""

import time
from dataclasses import replace
from typing import Any

from fedcluster.algorithms import pair_balance, pluralistic
from fedcluster.errors import CallbackFailed, Diverged, LostRank, LostServer, NotAlike
from fedcluster.runs.metrics import Record
from fedcluster.state import State
from fedcluster.training import divergence
from fedcluster.training.callbacks import CallbackList
from fedcluster.training.cycle import run_cycle
from fedcluster.training.executors.distributed import all_reduce_sum, check_same_state, is_main_rank
from fedcluster.training.setup import Setup


def train(setup: Setup, record: Record, state: State, callbacks: CallbackList | None = None) -> State:
    """All rounds that are left. When a run is interrupted, diverges or loses a process, callbacks are told, so that the
    last cycle can be saved."""
    callbacks = callbacks or CallbackList()
    try:
        state = run_rounds(setup, record, state, callbacks)
        callbacks.call("on_run_end", record.history, state)
        return state
    except (CallbackFailed, Diverged, KeyboardInterrupt, LostRank, LostServer, NotAlike) as error:
        callbacks.call("on_exception", error)
        raise


def run_rounds(setup: Setup, record: Record, state: State, callbacks: CallbackList) -> State:
    """Algorithm 1: T rounds of M cycles, from wherever an earlier run stopped."""
    callbacks.call("on_run_start", setup, state, record.history)
    while state.round < setup.experiment.rounds and not all_reduce_sum(callbacks.stopped is not None):
        callbacks.call("on_round_start", state)
        start, moved = state, list[divergence.Moved]()
        for cycle in setup.schedule.round(state.round, pair_balance.order_of(state))[state.cycle :]:
            callbacks.call("on_cycle_start", cycle, state)
            began, before = time.perf_counter(), state
            result = run_cycle(setup, record.ledger, state, cycle)  # W_{jM+K} -> W_{jM+K+1}
            state, moved = result.state, moved + result.furthest
            seconds = time.perf_counter() - began
            line = record.cycle(result.outcome, seconds, before, state, result.remarks)
            callbacks.call("on_cycle_end", line, state)
        if must_repeat(setup, start, state):
            divergence.check_failed_round(setup, record.cycles, start.round, moved)
            record.drop_round(start.round)
            state = start
            callbacks.call("on_round_failed", state)
            continue
        state = replace(state, round=state.round + 1, cycle=0)
        check_same_state(state)
        by_device = None
        if setup.evaluate_devices:
            by_device = setup.evaluate_devices(state.model, state.round, pluralistic.models(state))
        if is_main_rank():
            scores: dict[str, Any] = setup.evaluate(state.model)
            divergence.check(setup, record.cycles, start.round, scores, moved)
            if setup.privacy is not None:
                scores |= setup.privacy.line(state.round)
            if by_device is not None:
                line, scores["by_device"] = by_device
                callbacks.call("on_devices_evaluated", line, state)
            callbacks.call("on_round_end", record.round(state, scores), state)
    return state


def must_repeat(setup: Setup, start: State, state: State) -> bool:
    """Whether no cycle of the round succeeded. A federation repeats such a round."""
    return setup.min_updates > 0 and start.cycle == 0 and state.model is start.model
