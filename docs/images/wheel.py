"""Draws wheel.png: one round of FedAvg beside one round of FedCluster, the same devices and the same messages.

python docs/images/wheel.py
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fedcluster.figures import canvas, save

CLUSTERS, EACH, TAKING_PART = 5, 6, 2
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9"]
DARK = "#3A3A3A"


def devices(ax: Any, coloured: bool, active: Any) -> None:
    """A ring of devices: filled where they take part in this round."""
    angles = np.pi / 2 - 2 * np.pi * (np.arange(CLUSTERS * EACH) + 0.5) / (CLUSTERS * EACH)
    for number, angle in enumerate(angles):
        colour = COLOURS[number // EACH] if coloured else COLOURS[0]
        face = colour if active[number] else "white"
        ax.plot(np.cos(angle), np.sin(angle), "o", ms=13, mfc=face, mec=colour, mew=1.8, zorder=3)


def arrow(ax: Any, start: Any, end: Any, colour: str = DARK, curve: float = 0.0) -> None:
    style = {"arrowstyle": "-|>", "color": colour, "lw": 1.6, "connectionstyle": f"arc3,rad={curve}"}
    ax.annotate("", xy=end, xytext=start, arrowprops=style, zorder=2)


def place(angle: float, radius: float) -> tuple[float, float]:
    return radius * np.cos(angle), radius * np.sin(angle)


def main() -> None:
    figure, (left, right) = canvas(2, 11, 6.3)
    active = np.zeros(CLUSTERS * EACH, bool)
    for cluster in range(CLUSTERS):
        active[cluster * EACH + np.array([1, 4])[:TAKING_PART]] = True
    for ax, title in ((left, "FedAvg: one update a round"), (right, "FedCluster: five updates a round")):
        ax.set(xlim=(-1.45, 1.45), ylim=(-1.55, 1.35), aspect="equal", title=title)
        ax.axis("off")
    devices(left, False, active)
    left.text(0, 0, "$W$", ha="center", va="center", fontsize=22, color=DARK)
    for number in np.flatnonzero(active):
        angle = np.pi / 2 - 2 * np.pi * (number + 0.5) / len(active)
        arrow(left, place(angle, 0.84), place(angle, 0.22), "#8A8A8A")
    left.text(0, -1.52, "Ten devices train at once. Their average is the next model.", ha="center", fontsize=10)
    devices(right, True, active)
    middles = [np.pi / 2 - 2 * np.pi * (cluster + 0.5) / CLUSTERS for cluster in range(CLUSTERS)]
    for cluster, angle in enumerate(middles):
        x, y = place(angle, 0.5)
        text = {"ha": "center", "va": "center", "fontsize": 15, "color": COLOURS[cluster], "zorder": 4}
        right.text(x, y, f"$W_{cluster + 1}$", **text)
        for number in np.flatnonzero(active):
            if number // EACH == cluster:
                own = np.pi / 2 - 2 * np.pi * (number + 0.5) / len(active)
                arrow(right, place(own, 0.86), (x * 1.28, y * 1.28), COLOURS[cluster])
        x, y = place(angle, 1.27)
        right.text(x, y, f"cluster {cluster + 1}", ha="center", va="center", fontsize=10, color=COLOURS[cluster])
    for before, after in pairwise(middles):
        arrow(right, place(before - 0.26, 0.5), place(after + 0.26, 0.5), DARK, curve=-0.25)
    words = "Clusters take turns: each starts from the model of the previous one."
    right.text(0, -1.52, words, ha="center", fontsize=10)
    figure.suptitle("The same ten devices, the same ten downloads and uploads", fontsize=11)
    save(figure, Path(__file__).with_suffix(".png"))


if __name__ == "__main__":
    main()
