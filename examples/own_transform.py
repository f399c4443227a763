"""An update transform of one's own: each device clips its update to a norm of 1 and adds noise before it is sent.

`rng` is a stream of its own for every device and cycle, so that the run is repeatable. This is not yet differential
privacy: nothing accounts for what is spent.
"""

import torch

import fedcluster


class ClipAndNoise(fedcluster.UpdateTransform):
    def on_device(self, upload, received, rng):  # type: ignore[no-untyped-def]
        movement = upload["model"] - received["model"]
        movement *= min(1.0, 1.0 / float(movement.norm()))
        noise = torch.from_numpy(rng.normal(0.0, 0.001, len(movement))).to(movement)
        return upload | {"model": received["model"] + movement + noise}


experiment = fedcluster.Experiment(
    rounds=3,
    fleet={"devices": 100, "samples": 50},
    clusters={"count": 5},
    model={"name": "logistic"},
    transforms=[ClipAndNoise()],
    local={"lr": 0.5},
)

if __name__ == "__main__":
    result = fedcluster.run(experiment)
    print(f"test accuracy {result.history[-1]['test_accuracy']:.1%}")
