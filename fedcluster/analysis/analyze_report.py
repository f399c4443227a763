"""What `fedcluster analyze` says: sentences, tables, analysis.json and the plot."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fedcluster.analysis.analyze import Analysis
from fedcluster.analysis.bound import Bound
from fedcluster.files import write_atomically
from fedcluster.runs.plots import canvas, save


def broken(bound: Bound) -> list[str]:
    """The conditions that fail, by how much."""
    return [
        f"M = {bound.M}: the theorem wants {condition.words}; here that is {condition.value:.4g} against "
        f"{condition.limit:.4g}, missed by a factor of {condition.factor:.3g}."
        for condition in bound.conditions
        if not condition.holds
    ]


def headline(analysis: Analysis) -> list[str]:
    """What has to be said before any number."""
    missed = [*broken(analysis.clustered), *(broken(analysis.one) if analysis.clustered.M > 1 else [])]
    if missed:
        return ["The theorem's conditions do not hold on this problem, so its bound promises nothing here.", *missed]
    where = "on the sampled devices, but perhaps not on all" if analysis.sampled else "here"
    return [
        f"The theorem's conditions hold at the upper ends of the values seen {where}. An upper bound is not a forecast."
    ]


Cells = tuple[list[str], list[list[str]]]


def points_tables(analysis: Analysis) -> list[Cells]:
    """Heterogeneity, then the other constants, by model."""
    points, last = analysis.points, [analysis.most] if len(analysis.points) > 1 else []
    spread = [
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
    for most in last:  # the largest ones need not be of one model, nor add up
        cells = f"{most.gradient:.4g}", f"{most.H_device:.4g}", "", plus_minus(most.H_cluster, most.error)
        spread.append([most.name, "", *cells])
    rest = [
        [
            point.name,
            f"{point.s2_mean:.4g}",
            plus_minus(point.V, point.V_error),
            span(point.G2_low, point.G2),
            span(point.L_low, point.L),
        ]
        for point in [*points, *last]
    ]
    return [
        (["model", "f", "|grad f|²", "H_device", "= within", "+ H_cluster"], spread),
        (["model", "mean s_k²", "V", "G²", "L"], rest),
    ]


def plus_minus(value: float, error: float) -> str:
    return f"{value:.4g}" if error == 0 else f"{value:.3g} ± {error:.1g}"


def span(low: float, high: float) -> str:
    """A range, or one number where its ends are as good as equal."""
    return f"{high:.4g}" if high - low <= 1e-3 * high else f"{low:.4g} to {high:.4g}"


def bounds_table(analysis: Analysis) -> Cells:
    bounds = [analysis.clustered, analysis.one] if analysis.clustered.M > 1 else [analysis.one]
    columns = ["the theorem for", *(f"M = {bound.M}" for bound in bounds)]
    lines: list[tuple[str, list[float]]] = [
        ("2 (f(W_0) - inf f), inf f = 0", [2 * b.constants.gap for b in bounds]),
        ("4 L H_cluster", [4 * b.constants.L * b.constants.H for b in bounds]),
        ("4 L V", [4 * b.constants.L * b.constants.V for b in bounds]),
        ("C, the sum", [b.constants.C for b in bounds]),
        (f"bound 2 C / sqrt(TME), T = {bounds[0].T:,}, E = {bounds[0].E:g}", [b.value for b in bounds]),
        ("the theorem's rate (TME)^(-1/2)", [b.rate for b in bounds]),
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
    """analysis.json and the picture."""
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "analysis.json", json.dumps(report(analysis), indent=2) + "\n")
    picture(analysis, out / "analysis.png")
    return [out / "analysis.json", out / "analysis.png"]


def report(analysis: Analysis) -> dict[str, Any]:
    return {
        "points": [asdict(point) for point in analysis.points],
        "largest_seen": {key: value for key, value in asdict(analysis.most).items() if key not in ("name", "loss")},
        "f_start": analysis.points[0].loss,
        "lowest_loss_known": analysis.lowest,
        "epsilon": analysis.epsilon,
        "theorem": [bound_report(bound, analysis) for bound in (analysis.clustered, analysis.one)],
        "remarks": analysis.remarks,
    }


def bound_report(bound: Bound, analysis: Analysis) -> dict[str, Any]:
    known = replace(bound.constants, gap=analysis.points[0].loss - analysis.lowest)
    return {
        "M": bound.M,
        "E": bound.E,
        "T": bound.T,
        "C": bound.constants.C,
        "C_if_inf_is_the_lowest_known": known.C,
        "bound": bound.value,
        "rate": bound.rate,
        "rounds_to_epsilon": bound.rounds_to(analysis.epsilon),
        "conditions": [
            {"wants": c.words, "value": c.value, "limit": finite(c.limit), "holds": c.holds, "factor": finite(c.factor)}
            for c in bound.conditions
        ],
    }


def finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def picture(analysis: Analysis, path: Path) -> None:
    """Where the heterogeneity lies at each model, and what C consists of."""
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
    for name, colour, serve_options in (
        ("2 (f(W_0) - inf f)", "#5A5A5A", [2 * b.constants.gap for b in bounds]),
        ("4 L H_cluster", "#0072B2", [4 * b.constants.L * b.constants.H for b in bounds]),
        ("4 L V (batches)", "#E69F00", [4 * b.constants.L * b.constants.V for b in bounds]),
    ):
        heights = [term / math.sqrt(bound.M) for term, bound in zip(serve_options, bounds, strict=True)]
        right.bar(labels, heights, 0.45, bottom=bottom, color=colour, label=name)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    right.set(title="the bound's C / sqrt(M), and what it consists of", xlim=(-0.6, len(bounds) - 0.4))
    right.legend(frameon=False)
    for ax in (left, right):
        ax.grid(alpha=0.25, axis="y")
        low, high = ax.get_ylim()
        ax.set_ylim(low, high * 1.25)
    save(figure, path)
