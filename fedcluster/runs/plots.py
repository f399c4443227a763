"""Plots of runs. A method has the same colour everywhere; the colours can be told apart by colour-blind readers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcluster.figures import Plot, canvas, save, whole_numbers
from fedcluster.models.metrics import Metric, recorded_metrics
from fedcluster.runs.devices import summarize
from fedcluster.runs.metrics import Line

# Okabe and Ito's palette
MOST_CLUSTERS = 20  # with a colour each
COLOURS = {
    "fedcluster": "#0072B2",
    "fedcluster+": "#CC79A7",
    "fedavg": "#D55E00",
    "centralized": "#5A5A5A",
    "minibatch": "#009E73",
    "run": "#0072B2",
}
LABELS = {
    "fedcluster": "FedCluster",
    "fedcluster+": "FedCluster+",
    "fedavg": "FedAvg",
    "centralized": "centralized SGD",
    "minibatch": "minibatch SGD",
}


def log_scale(ax: Any) -> None:
    """Make the y-axis logarithmic with plain numbers as labels, fewer of them over a wide range."""
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    decades = np.log10(high / low)
    steps = (1,) if decades > 2.5 else (1, 2, 5) if decades > 0.7 else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    log_ticks(ax.yaxis, steps)


def log_ticks(axis: Any, steps: tuple[float, ...]) -> None:
    """Put ticks with plain numbers at these multiples of the powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


# what curves can be drawn over: the label, and the value in a line of metrics.jsonl
X: dict[str, tuple[str, Callable[[Line], float]]] = {
    "rounds": ("learning rounds", lambda line: line["round"]),
    "aggregations": ("aggregations", lambda line: line.get("aggregations", 0)),
    "updates": ("device updates", lambda line: line.get("device_updates", 0)),
    "bytes": ("gigabytes sent and received", lambda line: (line.get("bytes_up", 0) + line.get("bytes_down", 0)) / 1e9),
    "time": ("simulated hours", lambda line: line.get("simulated_seconds", 0) / 3600),
}


def curves(histories: dict[str, list[list[Line]]], path: Path, title: str = "", x: str = "rounds") -> None:
    """The plot of `curves_plot` as a file."""
    curves_plot(histories, title, x).save(path)


def curves_plot(histories: dict[str, list[list[Line]]], title: str = "", x: str = "rounds") -> Plot:
    """Training loss (the test's, where training data are elsewhere) and the metrics of the test data over `x`: a line
    per method, a band over its seeds (lowest to highest).

    Where seeds do not have their rounds at the same x, curves are interpolated linearly up to the end of the shortest.
    A method for which x stays 0 (centralized SGD sends nothing) is left out.
    """
    metrics = recorded_metrics(next(iter(histories.values()))[0][-1])
    figure, axes = canvas(1 + len(metrics), 4.75 * (1 + len(metrics)), 3.8)
    known = all("train_loss" in line for seeds in histories.values() for lines in seeds for line in lines)
    loss = ("train_loss", "training loss") if known else ("test_loss", "test loss")
    panels = [(*loss, 1.0)]
    for metric in metrics:
        unit, scale = (" (%)", 100.0) if metric.percent else ("", 1.0)
        panels.append((f"test_{metric.name}", f"test {metric.label}{unit}", scale))
    for ax, (key, label, scale) in zip(axes, panels, strict=True):
        for method, seeds in histories.items():
            at = [np.array([X[x][1](line) for line in lines], np.float64) for lines in seeds]
            there = np.unique(np.concatenate([one[one <= min(other[-1] for other in at)] for one in at]))
            if there[-1] == 0:
                continue
            y = np.array(
                [np.interp(there, one, [line[key] for line in lines]) for one, lines in zip(at, seeds, strict=True)]
            )
            y, colour = y * scale, COLOURS.get(method)
            ax.plot(there, y.mean(axis=0), color=colour, label=LABELS.get(method, method), lw=1.8)
            if len(seeds) > 1:
                ax.fill_between(there, y.min(axis=0), y.max(axis=0), color=colour, alpha=0.2, lw=0)
        ax.set_xlabel(X[x][0])
        if x in ("rounds", "aggregations", "updates"):
            whole_numbers(ax.xaxis)
        ax.set_ylabel(label)
        ax.grid(alpha=0.25)
        if ax is axes[0]:
            log_scale(ax)
            if len(histories) > 1:
                ax.legend(frameon=False)
    figure.suptitle(title, fontsize=10)
    return Plot(figure)


def device_plot(lines: list[Line], path: Path, metrics: Sequence[Metric], title: str = "") -> None:
    """The distribution of a score over devices: its mean and worst decile over rounds, the histogram of the first and
    the last evaluation, and the means of the clusters over rounds. The score is the first metric that devices have,
    else the loss."""
    from matplotlib import colormaps

    metric = next((one for one in metrics if one.name in lines[-1]), None)
    name, label, scale = ("loss", "loss", 1.0) if metric is None else (metric.name, *axis_label(metric))
    summaries = [summarize(line, metrics) for line in lines]
    rounds = [line["round"] for line in lines]
    figure, axes = canvas(3, 14.25, 3.8)
    colour, other = COLOURS["run"], COLOURS["fedavg"]

    def drawn(values: Any) -> Any:
        return np.array(values, np.float64) * scale

    marker = "o" if len(lines) < 20 else None
    for key, shade, words in (("mean", colour, "mean of devices"), ("worst_decile", other, "mean of the worst tenth")):
        axes[0].plot(rounds, drawn([s[name][key] for s in summaries]), color=shade, label=words, lw=1.8, marker=marker)
    values = [drawn(line[name]) for line in (lines[0], lines[-1])]
    values = [column[np.isfinite(column)] for column in values]
    edges = np.histogram_bin_edges(np.concatenate(values), bins=20)
    if len(lines) > 1:
        axes[1].hist(values[0], edges, histtype="step", color=other, lw=1.5, label=f"round {rounds[0]}")
    axes[1].hist(values[1], edges, color=colour, alpha=0.6, label=f"round {rounds[-1]}")
    clusters = [group["cluster"] for group in summaries[-1]["clusters"]]
    colours = colormaps["tab10" if len(clusters) <= 10 else "tab20"]
    axes[2].set_prop_cycle(color=colours(range(colours.N)))
    for K in clusters[:MOST_CLUSTERS]:
        means = [next((g[name] for g in s["clusters"] if g["cluster"] == K), None) for s in summaries]
        words = "in no cluster" if K < 0 else f"cluster {K}"
        axes[2].plot(rounds, drawn(means), lw=1.2, marker=marker, ms=3, label=words)
    for ax in (axes[0], axes[2]):
        ax.set_xlabel("learning rounds")
        whole_numbers(ax.xaxis)
        ax.set_ylabel(label)
        ax.grid(alpha=0.25)
    axes[1].set_xlabel(label)
    axes[1].set_ylabel("devices")
    axes[2].set_ylabel(f"{label}, mean by cluster")
    for ax in axes:
        ax.legend(frameon=False, fontsize=8)
    if len(clusters) >= 8:  # beside the curves, which it would cover
        axes[2].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(title, fontsize=10)
    save(figure, path)


def axis_label(metric: Metric) -> tuple[str, float]:
    """The label of an axis for a metric, and what its values are multiplied by."""
    return (f"{metric.label} (%)", 100.0) if metric.percent else (metric.label, 1.0)
