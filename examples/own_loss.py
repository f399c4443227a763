"""A loss of one's own: a function of the model's outputs and the targets that returns the mean loss, a scalar.

Here the pinball loss, so that a linear model learns the 90 % quantile of a number; `below` is a metric of our own.
"""

import numpy as np
import torch

import fedcluster


def pinball(outputs, targets):  # type: ignore[no-untyped-def]
    error = targets - outputs
    return torch.maximum(0.9 * error, -0.1 * error).mean()


def below(outputs, targets):  # type: ignore[no-untyped-def]
    return (targets <= outputs).sum(), targets.numel()


rng = np.random.default_rng(0)
x = rng.normal(size=(1200, 3)).astype(np.float32)
y = (x.sum(axis=1) + rng.normal(size=1200)).astype(np.float32)
data = fedcluster.Dataset(x[:1000], y[:1000], x[1000:], y[1000:], device_train=np.arange(1000) % 20, name="made up")
experiment = fedcluster.Experiment(
    rounds=10,
    data={"name": data},
    fleet={"partition": "natural"},
    clusters={"count": 4, "participation": 0.5},
    model={"name": "logistic"},
    task={"name": "regression", "loss": pinball},
    metrics=[below],
    local={"lr": 0.1},
)

if __name__ == "__main__":
    result = fedcluster.run(experiment)
    print(f"{result.history[-1]['test_below']:.1%} of the test targets are below the predicted 90 % quantile")
