"""An aggregator of one's own: the middle update of each coordinate, the lower one of two.

It keeps all updates until `finish`. Without `reduce` it cannot be shared among ranks, so torchrun refuses it.
"""

import torch

import fedcluster


class Median:
    def __init__(self, spec, options, rng):  # type: ignore[no-untyped-def]
        self.updates = []

    def accumulate(self, message, weight, device):  # type: ignore[no-untyped-def]
        self.updates.append({name: tensor.clone() for name, tensor in message.items()})

    def finish(self):  # type: ignore[no-untyped-def]
        if not self.updates:
            return None
        columns = {name: torch.stack([update[name] for update in self.updates]) for name in self.updates[0]}
        return fedcluster.Aggregate({name: column.median(0).values for name, column in columns.items()}, 1.0)


experiment = fedcluster.Experiment(
    rounds=3,
    fleet={"devices": 100, "samples": 50},
    clusters={"count": 5},
    model={"name": "logistic"},
    aggregation={"name": Median},
    local={"lr": 0.5},
)

if __name__ == "__main__":
    result = fedcluster.run(experiment)
    print(f"test accuracy {result.history[-1]['test_accuracy']:.1%}")
