"""A model of one's own: a function (shape of a sample, number of outputs) -> torch module."""

from torch import nn

import fedcluster


def small_cnn(shape: tuple[int, ...], outputs: int) -> nn.Module:
    channels, height, width = shape
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * height * width, outputs)
    )


experiment = fedcluster.Experiment(
    rounds=3,
    fleet={"devices": 100, "samples": 50},
    clusters={"count": 5},
    model={"name": small_cnn},
    local={"lr": 0.1},
)

if __name__ == "__main__":
    result = fedcluster.run(experiment)
    print(f"test accuracy {result.history[-1]['test_accuracy']:.1%}, {result.model}")
