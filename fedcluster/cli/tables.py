"""The tables and sentences that commands print."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedcluster.cli.grid import Grid

if TYPE_CHECKING:
    from fedcluster.algorithms.registry import Entry
    from fedcluster.analysis.compare import Comparison
    from fedcluster.analysis.evaluate import Evaluation
    from fedcluster.analysis.fleet_report import FleetReport
    from fedcluster.analysis.plan import Plan
    from fedcluster.runs.listing import Listed


def outcomes_table(result: Comparison) -> Grid:
    from fedcluster.models.metrics import recorded_metrics
    from fedcluster.runs.plots import LABELS, X

    what = X[result.x][0] if result.x in ("time", "bytes") else result.x
    metrics = recorded_metrics(result.outcomes[0].histories[0][-1])
    columns = ["method", "M", "rate", "train loss", *(f"test {metric.label}" for metric in metrics)]
    columns += [f"{what} to loss {result.target:.3f}"]
    rows = []
    for outcome in result.outcomes:
        last = outcome.histories[0][-1]
        rows.append(
            [
                LABELS[outcome.method],
                str(outcome.clusters) if outcome.method != "centralized" else "-",
                f"{outcome.lr:g}",
                outcome.final_text("train_loss", "{:.4f}".format),
                *(outcome.final_text(f"test_{metric.name}", metric.text) for metric in metrics),
                reached(outcome.reach(result.target, result.x), X[result.x][1](last)),
                f"{last['device_updates']:,}",
                size_text(last["bytes_up"]),
                size_text(last["bytes_down"]),
            ]
        )
    return Grid([*columns, "device updates", "up", "down"], rows)


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
    """What is to be said of the budgets, and FedCluster against FedAvg."""
    by_method = {outcome.method: outcome for outcome in result.outcomes}
    if not {"fedavg", "fedcluster"} <= by_method.keys():
        return [*result.remarks]
    loss, _ = by_method["fedavg"].final("train_loss")
    rounds = by_method["fedcluster"].rounds_to(loss)
    last = by_method["fedavg"].histories[0][-1]["round"]
    return [
        *result.remarks,
        f"FedCluster reached FedAvg's last training loss ({loss:.4f}, after {last} rounds) in rounds: "
        + ", ".join("never" if n is None else str(n) for n in rounds)
        + " (by seed)",
    ]


def plan_table(plan: Plan) -> Grid:
    rows = []
    for K, (members, ends) in enumerate(zip(plan.clusters.members, plan.offsets, strict=True)):
        row = [str(K), f"{len(members):,}"]
        if plan.slots is not None and plan.coverage is not None:
            row += [f"{clock_time(plan.slots[K][0])} - {clock_time(plan.slots[K][1])}", f"{plan.coverage[K]:.1%}"]
        elif ends is not None:
            row += [f"{ends[0] + 0.0:+g} to {ends[1] + 0.0:+g}"]  # + 0.0: no -0
        rows.append(row)
    more = ["UTC offsets, h"] if plan.slots is None else ["slot, UTC", "free long enough in it"]
    return Grid(["cluster", "devices", *more], rows)


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
    return Grid([f"{len(sizes):,} devices", "least", "mean", "most"], rows)


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
    return Grid(["cluster", "devices", "samples", "q_K", *(f"% {c}" for c in range(shown))], rows)


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
    return Grid([*columns, "optimizer"], rows, left=len(columns) + 1)


def listed(names: list[str]) -> str:
    return ", ".join(names) or "-"


def scores_table(evaluation: Evaluation) -> Grid:
    rows = [["loss", f"{evaluation.scores['loss']:.4f}"]]
    rows += [[metric.label, metric.text(evaluation.scores[metric.name])] for metric in evaluation.shown()]
    return Grid(["score", "value"], rows)


def distribution_table(evaluation: Evaluation) -> Grid:
    """How scores are distributed over devices."""
    rows = []
    for name, text in evaluation.texts().items():
        spread = evaluation.summary[name]
        variance = "-" if spread["variance"] is None else f"{spread['variance']:.4g}"
        rows.append([name.replace("_", " "), text(spread["mean"]), text(spread["worst_decile"]), variance])
    return Grid([f"{evaluation.summary['devices']:,} devices", "mean", "worst decile", "variance"], rows)


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
    return Grid(["cluster", "devices", *(f"mean {name.replace('_', ' ')}" for name in texts)], rows)


def runs_table(runs: list[Listed], folder: Path, now: float) -> Grid:
    """Runs with their state and last scores: the training loss, and the first metric of the test data."""
    rows = []
    for run in runs:
        scores = {key: value for key, value in run.last.items() if isinstance(value, int | float)}
        metric = next((key for key in scores if key.startswith("test_") and key != "test_loss"), "")
        rows.append(
            [
                printable(str(run.path.relative_to(folder)) if run.path != folder else str(folder)),
                run.state,
                f"{run.rounds}/{'?' if run.planned is None else run.planned}",
                f"{scores['train_loss']:.4f}" if "train_loss" in scores else "-",
                f"{printable(metric.removeprefix('test_'))} {scores[metric]:.4f}" if metric else "-",
                f"{age(now - run.changed)} ago",
            ]
        )
    return Grid(["run", "state", "rounds", "train loss", "test", "last written"], rows, left=2)


def printable(text: str) -> str:
    """A name from outside, without control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def age(seconds: float) -> str:
    """A time span in the largest unit of which there are at least two."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(seconds, 0):.0f} s"
