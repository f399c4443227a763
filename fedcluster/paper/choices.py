"""What the paper leaves unsaid, chosen once.

The paper says: 1000 devices of 500 samples, E = 20 steps of batch 30, a tenth of each cluster takes part, 10 random
clusters, learning rates 0.1 (CIFAR-10) and 0.05 (MNIST) for FedAvg, a tenth of those for FedCluster, 0.01 and 0.005 for
centralized SGD with 1000 iterations of batch 60 a round; momentum 0.5; Adam with 0.9, 0.999, 1e-8; FedProx with mu 0.1.
"""

from dataclasses import dataclass

FEDAVG_LR = {"cifar10": 0.1, "mnist": 0.05}
CENTRALIZED_LR = {"cifar10": 0.01, "mnist": 0.005}

# Unsaid: the rates for M = 5 and 20. We divide FedAvg's by M, which is what the paper does for M = 10.
# Unsaid: Adam's rate. A hundredth of SGD's for FedAvg, and as for SGD a tenth of that for FedCluster: at SGD's own rate
# Adam diverges.
ADAM_FACTOR = 0.01
# Unsaid: the number of seeds and of rounds, see the scales. Seeds are 0, 1, 2, ...; fleet and start follow them.
# Unsaid: preprocessing. Pictures are standardised by channel; the small AlexNet crops their middle 28 x 28; nothing is
# augmented. Batches are drawn with replacement.
# Unsaid: the order of clusters. It is drawn anew in every round, as in the paper's analysis.
# Unsaid: rho_cluster's fleet. Major classes are dealt out evenly; each cluster takes a share rho_cluster of its devices
# from those of its class.


@dataclass(frozen=True)
class Scale:
    """How much of it: which model, how many rounds and seeds, on which data."""

    model: str
    rounds: dict[str, int]
    seeds: int


SCALES = {
    "quick": Scale("mlp", {"mnist": 12}, 3),
    "standard": Scale("cnn", {"mnist": 20, "cifar10": 20}, 3),
    "paper": Scale("alexnet", {"mnist": 200, "cifar10": 200}, 3),
}
