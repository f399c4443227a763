"""A partition of one's own: a function (dataset, sizes, rng, options) -> the rows of the training set of each device.

Here every device holds samples of two classes only.
"""

import numpy as np

import fedcluster


def two_classes(dataset, sizes, rng, options):  # type: ignore[no-untyped-def]
    labels = dataset.y_train.numpy()
    rows = []
    for size in sizes:
        classes = rng.choice(dataset.classes, 2, replace=False)
        rows.append(rng.choice(np.flatnonzero(np.isin(labels, classes)), size, replace=False))
    return rows


experiment = fedcluster.Experiment(
    rounds=5,
    fleet={"devices": 100, "samples": 50, "partition": two_classes},
    clusters={"count": 5, "participation": 0.5},
    model={"name": "logistic"},
    local={"lr": 0.2},
)

if __name__ == "__main__":
    result = fedcluster.run(experiment)
    print(f"test accuracy {result.history[-1]['test_accuracy']:.1%}")
