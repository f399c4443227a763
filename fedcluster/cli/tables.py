"""What commands print: tables that line up, and sentences."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from fedcluster.analysis.compare import Comparison
    from fedcluster.analysis.fleet_report import FleetReport
    from fedcluster.analysis.plan import Plan


def outcomes_table(result: Comparison) -> Table:
    from fedcluster.models.tasks import recorded_metrics
    from fedcluster.runs.plots import LABELS, X

    what = X[result.x][0] if result.x in ("time", "bytes") else result.x
    metrics = recorded_metrics(result.outcomes[0].histories[0][-1])
    columns = ["method", "M", "rate", "train loss", *(f"test {metric.label}" for metric in metrics)]
    columns += [f"{what} to loss {result.target:.3f}"]
    rows = []
    for outcome in result.outcomes:
        loss = outcome.final("train_loss")
        last = outcome.histories[0][-1]
        rows.append(
            [
                LABELS[outcome.method],
                str(outcome.clusters) if outcome.method != "centralized" else "-",
                f"{outcome.lr:g}",
                f"{loss[0]:.4f} ± {loss[1]:.4f}",
                *(" ± ".join(map(metric.text, outcome.final(f"test_{metric.name}"))) for metric in metrics),
                reached(outcome.reach(result.target, result.x), X[result.x][1](last)),
                f"{last['device_updates']:,}",
                f"{last['bytes_up'] / 1e6:,.0f} MB",
                f"{last['bytes_down'] / 1e6:,.0f} MB",
            ]
        )
    return ruled([*columns, "device updates", "up", "down"], rows)


def test_scores(line: dict[str, Any]) -> str:
    """The metrics of a line, each followed by a comma."""
    from fedcluster.models.tasks import recorded_metrics

    return "".join(
        f"test {metric.label} {metric.text(line[f'test_{metric.name}'])}, " for metric in recorded_metrics(line)
    )


def reached(spent: list[float | None], last: float) -> str:
    """What was spent by seed in one cell: the mean, or how many seeds never got there. Nothing is ever spent where
    nothing travels."""
    there = [n for n in spent if n is not None]
    if last == 0:
        return "-"
    if len(there) < len(spent):
        return f"> {last:,.6g} in {len(spent) - len(there)} of {len(spent)}"
    return f"{fmean(there):,.1f}"


def verdict(result: Comparison) -> list[str]:
    """FedCluster against FedAvg, in a sentence."""
    found = {outcome.method: outcome for outcome in result.outcomes}
    if not {"fedavg", "fedcluster"} <= found.keys():
        return []
    loss, _ = found["fedavg"].final("train_loss")
    rounds = found["fedcluster"].rounds_to(loss)
    last = found["fedavg"].histories[0][-1]["round"]
    spent = {m: sum(lines[-1]["device_updates"] for lines in found[m].histories) for m in ("fedavg", "fedcluster")}
    unequal = (
        f"The budgets differ: FedAvg had {spent['fedavg']:,} device updates over all seeds, FedCluster "
        f"{spent['fedcluster']:,}."
    )
    return [unequal] * (spent["fedavg"] != spent["fedcluster"]) + [
        f"FedCluster reached FedAvg's last training loss ({loss:.4f}, after {last} rounds) in rounds: "
        + ", ".join("never" if n is None else str(n) for n in rounds)
        + " (by seed)"
    ]


def plan_table(found: Plan) -> Table:
    rows = []
    for K, (members, ends) in enumerate(zip(found.clusters.members, found.offsets, strict=True)):
        row = [str(K), f"{len(members):,}"]
        if found.slots is not None and found.coverage is not None:
            row += [f"{clock_time(found.slots[K][0])} - {clock_time(found.slots[K][1])}", f"{found.coverage[K]:.1%}"]
        elif ends is not None:
            row += [f"{ends[0]:+g} to {ends[1]:+g}"]
        rows.append(row)
    more = ["UTC offsets, h"] if found.slots is None else ["slot, UTC", "free long enough in it"]
    return ruled(["cluster", "devices", *more], rows)


def clock_time(hours: float) -> str:
    minutes = round(hours * 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}"


def devices_table(found: FleetReport) -> Table:
    sizes, weights = found.fleet.sizes, found.fleet.weights
    top = found.label_counts.max(axis=1) / found.label_counts.sum(axis=1)
    rows = [
        [name, *(f"{value:.4g}" for value in (column.min(), column.mean(), column.max()))]
        for name, column in (("samples", sizes), ("p_k", weights), ("share of the largest class", top))
    ]
    return ruled([f"{len(sizes):,} devices", "least", "mean", "most"], rows)


def clusters_table(found: FleetReport) -> Table:
    groups, mix = found.clusters, found.cluster_label_shares()
    shown = min(mix.shape[1], 10)
    rows = [
        [
            str(K),
            f"{len(members):,}",
            f"{found.fleet.sizes[members].sum():,}",
            f"{q:.4f}",
            *(f"{x:.1%}" for x in mix[K][:shown]),
        ]
        for K, (members, q) in enumerate(zip(groups.members, groups.weights(found.fleet), strict=True))
    ]
    return ruled(["cluster", "devices", "samples", "q_K", *(f"class {c}" for c in range(shown))], rows)


def ruled(columns: list[str], rows: list[list[str]], left: int = 1) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def show(table: Table) -> None:
    """Never wrapped: a table that is wider than the terminal keeps its lines."""
    console = Console(highlight=False)
    console.width = max(console.width, console.measure(table, options=console.options.update(max_width=400)).maximum)
    console.print(table)
