"""A data set of one's own: arrays in a `Dataset`, here two moons, with the device that holds each row."""

import numpy as np

import fedcluster

rng = np.random.default_rng(0)
y = rng.integers(2, size=1200)
angle = np.pi * (rng.random(1200) + y)
x = np.stack([np.cos(angle) + y, np.sin(angle) + y / 2], axis=1) + rng.normal(0, 0.2, (1200, 2))
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
