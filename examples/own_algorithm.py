"""An algorithm of one's own, with an option and a state: a class that says in what it differs from FedAvg.

A device sends the sign of every weight's movement times their mean size. What this leaves out of the movement it keeps,
times `feedback`, and adds to its next one (error feedback). `broadcast` and `combine` can be replaced as well.
"""

import torch

import fedcluster
from fedcluster.algorithms import FedAvg, Section


class SignWithFeedback(FedAvg):
    class Options(Section):
        feedback: float = 0.5

    def initial_device_state(self, model, size):  # type: ignore[no-untyped-def]
        return {"error": torch.zeros_like(model)}

    def train(self, flat_model, received, batches, device_state):  # type: ignore[no-untyped-def]
        trained = super().train(flat_model, received, batches, device_state)["model"]
        movement = trained - received["model"] + device_state["error"]
        sent = movement.sign() * movement.abs().mean()
        device_state["error"] = self.options.feedback * (movement - sent)
        return {"model": received["model"] + sent}


experiment = fedcluster.Experiment(
    rounds=5,
    fleet={"devices": 100, "samples": 50},
    clusters={"count": 5, "participation": 0.5},
    model={"name": "logistic"},
    algorithm={"name": SignWithFeedback, "feedback": 0.9},
    local={"lr": 0.5},
)

if __name__ == "__main__":
    result = fedcluster.run(experiment)
    print(f"test accuracy {result.history[-1]['test_accuracy']:.1%}")
