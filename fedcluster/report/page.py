"""The page: one HTML file with its styles, its scripts and the data, which works from disk and offline.

The browser executes only the scripts that are named by digest in the page's Content-Security-Policy. Data are JSON in
which no character can end the element that holds it, and the scripts show them as text.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import fedcluster
from fedcluster.files import write_atomically
from fedcluster.report.collect import Column, axes, collect, collect_curves, find_runs, scores
from fedcluster.reporting import Track, untracked
from fedcluster.runs.metrics import Line

LARGEST = 2_800_000  # characters of the page
DIGITS = (6, 5, 4)  # significant ones, fewer where a page would become too large
STYLES = ("uplot/uPlot.min.css", "style.css")
SCRIPTS = (
    "uplot/uPlot.iife.min.js",
    "core.js",
    "table.js",
    "heat.js",
    "curves.js",
    "turns.js",
    "wheel.js",
    "details.js",
    "main.js",
)


@dataclass
class Table:
    """The first `left` columns are texts, aligned to the left."""

    columns: list[str]
    rows: list[list[str]]
    left: int = 1
    title: str = ""


@dataclass
class Content:
    """What a page shows: sentences, tables and pictures (PNG files, each with a description), then runs from their
    folders, and curves by name: the lines of metrics of each seed."""

    title: str
    sentences: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    pictures: list[tuple[Path, str]] = field(default_factory=list)
    runs: Sequence[Path] = ()
    curves: Mapping[str, Sequence[Sequence[Line]]] = field(default_factory=dict)


def write_page(content: Content, path: Path, track: Track = untracked) -> Path:
    """Write the page; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page(data_of(content, track)))
    return path


def write_report(paths: Sequence[Path], out: Path, track: Track = untracked) -> Path:
    """The report on runs, which may be in folders of several."""
    found = find_runs(paths)
    return write_page(Content(title_of(paths, found), runs=found), out, track)


def title_of(paths: Sequence[Path], found: Sequence[Path]) -> str:
    return paths[0].resolve().name if len(paths) == 1 else f"{len(found)} runs"


def data_of(content: Content, track: Track = untracked) -> dict[str, Any]:
    """The data of a page, as its scripts take them."""
    runs = collect(content.runs, track) + collect_curves(content.curves)
    return {
        "title": content.title,
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": fedcluster.__version__,
        "sentences": content.sentences,
        "tables": [vars(table) for table in content.tables],
        "pictures": [{"source": embedded(picture), "words": words} for picture, words in content.pictures],
        "axes": [{"key": key, "label": label} for key, label in axis_labels(runs).items()],
        "scores": scores(runs),
        "runs": runs,
    }


def axis_labels(runs: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The axes along which at least one run has moved."""
    labels = {key: label for key, (label, _) in axes({"local": {"steps": 1}}).items()}
    return {key: label for key, label in labels.items() if any(any(run["axes"].get(key, ())) for run in runs)}


def embedded(picture: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()


def page(data: dict[str, Any]) -> str:
    """The HTML of a page with these data, small enough to be opened anywhere."""
    room = LARGEST - len(render(""))
    for digits in DIGITS:
        text = encode(data, digits)
        if len(text) <= room:
            return render(text)
    every = 1
    while len(text) > room and every < 1000:
        every *= 2
        text = encode(data | {"runs": [thinned(run, every) for run in data["runs"]], "every": every}, DIGITS[-1])
    return render(text)


def thinned(run: dict[str, Any], every: int) -> dict[str, Any]:
    """A run with every so manyth of its rounds, and the last."""

    def part(values: Column) -> Column:
        return values[:-1:every] + values[-1:]

    cycles = run["cycles"]
    kept = set(part(list(dict.fromkeys(cycles["round"]))))
    rows = [row for row, round in enumerate(cycles["round"]) if round in kept]
    fewer = {key: [column[row] for row in rows] for key, column in cycles.items() if key != "every"}
    curves = {key: {name: part(values) for name, values in run[key].items()} for key in ("rounds", "axes")}
    return run | curves | {"cycles": fewer | {"every": cycles["every"] * every}}


def encode(data: Any, digits: int) -> str:
    """JSON that can stand in an HTML element: without the characters that could end it."""
    text = json.dumps(compact(data, digits), separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def compact(value: Any, digits: int) -> Any:
    """The same with rounded floats, None for those that are not finite, and columns of equal steps in short."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): compact(one, digits) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return steps(value) or [compact(one, digits) for one in value]
    return value


def steps(values: Sequence[Any]) -> dict[str, Any] | None:
    """A long column of whole numbers at equal distances, as its first number, the distance and the length."""
    if len(values) < 8 or not all(type(value) in (int, float) and value % 1 == 0 for value in values):
        return None
    by = values[1] - values[0]
    if any(b - a != by for a, b in pairwise(values)):
        return None
    return {"from": int(values[0]), "by": int(by), "length": len(values)}


@cache
def asset(name: str) -> str:
    return files("fedcluster.report").joinpath("assets", name).read_text(encoding="utf-8")


def render(data: str) -> str:
    """The template with everything in its place."""
    scripts = [asset(name) for name in SCRIPTS]
    parts = {
        "policy": policy(scripts),
        "styles": "\n".join(f"<style>\n{asset(name)}\n</style>" for name in STYLES),
        "data": data,
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], asset("page.html"))


def policy(scripts: Sequence[str]) -> str:
    """The Content-Security-Policy: no scripts but ours, and nothing from elsewhere."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'"
    )
