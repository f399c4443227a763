"""The attacker of a run: which devices are malicious, and the attack with its random streams."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from fedcluster.attacks.attack import Attack, Uploads
from fedcluster.data.dataset import Dataset, DataSpec
from fedcluster.errors import BadExperiment
from fedcluster.experiment import sections
from fedcluster.fleet.clustering import registry as clusterings
from fedcluster.fleet.clustering.clusters import Clusters
from fedcluster.fleet.fleet import Ints
from fedcluster.rng import stream
from fedcluster.state import Tensors


@dataclass(frozen=True, eq=False)
class Attacker:
    attack: Attack
    devices: frozenset[int]
    seed: int

    def samples(self, device: int, dataset: Dataset, rows: Ints) -> tuple[Dataset, Ints]:
        """The samples that a device trains on: a data set, and rows of it. A malicious device has its own copy."""
        if device not in self.devices or type(self.attack).poison is Attack.poison:
            return dataset, rows
        index = torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64))
        rng = stream(self.seed, "attack samples", device=device)
        x, y = self.attack.poison(dataset.x_train[index], dataset.y_train[index], rng)
        return dataset.with_fields(x_train=x, y_train=y), np.arange(len(y))

    def forge(self, uploads: Uploads, received: Tensors, round: int, cycle: int, phase: int) -> Uploads:
        """What the devices of a cohort send, given what they computed."""
        malicious = [device for device in uploads if device in self.devices]
        if not malicious:
            return uploads
        rng = partial(stream, self.seed, f"attack {phase}", round, cycle)
        return uploads | self.attack.forge(uploads, malicious, received, rng)

    @property
    def forges(self) -> bool:
        return type(self.attack).forge is not Attack.forge


def build(
    section: sections.Attack, spec: DataSpec, clusters: Clusters, options: sections.Clusters, seed: int
) -> Attacker:
    """The attacker that [attack] describes. An attack of one's own is a class that derives from `Attack`."""
    kind = section.find()
    if not isinstance(kind, type) or not issubclass(kind, Attack):
        raise BadExperiment(f"attack.name: {section.name} does not derive from fedcluster.attacks.attack.Attack")
    if section.placement == "concentrated" and clusterings.find(options).every_round:
        raise BadExperiment(
            f'attack.placement = "concentrated" needs clusters that stay the same, and clusters.method = '
            f'"{options.method}" draws new ones: use "spread"'
        )
    devices = malicious_devices(section, clusters, seed)
    return Attacker(kind(section.options, spec, section.share), devices, seed)


def malicious_devices(section: sections.Attack, clusters: Clusters, seed: int) -> frozenset[int]:
    """`share` of the devices that are in clusters. Spread: every cluster has the same number, or one more.
    Concentrated: all devices of one cluster, then of the next, until there are enough."""
    rng = stream(seed, "attack")
    members = [rng.permutation(clusters.members[K]).tolist() for K in rng.permutation(clusters.count).tolist()]
    count = round(section.share * sum(map(len, members)))
    if count < 1:
        raise BadExperiment(f"attack.share = {section.share:g} is less than one device of this fleet: raise it")
    if section.placement == "concentrated":
        order = [device for cluster in members for device in cluster]
    else:
        longest = max(map(len, members))
        order = [cluster[place] for place in range(longest) for cluster in members if place < len(cluster)]
    return frozenset(order[:count])
