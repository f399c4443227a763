"""Our choices where the paper does not say what it did.

The paper says: 1000 devices of 500 samples, E = 20 steps of batch 30, a tenth of each cluster takes part, 10 random
clusters, learning rates 0.1 (CIFAR-10) and 0.05 (MNIST) for FedAvg, a tenth of those for FedCluster, 0.01 and 0.005 for
centralized SGD with 1000 iterations of batch 60 a round; momentum 0.5; Adam with 0.9, 0.999, 1e-8; FedProx with mu 0.1.
"""

from dataclasses import dataclass

NAMES = {"cifar10": "CIFAR-10", "mnist": "MNIST"}
FEDAVG_LR = {"cifar10": 0.1, "mnist": 0.05}
CENTRALIZED_LR = {"cifar10": 0.01, "mnist": 0.005}
ADAM_FACTOR = 0.01


@dataclass(frozen=True)
class Scale:
    """The size of a reproduction: the model, the rounds on each data set, and the number of seeds."""

    model: str
    rounds: dict[str, int]
    seeds: int


SCALES = {
    "quick": Scale("mlp", {"mnist": 12}, 3),
    "standard": Scale("cnn", {"mnist": 20, "cifar10": 20}, 3),
    "paper": Scale("alexnet", {"mnist": 200, "cifar10": 200}, 3),
}
MODELS = {"mlp": "MLP", "cnn": "CNN", "alexnet": "small AlexNet"}
RATES = {
    "paper": "learning rates of the paper",
    "equal": "equal learning rates",
    "tuned": "each at its best rate",
}

RATE = {
    "paper": """Learning rates for M = 5 and M = 20: FedAvg's divided by M, which is what the paper does for M = 10.
- Adam's learning rate: a hundredth of SGD's for FedAvg and, as for SGD, a tenth of that for FedCluster. At SGD's own
  rate Adam diverges.""",
    "equal": """Learning rates: not the paper's. Every curve of a panel has the one that the paper gives FedCluster with
  10 clusters; with Adam a hundredth of it.""",
    "tuned": """Learning rates: not the paper's. Every curve has its own best, by the last training loss on two other
  seeds, with a worse rate on either side. The column `lr` of the data has them.""",
}

UNSAID = """# What the paper leaves unsaid

- Model: {model}{other}.
- Rounds: {rounds}.
- Seeds: {seeds}. Fleet and start follow them; all curves of a panel have the same.
- {rate}
- Preprocessing: images are standardised by channel; the small AlexNet crops their middle 28 x 28; nothing is
  augmented.
- Batches: drawn from a device's samples with replacement. Optimizer state resets every cycle.
- The order of clusters: drawn anew in every round, as in the paper's analysis.
- The fleet for ρ_cluster: major classes are dealt out evenly to the devices; each cluster takes a share ρ_cluster of
  its devices from those of its class.
"""


def unsaid(scale: str, rates: str, seeds: int) -> str:
    """choices.md, which is written beside the figures."""
    size = SCALES[scale]
    return UNSAID.format(
        model=MODELS.get(size.model, size.model),
        other="" if size.model == "alexnet" else ", in place of the paper's small AlexNet",
        rounds=", ".join(f"{rounds} on {NAMES[data]}" for data, rounds in size.rounds.items()),
        seeds=", ".join(map(str, range(seeds))),
        rate=RATE[rates],
    )
