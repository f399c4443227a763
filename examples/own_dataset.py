"""A data set of one's own: arrays in a `Dataset`, here two moons, with the device that holds each row."""

import numpy as np
from sklearn.datasets import make_moons

import fedcluster

x, y = make_moons(1200, noise=0.2, random_state=0)
device = (x[:1000, 0] * 10).astype(int)  # devices see different regions of the plane
moons = fedcluster.Dataset(x[:1000], y[:1000], x[1000:], y[1000:], device_train=device, name="moons")

experiment = fedcluster.Experiment(
    rounds=20,
    data={"name": moons},
    fleet={"partition": "natural"},
    clusters={"count": 4, "participation": 0.5},
    model={"name": "mlp"},
    local={"lr": 0.1},
)

if __name__ == "__main__":
    result = fedcluster.run(experiment)
    print(f"{len(np.unique(device))} devices, test accuracy {result.history[-1]['test_accuracy']:.1%}")
