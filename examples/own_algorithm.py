"""An algorithm of one's own: a class that says in what it differs from FedAvg, here in what a device sends.

This one sends the sign of every weight's movement and the mean size of the movements, and the server moves by their
average. `broadcast`, `train` and `combine` can all be replaced; `memory` is what a device keeps between its turns.
"""

import fedcluster
from fedcluster.algorithms import FedAvg


class SignOfMovement(FedAvg):
    def train(self, flat_model, received, batches, memory):  # type: ignore[no-untyped-def]
        movement = super().train(flat_model, received, batches, memory)["model"] - received["model"]
        return {"model": received["model"] + movement.sign() * movement.abs().mean()}


experiment = fedcluster.Experiment(
    rounds=5,
    fleet={"devices": 100, "samples": 50},
    clusters={"count": 5, "participation": 0.5},
    model={"name": "logistic"},
    algorithm={"name": SignOfMovement},
    local={"lr": 0.5},
)

if __name__ == "__main__":
    result = fedcluster.run(experiment)
    print(f"test accuracy {result.history[-1]['test_accuracy']:.1%}")
