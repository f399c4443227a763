"""The partition that the data themselves give."""

import numpy as np

from fedcluster.data.partition import Partition, by_owner
from fedcluster.data.partitions.request import Method, Request
from fedcluster.errors import BadData


def natural(request: Request) -> Partition:
    """The devices that the data name, each with its own rows."""
    dataset = request.dataset
    if dataset.device_train is None:
        raise BadData(
            f'fleet.partition = "natural" needs to know which device holds each row of {dataset.name}: '
            "name the column in data.device, or give device_train in the .npz"
        )
    names, owner = np.unique(dataset.device_train, return_inverse=True)
    return by_owner(owner, len(names), dataset, names.astype(str))


NATURAL = Method(natural, samples=None)
