"""A metric of one's own: a function of the model's outputs and the targets that returns a sum and a count.

metrics.jsonl, the progress line, the plot and the tables then have `test_confidence`. A metric that is no ratio of two
sums is a class with `statistics(outputs, targets)`, a tensor of sums, and `value(sums)`.
"""

import fedcluster


def confidence(outputs, targets):  # type: ignore[no-untyped-def]
    """The mean probability that the model gives to its prediction."""
    return outputs.softmax(1).amax(1).sum(), len(targets)


experiment = fedcluster.Experiment(
    rounds=3,
    fleet={"devices": 100, "samples": 50},
    clusters={"count": 5},
    model={"name": "logistic"},
    metrics=["accuracy", confidence],
    local={"lr": 0.5},
)

if __name__ == "__main__":
    result = fedcluster.run(experiment)
    print(f"test confidence {result.history[-1]['test_confidence']:.1%}")
