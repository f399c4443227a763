"""The partitions that `fleet.partition` can name.

A partition of your own is a function `(dataset, sizes, rng, options) -> rows`: the rows of the training set that each
device holds, one array per device. `sizes` is the number of samples that each device should hold; `options` is the
[fleet] section, with the function's own options if it has an attribute `Options`, a subclass of Section.
"""

from typing import Any

from fedcluster.data.dataset import Dataset
from fedcluster.data.partition import Ints, Partition, from_rows
from fedcluster.data.partitions.by_feature import FEATURE_SKEW
from fedcluster.data.partitions.by_label import DIRICHLET, MAJOR_CLASS, PATHOLOGICAL, SHARDS
from fedcluster.data.partitions.by_size import IID, QUANTITY
from fedcluster.data.partitions.natural import NATURAL
from fedcluster.data.partitions.regional import REGIONAL
from fedcluster.data.partitions.request import Method, Request
from fedcluster.experiment import Fleet
from fedcluster.rng import stream

PARTITIONS: dict[str, Method] = {
    "major_class": MAJOR_CLASS,
    "dirichlet": DIRICHLET,
    "iid": IID,
    "natural": NATURAL,
    "pathological": PATHOLOGICAL,
    "shards": SHARDS,
    "quantity": QUANTITY,
    "feature_skew": FEATURE_SKEW,
    "regional": REGIONAL,
}


def build(
    fleet: Fleet, dataset: Dataset, seed: int, devices: int = 0, sizes: Ints | None = None, regions: Ints | None = None
) -> Partition:
    """The partition that `fleet.partition` names. "natural" needs neither devices nor sizes: the data give them."""
    method: Any = fleet.find()
    request = Request(dataset, devices, sizes, fleet.options, seed, regions)
    if isinstance(method, Method):
        return method.function(request)
    sizes = request.given_sizes(str(fleet.partition))
    return from_rows(method(dataset, sizes, stream(seed, "partition"), fleet), dataset, devices)


def usable(fleet: Fleet, dataset: Dataset) -> Fleet:
    """The fleet with a partition that the data can have: where targets are not classes, "major_class", the default,
    gives way to the devices that the data name, or else to "iid"."""
    if fleet.partition != "major_class" or dataset.target == "class":
        return fleet
    keys = {name: value for name, value in fleet if name in Fleet.model_fields and value is not None}
    if dataset.device_train is None:
        return Fleet(**keys | {"partition": "iid"})
    kept = {name: value for name, value in keys.items() if name not in ("devices", "samples")}
    return Fleet(**kept | {"partition": "natural"})


def names_devices(fleet: Fleet) -> bool:
    """Whether the partition comes from the data, which then name the devices."""
    return fleet.find() is NATURAL
