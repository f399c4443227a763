"""The clusterings that `clusters.method` can name.

A clustering of your own is a function `(fleet, rng, options) -> assignment`: the cluster of every device, numbered from
0, or -1 for a device in no cluster; with two columns, two clusters of a device, one of which is drawn each round.
`options` is the [clusters] section. The function may declare options of its own in an attribute `Options`, a subclass
of Section, and in an attribute `needs` what it needs to know of every device: "labels", "timezone" or "availability".
"""

from fedcluster.errors import BadExperiment
from fedcluster.experiment import Clusters, format_value, import_object, options_class
from fedcluster.fleet.clustering.anticlustering import BALANCED, SIMILAR
from fedcluster.fleet.clustering.from_file import FILE
from fedcluster.fleet.clustering.major_class import MAJOR_CLASS
from fedcluster.fleet.clustering.random import RANDOM, REDRAWN
from fedcluster.fleet.clustering.request import Method, Need
from fedcluster.fleet.clustering.slots import AVAILABILITY
from fedcluster.fleet.clustering.timezone import TIMEZONE

CLUSTERINGS: dict[str, Method] = {
    "random": RANDOM,
    "redrawn": REDRAWN,
    "major_class": MAJOR_CLASS,
    "balanced": BALANCED,
    "similar": SIMILAR,
    "timezone": TIMEZONE,
    "availability": AVAILABILITY,
    "file": FILE,
}

OWN_NEEDS = ("labels", "timezone", "availability")


def find(clusters: Clusters) -> Method:
    """What `clusters.method` stands for. A function of the user's becomes a `Method`."""
    found = clusters.find()
    if isinstance(found, Method):
        return found
    if isinstance(clusters.method, str):
        import_object(clusters.method, "fleet", "rng", "options")
    own_needs = getattr(found, "needs", None)
    if own_needs is not None and own_needs not in OWN_NEEDS:
        raise BadExperiment(f"clusters.method: needs = {format_value(own_needs)} is not one of {', '.join(OWN_NEEDS)}")
    return Method(
        lambda request: found(request.fleet, request.rng, clusters), options_class(found), lambda options: own_needs
    )


def needs(clusters: Clusters) -> Need | None:
    """What the clustering needs to know of every device."""
    return find(clusters).needs(clusters.options)
