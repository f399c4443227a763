"""Plots in the paper's layout: a row for each quantity or setting, a column for each panel."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from fedcluster.analysis.paper.choices import NAMES
from fedcluster.analysis.paper.figures import Curve, Panel
from fedcluster.figures import save, whole_numbers
from fedcluster.runs.metrics import Line
from fedcluster.runs.plots import COLOURS, X, log_scale

QUANTITIES = {"train_loss": ("training loss", 1.0), "test_accuracy": ("test accuracy (%)", 100.0)}
# FedCluster with ten random clusters has the same blue in all figures; its variants have other blues and dashes
LIGHT, DARK = {"color": "#56B4E9", "ls": "--"}, {"color": "#003F63", "ls": ":"}
BLUES = {"M = 5": LIGHT, "M = 20": DARK, "ρ_cluster = 0.5": LIGHT, "ρ_cluster = 0.9": DARK}


def style(curve: Curve) -> dict[str, Any]:
    variant = curve.label.partition(", ")[2]
    if variant in BLUES:
        return BLUES[variant]
    if curve.method == "control":
        return {"color": "#CC79A7", "ls": "--"}
    return {"color": COLOURS[curve.method], "ls": "-"}


def draw(
    panels: list[Panel], runs: dict[tuple[Panel, Curve], list[list[Line]]], x: str, title: str, path: Path
) -> None:
    """Plot panels in up to four columns. Figures 2 and 3 show accuracy below loss."""
    from matplotlib.figure import Figure

    quantities = list(QUANTITIES) if panels[0].figure in ("fig2", "fig3") else ["train_loss"]
    columns = 3 if panels[0].figure == "fig4" else min(4, len(panels))
    across = -(-len(panels) // columns)
    narrow = columns < 4  # then title and legend take more lines
    width = 0.4 + max(2.05 * columns, 5.5)
    height = 1.9 * across * len(quantities) + (1.15 if narrow else 0.7)
    figure = Figure(figsize=(width, height), layout="constrained", dpi=200)
    axes = figure.subplots(across * len(quantities), columns, squeeze=False)
    for number, panel in enumerate(panels):
        for row, quantity in enumerate(quantities):
            ax = axes[number // columns * len(quantities) + row][number % columns]
            draw_panel(ax, panel, runs, x, quantity)
            if row == 0:
                ax.set_title(mathematical(f"{NAMES[panel.data]}, {panel.title}".replace(", ρ", "\nρ")), fontsize=9)
            if number % columns == 0:
                ax.set_ylabel(QUANTITIES[quantity][0], fontsize=9)
            if row == len(quantities) - 1 and number // columns == across - 1:
                ax.set_xlabel(X[x][0], fontsize=9)
    for number in range(len(panels), columns * across):
        axes[number // columns * len(quantities)][number % columns].set_axis_off()
    handles: dict[str, Any] = {}
    for ax in axes.flat:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(mathematical(label), handle)
    ncols = 2 if narrow else 4
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=ncols, frameon=False, fontsize=9)
    figure.suptitle(title.replace(": ", "\n", 1) if narrow else title, fontsize=10)
    save(figure, path)


def mathematical(text: str) -> str:
    """Names of parameters as in the paper."""
    return re.sub(r"ρ_(\w+)", r"$\\rho_\\mathrm{\1}$", text)


def draw_panel(ax: Any, panel: Panel, runs: dict[tuple[Panel, Curve], list[list[Line]]], x: str, quantity: str) -> None:
    _, scale = QUANTITIES[quantity]
    for curve in panel.curves:
        if curve.method == "centralized" and x != "rounds":
            continue  # centralized SGD sends nothing
        lines = runs[panel, curve]
        places = np.array([X[x][1](line) for line in lines[0]], np.float64)
        values = np.array([[line[quantity] for line in one] for one in lines]) * scale
        line = style(curve)
        ax.plot(places, values.mean(axis=0), label=curve.label, lw=1.6, **line)
        if len(lines) > 1:
            ax.fill_between(places, values.min(axis=0), values.max(axis=0), color=line["color"], alpha=0.18, lw=0)
    if quantity == "train_loss":
        log_scale(ax)
    if x != "bytes":
        whole_numbers(ax.xaxis)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
    ax.tick_params(labelsize=8)
