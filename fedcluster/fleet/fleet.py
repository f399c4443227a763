"""The fleet: one table of what is known of the devices. It is columnar: arrays over devices, no object per device.

The samples of each device are in a partition, see `fedcluster.data.partition`. A fleet can exist without samples, as on
the server of a federation or in `fedcluster plan`.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcluster.data.dataset import Dataset
from fedcluster.data.held_out import check_share, hold_out, test_rows
from fedcluster.data.partition import Labels, Partition
from fedcluster.data.partitions import registry as partitions
from fedcluster.errors import BadData, BadExperiment
from fedcluster.experiment import sections
from fedcluster.figures import BLUE, Plot, canvas, html_table, whole_numbers
from fedcluster.fleet import fleet_file, synthetic, traces
from fedcluster.fleet.fleet_file import DeviceTable
from fedcluster.inputs import located

Ints = NDArray[Any]  # of any width
Floats = NDArray[Any]

MOST_DEVICES = 100  # for each training sample, where devices draw samples and may share them


@dataclass(frozen=True, eq=False)
class Fleet:
    """All devices and what is known of them.

    `sizes[k]` is |D(k)|. `names` are the names of the devices if the data or a file give them; otherwise devices are
    numbered from 0. `labels` are the label counts if they are known. `known` holds the other columns: time zone,
    position, speed and availability, from a fleet file, a trace or a synthetic population. The weight of a device is
    its number of samples, limited to `cap` times that of the median device.
    """

    sizes: Ints
    names: NDArray[np.str_] | None = None
    labels: Labels | None = None
    known: DeviceTable = field(default_factory=DeviceTable)
    cap: float = np.inf

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def weights(self) -> Floats:
        """p_k = |D(k)| / |D|, after the cap."""
        sizes = capped(self.sizes, self.cap)
        return np.asarray(sizes / sizes.sum())

    @property
    def major_class(self) -> Ints:
        """The class of which each device holds the most samples."""
        return self.known_labels().major_class

    def label_counts(self, k: int) -> Ints:
        """The number of samples of each class that device k holds."""
        return self.known_labels().counts(k)

    def plot(self) -> Plot:
        """How many devices have how many samples, and which classes they hold most of, where that is known."""
        figure, (left, *more) = canvas(1 + (self.labels is not None), 4.75 * (1 + (self.labels is not None)), 3.2)
        edges = np.histogram_bin_edges(self.sizes, bins="auto" if len(np.unique(self.sizes)) > 1 else 1)
        left.hist(self.sizes, edges if len(edges) < 60 else 60, color=BLUE)
        left.set(xlabel="samples of a device", ylabel="devices")
        for ax in more:
            classes, devices = np.unique(self.major_class, return_counts=True)
            ax.bar(classes, devices, color=BLUE)
            ax.set(xlabel="class of which it holds the most", ylabel="devices")
            whole_numbers(ax.xaxis)
        return Plot(figure)

    def _repr_html_(self) -> str:
        sizes = self.sizes
        known = ", ".join(name for name in self.known.columns() if name not in ("names", "samples"))
        rows = [
            ("devices", f"{len(self):,}"),
            ("samples", f"{sizes.sum():,}"),
            ("samples of a device", f"{sizes.min():,} to {sizes.max():,}, median {np.median(sizes):,.0f}"),
            *([("also known", known)] if known else []),
        ]
        return html_table(("fleet", ""), rows) + self.plot().html("histogram of the samples of devices")

    def known_labels(self) -> Labels:
        if self.labels is None:
            raise BadData(
                "the label counts of the devices are not known: use a clustering that does not need them, or, if the "
                "targets are classes, let devices join with --tell-labels"
            )
        return self.labels


def capped(sizes: Ints, cap: float) -> Ints:
    """The sample counts after the cap of `cap` times the median."""
    return sizes if np.isinf(cap) else np.minimum(sizes, int(np.median(sizes) * cap))


def build(options: sections.Fleet, dataset: Dataset, seed: int, cap: float = np.inf) -> tuple[Fleet, Partition]:
    """The fleet that the experiment describes, and the samples of its devices.

    With `partition = "natural"`, the devices are those that the data name; otherwise a fleet file, a trace or
    `fleet.devices` says how many there are, and the partition assigns samples to them.
    """
    options = partitions.usable(options, dataset)
    if partitions.names_devices(options):
        partition = partitions.build(options, dataset, seed)
        known = device_table(options, seed, partition.names)
        check_count(options, len(partition), dataset.name)
        if known.samples is not None and (known.samples != partition.sizes).any():
            k = int(np.flatnonzero(known.samples != partition.sizes)[0])
            raise BadData(
                f"{options.path}: device {name_of(partition.names, k)} has {known.samples[k]} samples, but in "
                f"{dataset.name} it has {partition.sizes[k]}: leave out the column"
            )
        if dataset.device_test is not None:
            partition = test_rows(partition, dataset)
        else:
            check_share(partition.sizes, options.test_share)
            partition = hold_out(partition, options.test_share, dataset, seed)
        return Fleet(partition.sizes, partition.names, partition.labels, known, cap), partition
    known = device_table(options, seed)
    devices = next((len(column) for column in known.columns().values()), options.devices)
    if known.availability is not None:
        devices = len(known.availability)
    assert devices is not None, "the experiment fills it in"
    check_count(options, devices, options.path or options.availability)
    check_rows(options, devices, dataset)
    sizes = known.samples
    if sizes is None and options.samples != "all":
        sizes = np.full(devices, options.samples)
    partition = partitions.build(options, dataset, seed, devices, sizes, known.utc_offset)
    check_share(partition.sizes, options.test_share)
    partition = hold_out(partition, options.test_share, dataset, seed)
    return Fleet(partition.sizes, known.names, partition.labels, known, cap), partition


def device_table(options: sections.Fleet, seed: int, names: Any = None) -> DeviceTable:
    """The columns of a fleet file, a trace or a synthetic population, in the order of `names` if the data name the
    devices."""
    date = options.date
    if options.world == "diurnal":
        count = options.devices if names is None else len(names)
        assert count is not None, "the experiment fills it in"
        return synthetic.diurnal(count, seed, date)
    known = DeviceTable()
    if options.path is not None:
        known, table = fleet_file.read(located(options.path, "fleet.path"), date)
        if names is not None:
            known = known.rows(matching_rows(known, table, names))
        names = known.names if known.names is not None else np.arange(len(table)).astype(str)
    if options.availability is not None:
        trace = traces.read(located(options.availability, "fleet.availability"), date, options.trace_format)
        if names is None:
            known = DeviceTable(names=np.array(trace.names))
            names = trace.names
        known = replace(known, availability=trace.of(map(str, names)))
    return known


def matching_rows(known: DeviceTable, table: Any, names: Any) -> Ints:
    """The row in the fleet file of each device that the data name. The file must name the same devices."""
    if known.names is None:
        raise BadData(f'{table.path} needs a column device: with fleet.partition = "natural" the data name the devices')
    number = {str(name): k for k, name in enumerate(names)}
    rows = np.full(len(number), -1)
    for row, name in enumerate(known.names.tolist()):
        if name not in number:
            table.refuse(row, f"the data have no device {name!r}")
        rows[number[name]] = row
    if (rows < 0).any():
        raise BadData(f"{table.path}: device {names[int(np.argmin(rows))]} of the data has no row")
    return rows


def check_count(options: sections.Fleet, devices: int, source: Any) -> None:
    if options.devices not in (None, devices):
        raise BadExperiment(f"fleet.devices = {options.devices}, but {source} names {devices}: leave it out")


def check_rows(options: sections.Fleet, devices: int, dataset: Dataset) -> None:
    """Refuse a fleet so much larger than the data that its devices would hold little but copies."""
    rows = len(dataset.y_train)
    if devices > MOST_DEVICES * rows:
        named = options.path or options.availability
        given = f"fleet.devices = {devices:,}" if named is None else f"{named} names {devices:,} devices"
        raise BadExperiment(
            f"{given}, but {dataset.name} has {rows:,} training samples: at most {MOST_DEVICES} devices for each, "
            f"{MOST_DEVICES * rows:,}, can share them"
        )


def name_of(names: Any, k: int) -> str:
    """The name of device k: its own name if it has one, else its number."""
    return str(names[k]) if names is not None and k < len(names) else str(k)
