"""What a cycle costs beyond its devices' training, and what part of a run is evaluation.

    make bench-overhead        needs $FEDCLUSTER_DATA with mnist; two minutes

The overhead is measured in one process, where it cannot hide behind a worker: the time of a cycle less the time in
which its devices train. Evaluation is measured in a run with one process a core, as a part of its rounds.
"""

import json
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from fedcluster.allocator import keep_memory
from fedcluster.experiment import Experiment
from fedcluster.runs.ledger import Ledger
from fedcluster.runs.metrics import Line, Record
from fedcluster.state import State
from fedcluster.training.callbacks import Callback, CallbackList
from fedcluster.training.executors.choice import choose_executor
from fedcluster.training.executors.in_process import InProcess
from fedcluster.training.executors.processes import Workers, cores
from fedcluster.training.loop import train
from fedcluster.training.setup import prepare
from fedcluster.training.threads import repeatable

RESULT = Path(__file__).parent / "results" / "overhead.json"


def experiment(model: str, data: str, rounds: int) -> Experiment:
    return Experiment(rounds=rounds, data={"name": data}, model={"name": model}, local={"lr": 0.05})


class Timed(InProcess):
    """Notes how long its devices train."""

    spent = 0.0

    def train_device(self, *arguments: Any) -> Any:
        began = time.perf_counter()
        result = super().train_device(*arguments)
        self.spent += time.perf_counter() - began
        return result


def overhead(model: str, data: str, rounds: int = 6) -> float:
    """Milliseconds a cycle."""
    setup = prepare(experiment(model, data, rounds))
    here = setup.executor
    assert isinstance(here, InProcess)
    assert setup.partition is not None
    timed = Timed(here.trainer, here.dataset, setup.partition)
    setup = replace(setup, executor=timed)
    training: list[float] = []

    class Watch(Callback):
        def on_cycle_end(self, line: Line, state: State) -> None:
            training.append(timed.spent)
            timed.spent = 0.0

    record = Record(Ledger(setup.devices))
    train(setup, record, setup.start, CallbackList([Watch()]))
    cycles = [line["seconds"] for line in record.cycles]
    return float(median((whole - part) * 1e3 for whole, part in zip(cycles, training, strict=True)))


def rounds_and_evaluation(model: str, data: str, rounds: int) -> tuple[float, float]:
    """Seconds a round, and the part of the time between two rounds that is not training."""
    setup = choose_executor(prepare(experiment(model, data, rounds)), cores(), "sequential")
    if isinstance(setup.executor, Workers):
        setup.executor.start_all()
    record = Record(Ledger(setup.devices))
    train(setup, record, setup.start)
    setup.executor.close()
    lines = record.history
    shares = [1 - b["seconds"] / (b["elapsed"] - a["elapsed"]) for a, b in pairwise(lines)]
    return median(line["seconds"] for line in lines[1:]), median(shares)


def main() -> None:
    keep_memory()
    with repeatable():
        found: dict[str, Any] = {"overhead of a cycle (ms), mlp on mnist": round(overhead("mlp", "mnist"), 2)}
        for model, data, rounds in (("mlp", "mnist", 8), ("mlp", "digits", 12), ("cnn", "mnist", 3)):
            seconds, share = rounds_and_evaluation(model, data, rounds)
            found[f"{model} on {data}"] = {"seconds a round": round(seconds, 3), "evaluation": f"{share:.1%}"}
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
