"""A task of one's own: an autoencoder, whose targets are the samples themselves. The labels are not used."""

from torch import nn

import fedcluster
from fedcluster.models.tasks import Task


class Reconstruction(Task):
    target = "class"  # what the data have, though it is not used
    metrics = ()

    def batch(self, x, y):  # type: ignore[no-untyped-def]
        return x, x

    def output_shape(self, spec):  # type: ignore[no-untyped-def]
        return spec.shape

    def loss(self, outputs, targets):  # type: ignore[no-untyped-def]
        return nn.functional.mse_loss(outputs, targets)


def autoencoder(shape, outputs):  # type: ignore[no-untyped-def]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 64), nn.Unflatten(1, shape))


experiment = fedcluster.Experiment(
    rounds=5,
    fleet={"devices": 100, "samples": 50},
    clusters={"count": 5},
    model={"name": autoencoder},
    task={"name": Reconstruction},
    local={"lr": 0.5},
)

if __name__ == "__main__":
    result = fedcluster.run(experiment)
    print(f"test loss {result.history[-1]['test_loss']:.4f}")
