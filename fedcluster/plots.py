"""Pictures made from the record. The same colour for the same method everywhere; safe for colour-blind eyes."""

from pathlib import Path
from typing import Any

import numpy as np

from fedcluster.files import write_atomically
from fedcluster.record import Line

# Okabe and Ito's palette
COLOURS = {"fedcluster": "#0072B2", "fedavg": "#D55E00", "centralized": "#5A5A5A", "run": "#0072B2"}
LABELS = {"fedcluster": "FedCluster", "fedavg": "FedAvg", "centralized": "centralized SGD"}


def canvas(columns: int, width: float, height: float) -> tuple[Any, Any]:
    """A figure that belongs to no window and no global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=150)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def heat(ax: Any, values: Any, label: str) -> None:
    """A matrix of shares, white to blue."""
    picture = ax.imshow(values, aspect="auto", cmap="Blues", vmin=0, interpolation="nearest")
    ax.figure.colorbar(picture, ax=ax, label=label)


def save(figure: Any, path: Path) -> None:
    write_atomically(path, lambda file: figure.savefig(file, format="png"))


def curves(histories: dict[str, list[list[Line]]], path: Path, title: str = "") -> None:
    """Training loss (the test's, where training data are elsewhere) and test accuracy over rounds: a line per method, a
    band over its seeds (lowest to highest)."""
    figure, axes = canvas(2, 9.5, 3.8)
    known = all("train_loss" in line for seeds in histories.values() for lines in seeds for line in lines)
    loss = ("train_loss", "training loss (cross-entropy)") if known else ("test_loss", "test loss (cross-entropy)")
    for ax, key, label, scale in (
        (axes[0], *loss, 1.0),
        (axes[1], "test_accuracy", "test accuracy (%)", 100.0),
    ):
        for method, seeds in histories.items():
            x = np.array([line["round"] for line in seeds[0]])
            y = np.array([[line[key] for line in lines] for lines in seeds]) * scale
            colour = COLOURS.get(method)
            ax.plot(x, y.mean(axis=0), color=colour, label=LABELS.get(method, method), lw=1.8)
            if len(seeds) > 1:
                ax.fill_between(x, y.min(axis=0), y.max(axis=0), color=colour, alpha=0.2, lw=0)
        ax.set_xlabel("learning rounds")
        ax.set_ylabel(label)
        ax.grid(alpha=0.25)
        if ax is axes[0]:
            ax.set_yscale("log")
            if len(histories) > 1:
                ax.legend(frameon=False)
    figure.suptitle(title, fontsize=10)
    save(figure, path)
