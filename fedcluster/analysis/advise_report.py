"""What `fedcluster advise` says: the verdict in sentences, tables, advice.json and the plot."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedcluster.analysis.advise import Advice, Choice
from fedcluster.analysis.analyze_report import Cells
from fedcluster.files import write_atomically
from fedcluster.runs.plots import canvas, log_ticks, save


def verdict(advice: Advice, participation: float) -> list[str]:
    """Which to take, and why."""
    ranked = sorted(advice.choices, key=lambda choice: choice.cohort_height)
    theory = min(advice.choices, key=lambda choice: choice.height)
    best, last = ranked[0], advice.choices[-1]
    said = [f"Take M = {advice.take}."]
    if participation < 1 and theory.M != best.M:
        said.append(
            f"C / sqrt(M) is least at M = {theory.M} if all devices of a cluster take part, as the theorem has it; "
            f"with a share of {participation:g} of them, at M = {best.M}."
        )
    else:
        said.append(f"C / sqrt(M) is least at M = {best.M}.")
    lower = min(advice.choices, key=lambda choice: choice.C_low / math.sqrt(choice.M))
    if lower.M != best.M:
        said.append(
            f"It is a close call: L is between {advice.L.low:.3g} and {advice.L.high:.3g}, and at the lower end "
            f"M = {lower.M} would be best."
        )
    said.append(f"Participation = {participation:g} allows up to M = {last.M}, with a device in every cohort.")
    if advice.pilots:
        order = sorted(advice.pilots, key=lambda pilot: pilot.loss)
        results = ", ".join(f"M = {p.M}: {p.loss:.4f} at rate {p.lr:g}" for p in order)
        agrees = order[0].M == best.M
        said.append(
            f"The pilots ({order[0].rounds} rounds, training loss by M, each at its best rate) "
            + ("agree" if agrees else f"disagree, and are believed: theory's constants are loose, M = {order[0].M} won")
            + f": {results}."
        )
    else:
        said.append("This is an upper bound's advice: --pilot checks it by short runs.")
    said += clusterings_verdict(advice)
    if error := max(choice.error for choice in advice.choices + advice.others):
        said.append(f"Standard errors of H_cluster are {error:.2g} or less.")
    return said


def clusterings_verdict(advice: Advice) -> list[str]:
    """Which clusters to take at the M to take."""
    if advice.take == 1:
        return ["With one cluster of all devices there is nothing to cluster, and H_cluster is 0."]
    if not advice.others:
        return []
    plain = next(choice for choice in advice.others if choice.name == "random")
    better = min(advice.others, key=lambda choice: choice.H_cluster)
    if better is plain:
        return [f"At M = {advice.take}, no clusters have a smaller H_cluster than random ones, {plain.H_cluster:.3g}."]
    return [
        f"At M = {advice.take}, clusters that are {better.name}, have H_cluster {better.H_cluster:.3g}; "
        f"random ones have {plain.H_cluster:.3g}"
        + (f", and cohorts add {better.sampling:.3g} to either." if better.sampling > better.H_cluster else ".")
    ]


def table(choices: list[Choice], first: str) -> Cells:
    """By clustering: what H_cluster, cohorts and batches add to C, and what the bound makes of it. Where M is the same
    for all, so is the cohort."""
    columns = [first[:12], "H_cluster", "cohorts", "V", "C/√M", "+ cohorts"]
    rows = [
        [
            choice.name,
            *(f"{value:.3g}" for value in (choice.H_cluster, choice.sampling, choice.V)),
            *(f"{height:.3g}" for height in (choice.height, choice.cohort_height)),
        ]
        for choice in choices
    ]
    if len({choice.M for choice in choices}) > 1:
        columns.insert(1, "cohort")
        for row, choice in zip(rows, choices, strict=True):
            row.insert(1, f"{choice.cohort:.4g}")
    return columns, rows


def write(advice: Advice, participation: float, out: Path) -> list[Path]:
    """advice.json and the curve."""
    out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = asdict(advice) | {"verdict": verdict(advice, participation)}
    write_atomically(out / "advice.json", json.dumps(report, indent=2) + "\n")
    picture(advice, participation, out / "advice.png")
    return [out / "advice.json", out / "advice.png"]


def picture(advice: Advice, participation: float, path: Path) -> None:
    """C / sqrt(M) over M with its minimum, and what C consists of."""
    figure, (left, right) = canvas(2, 10.5, 3.9)
    M = [choice.M for choice in advice.choices]
    curves = [("all of a cluster take part", "#0072B2", [choice.height for choice in advice.choices])]
    if participation < 1:
        name = f"cohorts: {participation:g} of a cluster"
        curves.append((name, "#D55E00", [choice.cohort_height for choice in advice.choices]))
    for name, colour, heights in curves:
        low = heights.index(min(heights))
        left.plot(M, heights, "o-", color=colour, lw=1.8, ms=4, label=name)
        left.plot(M[low], heights[low], "o", ms=11, mfc="none", mew=1.8, color=colour)
        left.annotate(f"M = {M[low]}", (M[low], heights[low]), (0, -18), textcoords="offset points", ha="center")
    left.set(title="the bound's C / sqrt(M); circles: least", xlabel="M, clusters", xscale="log", yscale="log")
    left.margins(y=0.2)
    log_ticks(left.yaxis, (1, 1.5, 2, 3, 5, 7))
    left.legend(frameon=False)
    for name, colour, values in (
        ("H_cluster", "#0072B2", [choice.H_cluster for choice in advice.choices]),
        ("cohorts add", "#D55E00", [choice.sampling for choice in advice.choices]),
        ("V (batches)", "#E69F00", [choice.V for choice in advice.choices]),
    ):
        shown = [(m, value) for m, value in zip(M, values, strict=True) if value > 1e-9]
        if shown:
            right.plot(*zip(*shown, strict=True), "o-", color=colour, lw=1.8, ms=4, label=name)
    right.set(title="what grows with M", xlabel="M, clusters", xscale="log", yscale="log")
    right.legend(frameon=False)
    for ax in (left, right):
        ax.set_xticks(M, [str(m) for m in M])
        ax.minorticks_off()
        ax.grid(alpha=0.25)
    save(figure, path)
