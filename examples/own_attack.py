"""An attack of one's own: malicious devices send the model that they received, as if they had nothing to learn from.

`[attack]` says how many devices are malicious and where they are; a rule of `[aggregation]` may bear them.
"""

import fedcluster
from fedcluster.attacks.attack import Attack


class FreeRider(Attack):
    def forge(self, uploads, malicious, received, rng):  # type: ignore[no-untyped-def]
        return {device: {"model": received["model"]} for device in malicious}


experiment = fedcluster.Experiment(
    rounds=5,
    fleet={"devices": 100, "samples": 50},
    clusters={"count": 5, "participation": 0.5},
    model={"name": "logistic"},
    attack={"name": FreeRider, "share": 0.2},
    local={"lr": 0.5},
)

if __name__ == "__main__":
    result = fedcluster.run(experiment)
    print(f"test accuracy {result.history[-1]['test_accuracy']:.1%}")
