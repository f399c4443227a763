"""The same work by fedcluster: a round of ten cycles of ten devices, in one process a core."""

import argparse
import json

from fedcluster.allocator import keep_memory
from fedcluster.experiment import Experiment
from fedcluster.runs.ledger import Ledger
from fedcluster.runs.metrics import Record
from fedcluster.training.executors.choice import choose_executor
from fedcluster.training.executors.processes import Workers, cores
from fedcluster.training.loop import train
from fedcluster.training.setup import prepare
from fedcluster.training.threads import repeatable

WARM_UP = 1  # round in which workers trace their gradients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["mlp", "alexnet"], required=True)
    parser.add_argument("--rounds", type=int, required=True, help="rounds trained; the first is not timed")
    parser.add_argument("--data", help="not used: mnist comes from $FEDCLUSTER_DATA or the hub")
    parser.add_argument("--clusters", type=int, default=10)
    arguments = parser.parse_args()
    keep_memory()
    experiment = Experiment(
        rounds=arguments.rounds,
        data={"name": "mnist"},
        clusters={"count": arguments.clusters},
        model={"name": arguments.model},
        local={"lr": 0.05},
    )
    with repeatable():
        setup = choose_executor(prepare(experiment), cores(), "sequential")
        if isinstance(setup.executor, Workers):
            setup.executor.start_all()
        record = Record(Ledger(setup.devices))
        train(setup, record, setup.start)
        setup.executor.close()
    line = {
        "name": "fedcluster",
        "model": arguments.model,
        "seconds": [round(line["seconds"], 4) for line in record.history[WARM_UP:]],
        "accuracy": record.history[-1]["test_accuracy"],
        "rounds": arguments.rounds,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
