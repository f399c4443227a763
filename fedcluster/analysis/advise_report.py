"""The output of `fedcluster advise`: sentences, tables, advice.json and the plot."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedcluster.analysis.advise import Advice, Candidate
from fedcluster.analysis.analyze_report import Cells
from fedcluster.figures import canvas, save
from fedcluster.files import write_atomically
from fedcluster.runs.plots import log_ticks

MOMENTUM = (
    'Also recommended: server.optimizer = "round_momentum". At the same bytes it lowered the training loss by 46 to '
    "49 % on MNIST and by 10 to 21 % on CIFAR-10, with server.betas = [0.7, 0.99] and half of the learning rate or "
    "less (docs/beyond-the-paper)."
)


def verdict(advice: Advice, participation: float) -> list[str]:
    """Which M is recommended, and why."""
    best = min(advice.candidates, key=lambda candidate: candidate.cohort_score)
    full = min(advice.candidates, key=lambda candidate: candidate.score)
    sentences = [f"Recommended: M = {advice.recommended}."]
    if participation < 1 and full.M != best.M:
        sentences.append(
            f"C / sqrt(M) is smallest at M = {full.M} if all devices of a cluster take part, as in the theorem; "
            f"with participation {participation:g}, at M = {best.M}."
        )
    else:
        sentences.append(f"C / sqrt(M) is smallest at M = {best.M}.")
    at_low = min(advice.candidates, key=lambda candidate: candidate.C_low / math.sqrt(candidate.M))
    if at_low.M != best.M:
        sentences.append(
            f"It is a close call: L is between {advice.L.low:.3g} and {advice.L.high:.3g}, and at the lower end "
            f"M = {at_low.M} would be best."
        )
    sentences.append(
        f"With participation {participation:g}, M = {advice.candidates[-1].M} is the most that leaves every cohort a "
        "device."
    )
    if advice.pilots:
        ranked = sorted(advice.pilots, key=lambda pilot: pilot.loss)
        results = ", ".join(f"M = {p.M}: {p.loss:.4f} at rate {p.lr:g}" for p in ranked)
        agree = ranked[0].M == best.M
        sentences.append(
            f"The pilots ({ranked[0].rounds} rounds, training loss of each M at its best rate) "
            + (
                "agree"
                if agree
                else f"disagree and decide, because the theorem's constants are loose: M = {ranked[0].M}"
            )
            + f": {results}."
        )
    else:
        sentences.append("This rests on an upper bound: --pilot checks it with short runs.")
    sentences += alternatives_verdict(advice)
    if error := max(candidate.error for candidate in advice.candidates + advice.alternatives):
        sentences.append(f"The standard error of H_cluster is at most {error:.2g}.")
    if advice.round_momentum:
        sentences.append(MOMENTUM)
    return sentences


def alternatives_verdict(advice: Advice) -> list[str]:
    """Which clustering has the smallest H_cluster at the recommended M."""
    if advice.recommended == 1:
        return ["With one cluster there is nothing to choose between clusterings, and H_cluster is 0."]
    if not advice.alternatives:
        return []
    random = next(candidate for candidate in advice.alternatives if candidate.name == "random")
    best = min(advice.alternatives, key=lambda candidate: candidate.H_cluster)
    if best is random:
        return [f"At M = {advice.recommended}, random clusters have the smallest H_cluster, {random.H_cluster:.3g}."]
    return [
        f"At M = {advice.recommended}, H_cluster is {best.H_cluster:.3g} for clusters that are {best.name}, and "
        f"{random.H_cluster:.3g} for random ones"
        + (
            f"; sampled cohorts add {best.sampling:.3g} and {random.sampling:.3g}."
            if best.sampling > best.H_cluster
            else "."
        )
    ]


def table(candidates: list[Candidate], first: str) -> Cells:
    """The terms of C and the score of each candidate. The mean cohort is shown where M differs."""
    columns = [first[:12], "H_cluster", "cohorts", "V", "C/√M", "+ cohorts"]
    rows = [
        [
            candidate.name,
            *(f"{value:.3g}" for value in (candidate.H_cluster, candidate.sampling, candidate.V)),
            *(f"{score:.3g}" for score in (candidate.score, candidate.cohort_score)),
        ]
        for candidate in candidates
    ]
    if len({candidate.M for candidate in candidates}) > 1:
        columns.insert(1, "cohort")
        for row, candidate in zip(rows, candidates, strict=True):
            row.insert(1, f"{candidate.cohort:.4g}")
    return columns, rows


def write(advice: Advice, participation: float, out: Path) -> list[Path]:
    """Write advice.json and the plot."""
    out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = asdict(advice) | {"verdict": verdict(advice, participation)}
    write_atomically(out / "advice.json", json.dumps(report, indent=2) + "\n")
    plot(advice, participation, out / "advice.png")
    return [out / "advice.json", out / "advice.png"]


def plot(advice: Advice, participation: float, path: Path) -> None:
    """Plot C / sqrt(M) over M with its minimum, and the terms of C."""
    figure, (left, right) = canvas(2, 10.5, 3.9)
    M = [candidate.M for candidate in advice.candidates]
    curves = [("all devices of a cluster take part", "#0072B2", [candidate.score for candidate in advice.candidates])]
    if participation < 1:
        scores = [candidate.cohort_score for candidate in advice.candidates]
        curves.append((f"participation {participation:g}", "#D55E00", scores))
    for name, colour, scores in curves:
        best = scores.index(min(scores))
        left.plot(M, scores, "o-", color=colour, lw=1.8, ms=4, label=name)
        left.plot(M[best], scores[best], "o", ms=11, mfc="none", mew=1.8, color=colour)
        left.annotate(f"M = {M[best]}", (M[best], scores[best]), (0, -18), textcoords="offset points", ha="center")
    left.set(title="C / sqrt(M) of the bound (circle: minimum)", xlabel="M, clusters", xscale="log", yscale="log")
    left.margins(y=0.2)
    log_ticks(left.yaxis, (1, 1.5, 2, 3, 5, 7))
    left.legend(frameon=False)
    for name, colour, values in (
        ("H_cluster", "#0072B2", [candidate.H_cluster for candidate in advice.candidates]),
        ("sampled cohorts", "#D55E00", [candidate.sampling for candidate in advice.candidates]),
        ("V (batches)", "#E69F00", [candidate.V for candidate in advice.candidates]),
    ):
        visible = [(m, value) for m, value in zip(M, values, strict=True) if value > 1e-9]
        if visible:
            right.plot(*zip(*visible, strict=True), "o-", color=colour, lw=1.8, ms=4, label=name)
    right.set(title="terms of C", xlabel="M, clusters", xscale="log", yscale="log")
    right.legend(frameon=False)
    for ax in (left, right):
        ax.set_xticks(M, [str(m) for m in M])
        ax.minorticks_off()
        ax.grid(alpha=0.25)
    save(figure, path)
