"""A local rule of one's own: a function that changes the gradient in place, here by weight decay towards zero.

`received` is the global model that the device downloaded; FedProx would pull towards it.
"""

import fedcluster


def weight_decay(gradient, w, received):  # type: ignore[no-untyped-def]
    gradient.add_(w, alpha=0.001)


experiment = fedcluster.Experiment(
    rounds=3,
    fleet={"devices": 100, "samples": 50},
    clusters={"count": 5},
    model={"name": "logistic"},
    algorithm={"name": weight_decay},
    local={"lr": 0.5},
)

if __name__ == "__main__":
    result = fedcluster.run(experiment)
    print(f"test accuracy {result.history[-1]['test_accuracy']:.1%}")
