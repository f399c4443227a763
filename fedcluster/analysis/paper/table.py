"""A figure's data as CSV: every point of every curve.

Figures are plotted and judged from these files, so that figures of several commands are judged together, and a figure
can be plotted again without its runs.
"""

import csv
import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from fedcluster.analysis.paper.claims import Histories
from fedcluster.analysis.paper.figures import Curve, Panel
from fedcluster.errors import BadData
from fedcluster.runs.metrics import Line

Runs = dict[tuple[Panel, Curve], list[list[Line]]]
"""Curves from the start (round 0), one for each seed."""

NAMES = ("figure", "data", "panel", "curve", "clusters", "lr", "seed")
COUNTS = ("round", "aggregations", "device_updates", "bytes_up", "bytes_down")
SCORES = ("train_loss", "test_loss", "test_accuracy")


def to_csv(panels: list[Panel], runs: Runs, lr: Callable[[Panel, Curve], float]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*NAMES, *COUNTS, *SCORES])
    for panel in panels:
        for curve in panel.curves:
            name = [panel.figure, panel.data, panel.title, curve.label, curve.clusters, f"{lr(panel, curve):g}"]
            for seed, lines in enumerate(runs[panel, curve]):
                for line in lines:
                    numbers = [line.get(key, 0) for key in COUNTS] + [f"{line[key]:.6g}" for key in SCORES]
                    writer.writerow([*name, seed, *numbers])
    return text.getvalue()


def read(path: Path) -> Histories:
    """The curves of a figure in the form of the claims."""
    histories: dict[tuple[str, str, str], dict[int, list[Line]]] = {}
    try:
        with path.open(newline="") as file:
            for row in csv.DictReader(file, strict=True):
                key = (row["data"], f"{row['figure']} {row['panel']}", row["curve"])
                line = {name: int(row[name]) for name in COUNTS} | {name: float(row[name]) for name in SCORES}
                if not all(map(math.isfinite, line.values())):
                    raise ValueError("a number is not finite")
                histories.setdefault(key, {}).setdefault(int(row["seed"]), []).append(line)
        lengths = {len(lines) for seeds in histories.values() for lines in seeds.values()}
        if len(lengths) != 1 or len({tuple(seeds) for seeds in histories.values()}) != 1:
            raise ValueError("curves are incomplete")
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise BadData(f"{path} is damaged ({error}): delete it, and reproduce {path.stem} again") from None
    return {key: list(seeds.values()) for key, seeds in histories.items()}


def read_curves(folder: Path, figures: Sequence[str]) -> dict[str, list[list[Line]]]:
    """The curves of figures that have their data in the folder, by figure, data set, panel and label."""
    paths = [folder / f"{figure}.csv" for figure in figures]
    found = [read(path) for path in paths if path.exists()]
    return {" · ".join((panel, data, label)): runs for one in found for (data, panel, label), runs in one.items()}


def curves(path: Path, panels: list[Panel], seeds: int) -> Runs:
    """The curves of these panels in the form of the plots."""
    histories = read(path)
    names = {
        (panel.data, f"{panel.figure} {panel.title}", c.label): (panel, c) for panel in panels for c in panel.curves
    }
    if histories.keys() != names.keys() or any(len(runs) != seeds for runs in histories.values()):
        raise BadData(f"{path} has other curves or seeds: delete it, and reproduce {path.stem} again")
    return {names[key]: runs for key, runs in histories.items()}
