"""What commands print: tables that line up, and sentences."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from fedcluster.algorithms.registry import Entry
    from fedcluster.analysis.compare import Comparison
    from fedcluster.analysis.evaluate import Evaluation
    from fedcluster.analysis.fleet_report import FleetReport
    from fedcluster.analysis.plan import Plan

WIDEST = 400  # characters of a line
FEW = 4  # rows that may become columns


def outcomes_table(result: Comparison) -> Grid:
    from fedcluster.models.metrics import recorded_metrics
    from fedcluster.runs.plots import LABELS, X

    what = X[result.x][0] if result.x in ("time", "bytes") else result.x
    metrics = recorded_metrics(result.outcomes[0].histories[0][-1])
    columns = ["method", "M", "rate", "train loss", *(f"test {metric.label}" for metric in metrics)]
    columns += [f"{what} to loss {result.target:.3f}"]
    rows = []
    for outcome in result.outcomes:
        loss = outcome.final("train_loss")
        last, seeds = outcome.histories[0][-1], len(outcome.histories)
        rows.append(
            [
                LABELS[outcome.method],
                str(outcome.clusters) if outcome.method != "centralized" else "-",
                f"{outcome.lr:g}",
                spread_text([f"{number:.4f}" for number in loss], seeds),
                *(
                    spread_text([metric.text(number) for number in outcome.final(f"test_{metric.name}")], seeds)
                    for metric in metrics
                ),
                reached(outcome.reach(result.target, result.x), X[result.x][1](last)),
                f"{last['device_updates']:,}",
                size_text(last["bytes_up"]),
                size_text(last["bytes_down"]),
            ]
        )
    return ruled([*columns, "device updates", "up", "down"], rows)


def spread_text(mean_and_deviation: list[str], seeds: int) -> str:
    """The mean over seeds, and the deviation where there are several."""
    return " ± ".join(mean_and_deviation if seeds > 1 else mean_and_deviation[:1])


def size_text(count: float) -> str:
    """A number of bytes, in the largest unit of which there is at least one."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:,.0f} {unit}"


def test_scores(line: dict[str, Any]) -> str:
    """The metrics of a line, each followed by a comma."""
    from fedcluster.models.metrics import recorded_metrics

    return "".join(
        f"test {metric.label} {metric.text(line[f'test_{metric.name}'])}, " for metric in recorded_metrics(line)
    )


def reached(spent: list[float | None], last: float) -> str:
    """The mean over seeds of what was spent to reach the target, or the number of seeds that never reached it."""
    there = [n for n in spent if n is not None]
    if last == 0:
        return "-"
    if len(there) < len(spent):
        return f"> {last:,.6g} in {len(spent) - len(there)} of {len(spent)}"
    return f"{fmean(there):,.1f}"


def verdict(result: Comparison) -> list[str]:
    """FedCluster against FedAvg, in a sentence."""
    by_method = {outcome.method: outcome for outcome in result.outcomes}
    if not {"fedavg", "fedcluster"} <= by_method.keys():
        return []
    loss, _ = by_method["fedavg"].final("train_loss")
    rounds = by_method["fedcluster"].rounds_to(loss)
    last = by_method["fedavg"].histories[0][-1]["round"]
    spent = {m: sum(lines[-1]["device_updates"] for lines in by_method[m].histories) for m in ("fedavg", "fedcluster")}
    unequal = (
        f"The budgets differ: FedAvg had {spent['fedavg']:,} device updates over all seeds, FedCluster "
        f"{spent['fedcluster']:,}; compare them over updates (--x updates)."
    )
    return [unequal] * (spent["fedavg"] != spent["fedcluster"]) + [
        f"FedCluster reached FedAvg's last training loss ({loss:.4f}, after {last} rounds) in rounds: "
        + ", ".join("never" if n is None else str(n) for n in rounds)
        + " (by seed)"
    ]


def plan_table(plan: Plan) -> Grid:
    rows = []
    for K, (members, ends) in enumerate(zip(plan.clusters.members, plan.offsets, strict=True)):
        row = [str(K), f"{len(members):,}"]
        if plan.slots is not None and plan.coverage is not None:
            row += [f"{clock_time(plan.slots[K][0])} - {clock_time(plan.slots[K][1])}", f"{plan.coverage[K]:.1%}"]
        elif ends is not None:
            row += [f"{ends[0]:+g} to {ends[1]:+g}"]
        rows.append(row)
    more = ["UTC offsets, h"] if plan.slots is None else ["slot, UTC", "free long enough in it"]
    return ruled(["cluster", "devices", *more], rows)


def clock_time(hours: float) -> str:
    minutes = round(hours * 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}"


def devices_table(report: FleetReport) -> Grid:
    sizes, weights = report.fleet.sizes, report.fleet.weights
    columns = {"samples": sizes, "p_k": weights}
    if report.labelled:
        columns["share of the largest class"] = report.label_counts.max(axis=1) / report.label_counts.sum(axis=1)
    rows = [
        [name, *(f"{value:.4g}" for value in (column.min(), column.mean(), column.max()))]
        for name, column in columns.items()
    ]
    return ruled([f"{len(sizes):,} devices", "least", "mean", "most"], rows)


def clusters_table(report: FleetReport) -> Grid:
    """The clusters, and the percentage of each class (of the first ten) in their samples."""
    clusters, label_shares = report.clusters, report.cluster_label_shares()
    shown = min(label_shares.shape[1], 10)
    rows = [
        [
            str(K),
            f"{len(members):,}",
            f"{report.fleet.sizes[members].sum():,}",
            f"{q:.4f}",
            *(f"{100 * x:.0f}" for x in label_shares[K][:shown]),
        ]
        for K, (members, q) in enumerate(zip(clusters.members, clusters.weights(report.fleet), strict=True))
    ]
    return ruled(["cluster", "devices", "samples", "q_K", *(f"% {c}" for c in range(shown))], rows)


def algorithms_table(entries: list[Entry]) -> Grid:
    columns = ["algorithm.name", "options", "server keeps", "device keeps", "messages", "downloads", "uploads"]
    rows = [
        [
            entry.name,
            listed(entry.options),
            listed(entry.server_keeps),
            listed(entry.device_keeps),
            f"{len(entry.down)} down, {len(entry.up)} up",
            " then ".join(map(listed, entry.down)),
            " then ".join(map(listed, entry.up)),
            listed(entry.optimizers),
        ]
        for entry in entries
    ]
    return ruled([*columns, "optimizer"], rows, left=len(columns) + 1)


def listed(names: list[str]) -> str:
    return ", ".join(names) or "-"


def scores_table(evaluation: Evaluation) -> Grid:
    rows = [["loss", f"{evaluation.scores['loss']:.4f}"]]
    rows += [[metric.label, metric.text(evaluation.scores[metric.name])] for metric in evaluation.shown()]
    return ruled(["score", "value"], rows)


def distribution_table(evaluation: Evaluation) -> Grid:
    """How scores are distributed over devices."""
    rows = []
    for name, text in evaluation.texts().items():
        spread = evaluation.summary[name]
        variance = "-" if spread["variance"] is None else f"{spread['variance']:.4g}"
        rows.append([name.replace("_", " "), text(spread["mean"]), text(spread["worst_decile"]), variance])
    return ruled([f"{evaluation.summary['devices']:,} devices", "mean", "worst decile", "variance"], rows)


def cluster_scores_table(evaluation: Evaluation) -> Grid:
    """The mean scores of each cluster's devices."""
    texts = evaluation.texts()
    rows = [
        [
            str(one["cluster"]) if one["cluster"] >= 0 else "none",
            f"{one['devices']:,}",
            *(text(one[name]) for name, text in texts.items()),
        ]
        for one in evaluation.summary["clusters"]
    ]
    return ruled(["cluster", "devices", *(f"mean {name.replace('_', ' ')}" for name in texts)], rows)


@dataclass(frozen=True)
class Grid:
    """The cells of a table. The first `left` columns are aligned to the left."""

    columns: list[str]
    rows: list[list[str]]
    left: int = 1

    def render(self, space: int = 1) -> Table:
        """With this much space on either side of a cell."""
        table = Table(box=box.SIMPLE_HEAD, padding=(0, space), collapse_padding=space == 0, pad_edge=space > 0)
        for number, name in enumerate(self.columns):
            table.add_column(name, justify="left" if number < self.left else "right", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        return table

    def transposed(self) -> Grid:
        """A column for each row, for a few rows with many cells."""
        columns, *rows = zip(self.columns, *self.rows, strict=True)
        return Grid(list(columns), [list(row) for row in rows])

    def part(self, chosen: list[int]) -> Grid:
        """The first column and the chosen ones."""
        at = [0, *chosen]
        left = sum(number < self.left for number in at)
        return Grid([self.columns[n] for n in at], [[row[n] for n in at] for row in self.rows], left)


def ruled(columns: list[str], rows: list[list[str]], left: int = 1) -> Grid:
    return Grid(columns, rows, left)


def show(grid: Grid) -> None:
    """Print a table so that it fits the terminal: with less space, a few rows as columns, or in several tables of some
    columns each. In a file or a pipe, which have no width, a row stays a line."""
    console = Console(highlight=False)
    limit = console.width if console.is_terminal or "COLUMNS" in os.environ else WIDEST

    def width(table: Table) -> int:
        return console.measure(table, options=console.options.update(max_width=WIDEST)).maximum

    forms = [grid.render(), grid.render(space=0)]
    if len(grid.rows) <= FEW:
        forms.append(grid.transposed().render())
    fitting = [table for table in forms if width(table) <= limit][:1]
    for table in fitting or split(grid, lambda table: width(table) <= limit):
        console.width = max(console.width, width(table))
        console.print(table)


def split(grid: Grid, fits: Callable[[Table], bool]) -> list[Table]:
    """Tables of as many columns as fit, each with the first column."""
    tables: list[Table] = []
    start = 1
    while start < len(grid.columns):
        end = start + 1
        while end < len(grid.columns) and fits(grid.part(list(range(start, end + 1))).render()):
            end += 1
        tables.append(grid.part(list(range(start, end))).render())
        start = end
    return tables
