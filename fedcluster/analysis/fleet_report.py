"""A report on the fleet and its clusters before training: `fedcluster partition`."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcluster.experiment import Experiment
from fedcluster.figures import Plot, canvas, heat, html_table
from fedcluster.files import write_atomically
from fedcluster.fleet import fleet as fleets
from fedcluster.fleet.clustering.clusters import Clusters
from fedcluster.fleet.fleet import Ints
from fedcluster.runs.progress import Display, default_display
from fedcluster.training.open_data import open_data
from fedcluster.training.setup import build_clusters, build_fleet

MOST_ROWS = 30  # clusters in a notebook's table
MAX_SHOWN = 2000  # devices in the plot; of a larger fleet an even sample


@dataclass(frozen=True)
class FleetReport:
    """`label_counts[k, c]` is the number of samples of class c that device k holds; where targets are not classes,
    [devices, 0]."""

    fleet: fleets.Fleet
    clusters: Clusters
    label_counts: NDArray[np.int64]

    @property
    def labelled(self) -> bool:
        """Whether targets are classes."""
        return bool(self.label_counts.shape[1])

    def cluster_label_shares(self) -> NDArray[np.float64]:
        """The share of each class in the samples of each cluster, [M, classes]."""
        totals = np.array([self.label_counts[members].sum(axis=0) for members in self.clusters.members])
        shares: NDArray[np.float64] = totals / np.maximum(totals.sum(axis=1, keepdims=True), 1)
        return shares

    def plot(self) -> Plot:
        """The label shares of devices and clusters, where targets are classes, and the weights p_k and q_K."""
        return plot(self)

    def __repr__(self) -> str:
        return f"FleetReport({len(self.fleet):,} devices in {self.clusters.count:,} clusters)"

    def _repr_html_(self) -> str:
        rows = [
            (str(K), f"{len(members):,}", f"{self.fleet.sizes[members].sum():,}", f"{weight:.2%}")
            for K, (members, weight) in enumerate(
                zip(self.clusters.members, self.clusters.weights(self.fleet), strict=True)
            )
        ]
        header = "cluster", "devices", "samples", "weight q_K"
        left = [("...", "", "", "")] if len(rows) > MOST_ROWS else []
        return html_table(header, rows[:MOST_ROWS] + left) + self.plot().html("label shares and weights")

    def name(self, k: int) -> str:
        return fleets.name_of(self.fleet.names, k)


def partition(experiment: Experiment, display: Display | None = None) -> FleetReport:
    """The fleet of an experiment and its clusters, before anything is trained."""
    display = display or default_display()
    dataset, _ = open_data(experiment, display.say)
    fleet, partition, dataset = build_fleet(experiment, dataset, display.say)
    clusters = build_clusters(experiment, dataset, fleet, partition, display.say, display.track)
    counts = np.empty((len(fleet), dataset.classes), np.int64)
    if dataset.classes:
        for k in display.track(range(len(fleet)), "label counts", "devices"):
            counts[k] = partition.label_counts(k)
    return FleetReport(fleet, clusters, counts)


def write(report: FleetReport, out: Path) -> list[Path]:
    """Write devices.csv (everything per device), clusters.csv (input of clusters.method = "file") and the plot."""
    out.mkdir(parents=True, exist_ok=True)
    devices, weights = report.fleet, report.fleet.weights
    assignment = cluster_names(report.clusters.assignment)
    rows = [[report.name(k), assignment[k], devices.sizes[k], weights[k]] for k in range(len(devices))]
    columns = ["device", "cluster", "samples", "p_k"]
    if report.labelled:
        columns += ["major_class", *(f"class_{c}" for c in range(report.label_counts.shape[1]))]
        rows = [[*row, devices.major_class[k], *report.label_counts[k]] for k, row in enumerate(rows)]
    table(out / "devices.csv", columns, rows)
    clusters_table(out / "clusters.csv", report.clusters, [row[0] for row in rows])
    plot(report).save(out / "partition.png")
    return [out / name for name in ("devices.csv", "clusters.csv", "partition.png")]


def clusters_table(path: Path, clusters: Clusters, names: list[Any]) -> None:
    """Write the assignment as a file that clusters.method = "file" reads."""
    columns = [clusters.assignment] if clusters.second is None else [clusters.assignment, clusters.second]
    header = ["device", "cluster", "second"][: len(columns) + 1]
    table(path, header, zip(names, *map(cluster_names, columns), strict=True))


def cluster_names(assignment: Ints) -> list[str]:
    """The number of each device's cluster as text, or "none"."""
    words = [*map(str, range(int(assignment.max()) + 1)), "none"]  # the last is at -1
    return [words[cluster] for cluster in assignment.tolist()]


def table(path: Path, header: list[str], rows: Iterable[Sequence[Any]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    write_atomically(path, text.getvalue())


def plot(report: FleetReport) -> Plot:
    """The label shares of devices and clusters, where targets are classes, and the weights p_k and q_K."""
    figure, axes = canvas(4 if report.labelled else 2, 16 if report.labelled else 8, 4.2)
    fleet, clusters, (sizes, right) = report.fleet, report.clusters, axes[-2:]
    if report.labelled:
        plot_labels(report, *axes[:2])
    plot_weights(sizes, fleet.weights)
    sizes.set(title="weight of each device", xlabel="$p_k$ (dashed: equal weights)", ylabel="devices")
    right.bar(range(clusters.count), clusters.weights(fleet), color="#0072B2")
    right.axhline(1 / clusters.count, color="#5A5A5A", lw=1, ls="--")
    right.set(title="weight of each cluster", xlabel="cluster", ylabel="$q_K$ (dashed: equal weights)")
    if clusters.count <= 20:
        right.set_xticks(range(clusters.count))
    return Plot(figure)


def plot_weights(ax: Any, weights: Any) -> None:
    """How many devices have which weight p_k, from 0 on, so that equal weights look equal."""
    ax.hist(weights, bins=np.linspace(0, 1.1 * weights.max(), 42), color="#0072B2")
    ax.axvline(1 / len(weights), color="#5A5A5A", lw=1, ls="--")
    ax.set_xlim(0, 1.1 * weights.max())
    ax.xaxis.get_major_locator().set_params(nbins=5)


def plot_labels(report: FleetReport, left: Any, middle: Any) -> None:
    """The label shares of devices and of clusters."""
    fleet, clusters = report.fleet, report.clusters
    shown = np.linspace(0, len(fleet) - 1, min(MAX_SHOWN, len(fleet))).astype(int)
    shown = shown[np.argsort(fleet.major_class[shown], kind="stable")]
    heat(
        left,
        report.label_counts[shown] / report.label_counts[shown].sum(axis=1, keepdims=True),
        "share of the device's samples",
    )
    left.set(title="devices, by major class", xlabel="class", ylabel=f"{len(shown):,} of {len(fleet):,} devices")
    heat(middle, report.cluster_label_shares(), "share of the cluster's samples")
    middle.set(title="clusters", xlabel="class", ylabel="cluster")
    for ax in (left, middle):
        ax.set_xticks(range(report.label_counts.shape[1]) if report.label_counts.shape[1] <= 20 else [])
    if clusters.count <= 20:
        middle.set_yticks(range(clusters.count))
