"""A callback of one's own: it sees every cycle and round, and may stop the run with StopTraining."""

import fedcluster


class Watch(fedcluster.Callback):
    def on_round_end(self, line, state):  # type: ignore[no-untyped-def]
        print(f"round {line['round']}: test accuracy {line['test_accuracy']:.1%}")
        if line["test_accuracy"] > 0.95:
            raise fedcluster.StopTraining("good enough")


experiment = fedcluster.Experiment(
    rounds=5,
    fleet={"devices": 100, "samples": 50},
    clusters={"count": 5, "participation": 0.5},
    model={"name": "logistic"},
    local={"lr": 0.1},
)

if __name__ == "__main__":
    fedcluster.run(experiment, callbacks=[Watch(), fedcluster.EarlyStopping("test_loss", patience=3)])
