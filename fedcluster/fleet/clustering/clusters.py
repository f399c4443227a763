"""The clusters: which devices take part in the same cycle. The clusterings that make them are in `registry`."""

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

import numpy as np

from fedcluster.errors import BadExperiment
from fedcluster.experiment import sections
from fedcluster.figures import BLUE, Plot, canvas, html_table, whole_numbers
from fedcluster.fleet.clustering import registry
from fedcluster.fleet.clustering.request import Request
from fedcluster.fleet.fleet import Fleet, Floats, Ints
from fedcluster.rng import stream

UNEQUAL = 0.1  # relative difference between q_K and 1/M that is reported


@dataclass(frozen=True, eq=False)
class Clusters:
    """S_1..S_M as an assignment: every device in one cluster, or in none (-1), and no cluster empty. Where there is a
    `second` assignment, a device is in one of the two in every round."""

    assignment: Ints
    count: int
    second: Ints | None = None

    @cached_property
    def members(self) -> list[Ints]:
        """The devices of each cluster, in ascending order."""
        return self.split(self.assignment)

    def members_in(self, round: int, seed: int) -> list[Ints]:
        """The same in this round, where devices may sit in two clusters."""
        if self.second is None:
            return self.members
        heads = stream(seed, "soft", round).random(len(self.assignment)) < 0.5
        return self.split(np.where(heads, self.assignment, self.second))

    def split(self, assignment: Ints) -> list[Ints]:
        order = np.argsort(assignment, kind="stable")
        ends = np.cumsum(np.bincount(assignment + 1, minlength=self.count + 1))
        return np.split(order, ends[:-1])[1:]

    def plot(self) -> Plot:
        """The number of devices in each cluster."""
        figure, (ax,) = canvas(1, 4.75, 3.2)
        ax.bar(range(self.count), [len(devices) for devices in self.members], color=BLUE)
        ax.set(xlabel="cluster", ylabel="devices")
        whole_numbers(ax.xaxis)
        return Plot(figure)

    def _repr_html_(self) -> str:
        sizes = [len(devices) for devices in self.members]
        rows = [
            ("clusters", f"{self.count:,}"),
            ("devices of a cluster", f"{min(sizes):,} to {max(sizes):,}"),
            *([("devices in no cluster", f"{self.left_out():,}")] if self.left_out() else []),
        ]
        return html_table(("clusters", ""), rows) + self.plot().html("the number of devices in each cluster")

    def left_out(self) -> int:
        """How many devices are in no cluster."""
        return int((self.assignment < 0).sum())

    def digest(self) -> str:
        """A fingerprint, so that a resumed run can tell that its clusters are the same."""
        second = b"" if self.second is None else self.second.tobytes()
        return sha256(self.assignment.tobytes() + second).hexdigest()

    def weights(self, fleet: Fleet) -> Floats:
        """q_K = sum of p_k over the cluster."""
        return np.bincount(self.assignment + 1, weights=fleet.weights, minlength=self.count + 1)[1:]

    def inequality(self, fleet: Fleet, counted: str = "samples") -> str | None:
        """One sentence on unequal clusters, where a q_K differs from 1/M by more than a tenth of it. `counted` names
        what the fleet's weights count. A device in two clusters counts half in each."""
        share = self.weights(fleet)
        if self.second is not None:
            share = (share + Clusters(self.second, self.count).weights(fleet)) / 2
        share /= share.sum()  # devices may be in no cluster
        if np.abs(share * self.count - 1).max() <= UNEQUAL:
            return None
        return (
            f"Clusters hold from {share.min():.2%} to {share.max():.2%} of the {counted}, but every cycle takes a full "
            "step whatever the size of its cluster: training minimises the mean loss over clusters, not over samples. "
            f"The theorem needs clusters of equal weight, q_K = 1/M = {1 / self.count:.2%}. "
            'clusters.weighting = "sample" multiplies the learning rate by M q_K, here '
            f"{self.count * share.min():.2g} to {self.count * share.max():.2g}, which minimises the mean over samples; "
            "large factors need a lower rate."
        )


def build(
    options: sections.Clusters, fleet: Fleet, seed: int, sketches: Floats | None = None, round: int = 0
) -> Clusters:
    """The clusters that the experiment describes, checked. `sketches` of the devices' gradients, one row each, are for
    a clustering that needs them. The clusters depend on the round only if they are drawn anew in every round."""
    if options.count is not None and options.count > len(fleet):
        raise BadExperiment(
            f"clusters.count = {options.count} is more than the fleet's {len(fleet)} devices: use fewer clusters"
        )
    method = registry.find(options)
    request = Request(fleet, options.count, options.options, stream(seed, "clusters", round), sketches)
    given = np.asarray(method.function(request))
    if given.shape not in ((len(fleet),), (len(fleet), 2)) or given.dtype.kind not in "iu" or given.min() < -1:
        raise BadExperiment(
            f"the clustering must give each of the {len(fleet)} devices a whole number from 0 (or -1: in no cluster), "
            f"but gave {given.dtype} {list(given.shape)}"
        )
    assignment, second = (given, None) if given.ndim == 1 else (given[:, 0], given[:, 1])
    if second is not None and (second.max() > assignment.max() or ((assignment < 0) != (second < 0)).any()):
        raise BadExperiment(
            "the clustering gives a device a second cluster that is no device's first, or only one of two"
        )
    count = options.count or int(assignment.max()) + 1
    if method.at_most:
        count = min(count, int(assignment.max()) + 1)
    if assignment.max() >= count:
        raise BadExperiment(
            f"clusters.count = {count}, but a device is in cluster {assignment.max()} (they start at 0)"
        )
    sizes = np.bincount(assignment + 1, minlength=count + 1)[1:]
    if not sizes.all():
        raise BadExperiment(
            f"cluster {sizes.argmin()} of {count} is empty: give it a device, renumber the clusters, "
            "or lower clusters.count"
        )
    return from_assignment(given, count)


def from_assignment(given: Ints, count: int | None = None) -> Clusters:
    """Clusters from an assignment of one column or two."""
    columns = given.astype(np.int32)
    first, second = (columns, None) if given.ndim == 1 else (columns[:, 0].copy(), columns[:, 1].copy())
    return Clusters(first, int(first.max()) + 1 if count is None else count, second)
