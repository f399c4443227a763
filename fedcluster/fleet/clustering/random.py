"""Random clusters of equal size, the same in all rounds or drawn anew in every round."""

import numpy as np

from fedcluster.fleet.clustering.request import Method, Request
from fedcluster.fleet.fleet import Ints


def random(request: Request) -> Ints:
    """Random clusters of equal size."""
    return request.rng.permutation(np.arange(len(request.fleet)) % request.clusters)


RANDOM = Method(random)
REDRAWN = Method(random, every_round=True)
