"""The output of `fedcluster analyze`: sentences, tables, analysis.json and the plot."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fedcluster.analysis.analyze import Analysis
from fedcluster.analysis.bound import Bound
from fedcluster.figures import canvas, save
from fedcluster.files import write_atomically

Cells = tuple[list[str], list[list[str]]]
"""The columns and rows of a table."""


def headline(analysis: Analysis) -> list[str]:
    """Whether the theorem's conditions hold, which comes before any number."""
    failed = [*failed_conditions(analysis.clustered)]
    if analysis.clustered.M > 1:
        failed += failed_conditions(analysis.one)
    if failed:
        return ["The theorem's conditions do not hold on this problem, so its bound guarantees nothing here.", *failed]
    where = "for the sampled devices, but perhaps not for all" if analysis.sampled else "here"
    return [
        f"The theorem's conditions hold at the upper ends of the measured ranges {where}. "
        "An upper bound is not a forecast."
    ]


def failed_conditions(bound: Bound) -> list[str]:
    """A sentence for each condition that fails."""
    return [
        f"M = {bound.M}: the theorem requires {condition.words}; here this is {condition.value:.4g} against "
        f"{condition.limit:.4g}, too large by a factor of {condition.factor:.3g}."
        for condition in bound.conditions
        if not condition.holds
    ]


def points_tables(analysis: Analysis) -> list[Cells]:
    """Heterogeneity by model, then the other constants."""
    points, summary = analysis.points, [analysis.largest] if len(analysis.points) > 1 else []
    heterogeneity = [
        [
            point.name,
            f"{point.loss:.4f}",
            f"{point.gradient:.4g}",
            f"{point.H_device:.4g}",
            f"{point.H_within:.4g}",
            plus_minus(point.H_cluster, point.error),
        ]
        for point in points
    ]
    for largest in summary:  # the largest values may be of different models, and do not add up
        cells = f"{largest.gradient:.4g}", f"{largest.H_device:.4g}", "", plus_minus(largest.H_cluster, largest.error)
        heterogeneity.append([largest.name, "", *cells])
    constants = [
        [
            point.name,
            f"{point.s2_mean:.4g}",
            plus_minus(point.V, point.V_error),
            low_to_high(point.G2_low, point.G2),
            low_to_high(point.L_low, point.L),
        ]
        for point in [*points, *summary]
    ]
    return [
        (["model", "f", "|grad f|²", "H_device", "= within", "+ H_cluster"], heterogeneity),
        (["model", "mean s_k²", "V", "G²", "L"], constants),
    ]


def plus_minus(value: float, error: float) -> str:
    return f"{value:.4g}" if error == 0 else f"{value:.3g} ± {error:.1g}"


def low_to_high(low: float, high: float) -> str:
    """A range, or one number where its ends are nearly equal."""
    return f"{high:.4g}" if high - low <= 1e-3 * high else f"{low:.4g} to {high:.4g}"


def bounds_table(analysis: Analysis) -> Cells:
    """The terms of C, the bound and its conditions, for the experiment's M and for M = 1."""
    bounds = [analysis.clustered, analysis.one] if analysis.clustered.M > 1 else [analysis.one]
    columns = ["theorem", *(f"M = {bound.M}" for bound in bounds)]
    lines: list[tuple[str, list[float]]] = [
        ("2 (f(W_0) - inf f), inf f = 0", [2 * b.constants.gap for b in bounds]),
        ("4 L H_cluster", [4 * b.constants.L * b.constants.H for b in bounds]),
        ("4 L V", [4 * b.constants.L * b.constants.V for b in bounds]),
        ("C, the sum", [b.constants.C for b in bounds]),
        (f"bound 2 C / sqrt(TME), T = {bounds[0].T:,}, E = {bounds[0].E:g}", [b.value for b in bounds]),
        ("learning rate (TME)^(-1/2)", [b.rate for b in bounds]),
        (f"rounds to epsilon = {analysis.epsilon:.3g}", [b.rounds_to(analysis.epsilon) for b in bounds]),
    ]
    rows = [
        [name, *(f"{value:,}" if isinstance(value, int) else f"{value:.4g}" for value in values)]
        for name, values in lines
    ]
    for conditions in zip(*(bound.conditions for bound in bounds), strict=True):
        rows.append(
            [conditions[0].words, *(f"{c.value:.4g} {'≤' if c.holds else '>'} {c.limit:.4g}" for c in conditions)]
        )
    return columns, rows


def write(analysis: Analysis, out: Path) -> list[Path]:
    """Write analysis.json and the plot."""
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "analysis.json", json.dumps(report(analysis), indent=2) + "\n")
    plot(analysis, out / "analysis.png")
    return [out / "analysis.json", out / "analysis.png"]


def report(analysis: Analysis) -> dict[str, Any]:
    """The contents of analysis.json."""
    return {
        "points": [asdict(point) for point in analysis.points],
        "largest_seen": {key: value for key, value in asdict(analysis.largest).items() if key not in ("name", "loss")},
        "f_start": analysis.points[0].loss,
        "lowest_loss_known": analysis.lowest_loss,
        "epsilon": analysis.epsilon,
        "theorem": [bound_report(bound, analysis) for bound in (analysis.clustered, analysis.one)],
        "remarks": analysis.remarks,
    }


def bound_report(bound: Bound, analysis: Analysis) -> dict[str, Any]:
    with_lowest = replace(bound.constants, gap=analysis.points[0].loss - analysis.lowest_loss)
    return {
        "M": bound.M,
        "E": bound.E,
        "T": bound.T,
        "C": bound.constants.C,
        "C_if_inf_is_the_lowest_known": with_lowest.C,
        "bound": bound.value,
        "rate": bound.rate,
        "rounds_to_epsilon": bound.rounds_to(analysis.epsilon),
        "conditions": [
            {
                "requires": c.words,
                "value": c.value,
                "limit": finite(c.limit),
                "holds": c.holds,
                "factor": finite(c.factor),
            }
            for c in bound.conditions
        ],
    }


def finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def plot(analysis: Analysis, path: Path) -> None:
    """Plot the parts of H_device at each model, and the terms of C."""
    figure, (left, right) = canvas(2, 10, 3.8)
    names = [point.name for point in analysis.points]
    within, between = ([getattr(p, key) for p in analysis.points] for key in ("H_within", "H_cluster"))
    left.bar(names, between, 0.55, color="#0072B2", label="between clusters: H_cluster")
    left.bar(names, within, 0.55, bottom=between, color="#BFD9EA", label="within clusters")
    left.set(title="H_device and its parts", ylabel="squared distance of gradients", xlim=(-0.6, len(names) - 0.4))
    left.tick_params(axis="x", labelrotation=20 if len(names) > 2 else 0)
    left.legend(frameon=False)
    bounds = [analysis.one] if analysis.clustered.M == 1 else [analysis.one, analysis.clustered]
    labels, bottom = [f"M = {bound.M}" for bound in bounds], [0.0] * len(bounds)
    for name, colour, terms in (
        ("2 (f(W_0) - inf f)", "#5A5A5A", [2 * b.constants.gap for b in bounds]),
        ("4 L H_cluster", "#0072B2", [4 * b.constants.L * b.constants.H for b in bounds]),
        ("4 L V (batches)", "#E69F00", [4 * b.constants.L * b.constants.V for b in bounds]),
    ):
        heights = [term / math.sqrt(bound.M) for term, bound in zip(terms, bounds, strict=True)]
        right.bar(labels, heights, 0.45, bottom=bottom, color=colour, label=name)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    right.set(title="C / sqrt(M) of the bound, by terms", xlim=(-0.6, len(bounds) - 0.4))
    right.legend(frameon=False)
    for ax in (left, right):
        ax.grid(alpha=0.25, axis="y")
        low, high = ax.get_ylim()
        ax.set_ylim(low, high * 1.25)
    save(figure, path)
