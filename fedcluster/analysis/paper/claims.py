"""The paper's claims, each tested by a paired statistic over seeds.

The advantage of one curve over another is the mean over rounds of ln(their loss / our loss): 0.1 means that the loss is
about a tenth lower on average. Seeds are paired: the two curves of a pair have the same fleet and start. The interval
is Student's at 95 %. Reports say how much lower the loss is, 1 - exp(-advantage). Some questions are about the loss
after the last round, test errors or the number of rounds to the same loss, measured in the same way.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import exp, inf, log, sqrt
from statistics import fmean, stdev
from typing import Any

from fedcluster.analysis.paper.choices import NAMES
from fedcluster.runs.metrics import Line

REPRODUCED, FAILED, UNDECIDED = "reproduced", "not reproduced", "undecided"
ANSWERS = {REPRODUCED: "yes", FAILED: "no", UNDECIDED: UNDECIDED}
COMPARABLE = 0.1  # the largest advantage of comparable curves

Measure = Callable[[Sequence[Line], Sequence[Line]], float]
Histories = dict[tuple[str, str, str], list[list[Line]]]
"""Curves by (data, panel, label), one for each seed."""


@dataclass(frozen=True)
class Verdict:
    """The result for a claim: the effect with its interval, and the number of seeds."""

    figure: str
    claim: str
    verdict: str
    effect: float
    low: float
    high: float
    seeds: int

    def lower(self) -> tuple[str, str]:
        """How much lower the loss (or what the claim names) is, in percent, and its interval, which needs two seeds."""
        effect, low, high = (f"{100 * (1 - exp(-value)):+.1f}" for value in (self.effect, self.low, self.high))
        return f"{effect} %", f"{low} to {high}" if self.seeds > 1 else "-"

    def numbers(self) -> dict[str, Any]:
        """The fields for JSON, which has no infinite numbers."""
        return asdict(self) | ({} if self.seeds > 1 else {"low": None, "high": None})


def lower(ours: Sequence[Line], theirs: Sequence[Line], score: Callable[[Line], float]) -> float:
    """The mean over rounds of the logarithm of their score over ours."""
    pairs = zip(ours[1:], theirs[1:], strict=True)
    return fmean(log(max(score(b), 1e-12) / max(score(a), 1e-12)) for a, b in pairs)


def advantage(ours: Sequence[Line], theirs: Sequence[Line]) -> float:
    """How much lower our training loss is."""
    return lower(ours, theirs, lambda line: line["train_loss"])


def last_advantage(ours: Sequence[Line], theirs: Sequence[Line]) -> float:
    """How much lower it is after the last round."""
    return advantage(ours[-2:], theirs[-2:])


def fewer_errors(ours: Sequence[Line], theirs: Sequence[Line]) -> float:
    """How much lower our test error is."""
    return lower(ours, theirs, lambda line: 1 - line["test_accuracy"])


def rounds_saved(ours: Sequence[Line], theirs: Sequence[Line]) -> float:
    """The logarithm of their rounds over ours to the lowest training loss that both reach."""
    one, other = ([line["train_loss"] for line in lines] for lines in (ours, theirs))
    target = max(min(one[1:]), min(other[1:]))
    return log(max(rounds_to(other, target), 1.0) / max(rounds_to(one, target), 1.0))


def rounds_to(losses: Sequence[float], target: float) -> float:
    """The round in which the training loss first reaches the target, interpolated."""
    for done, (before, after) in enumerate(pairwise(losses)):
        if after <= target:
            return done + (before - target) / (before - after) if before > target else float(done)
    return inf


def interval(effects: Sequence[float]) -> tuple[float, float, float]:
    """Mean and Student's 95 % interval; infinite for a single seed."""
    from scipy.stats import t

    mean = fmean(effects)
    if len(effects) < 2:
        return mean, -inf, inf
    half = float(t.ppf(0.975, len(effects) - 1)) * stdev(effects) / sqrt(len(effects))
    return mean, mean - half, mean + half


def larger(figure: str, claim: str, effects: Sequence[float]) -> Verdict:
    """The claim that the effect is above zero."""
    mean, low, high = interval(effects)
    verdict = REPRODUCED if low > 0 else FAILED if high < 0 else UNDECIDED
    return Verdict(figure, claim, verdict, mean, low, high, len(effects))


def comparable(figure: str, claim: str, effects: Sequence[float]) -> Verdict:
    """The claim that the effect is within COMPARABLE of zero."""
    mean, low, high = interval(effects)
    inside, outside = low > -COMPARABLE and high < COMPARABLE, low > COMPARABLE or high < -COMPARABLE
    return Verdict(
        figure, claim, REPRODUCED if inside else FAILED if outside else UNDECIDED, mean, low, high, len(effects)
    )


def all_of(figure: str, claim: str, parts: Sequence[Verdict]) -> Verdict:
    """The claim that every part holds. Its effect is the smallest of the parts that decide it."""
    verdicts = {part.verdict for part in parts}
    verdict = FAILED if FAILED in verdicts else UNDECIDED if UNDECIDED in verdicts else REPRODUCED
    least = min((part for part in parts if part.verdict == verdict), key=lambda part: part.effect)
    return replace(least, figure=figure, claim=claim)


def mean_over(panels: Sequence[list[float]]) -> list[float]:
    """The mean of an effect over several panels, for each seed."""
    return [fmean(effects) for effects in zip(*panels, strict=True)]


AVG, CLUSTER, CONTROL = "FedAvg", "FedCluster", "small cohorts, no clusters"
FIVE, TEN, TWENTY = (f"FedCluster, M = {m}" for m in (5, 10, 20))


def judge(histories: Histories) -> list[Verdict]:
    """Every claim for which there are runs."""
    return [
        *every_panel(histories, "fig2", "cifar10", "at every ρ_device"),
        *every_panel(histories, "fig3", "mnist", "at every ρ_device"),
        *every_panel(histories, "fig4", "cifar10", "with every local optimizer"),
        *every_panel(histories, "fig4", "mnist", "with every local optimizer"),
        *numbers_of_clusters(histories),
        *clusters_heterogeneity(histories),
        *complexity(histories, "the advantage over FedAvg is larger on CIFAR-10 than on MNIST"),
    ]


def faster(
    histories: Histories, data: str, panel: str, ours: str, theirs: str, measure: Measure = advantage
) -> list[float]:
    """The advantage of one curve over another, for each seed."""
    pairs = zip(histories[data, panel, ours], histories[data, panel, theirs], strict=True)
    return [measure(a, b) for a, b in pairs]


def panels_of(histories: Histories, figure: str, data: str) -> list[str]:
    """The panels of a figure on this data for which there are runs."""
    return list(dict.fromkeys(panel for d, panel, _ in histories if d == data and panel.startswith(f"{figure} ")))


def each_panel(histories: Histories, figure: str, data: str, measure: Measure = advantage) -> list[Verdict]:
    """FedCluster against FedAvg in each panel."""
    return [
        larger(
            figure,
            f"{NAMES[data]}, {panel.partition(' ')[2]}: FedCluster is faster than FedAvg",
            faster(histories, data, panel, CLUSTER, AVG, measure),
        )
        for panel in panels_of(histories, figure, data)
    ]


def every_panel(histories: Histories, figure: str, data: str, where: str) -> list[Verdict]:
    """FedCluster against FedAvg in each panel, and in all of them."""
    each = each_panel(histories, figure, data)
    return each and [*each, all_of(figure, f"{NAMES[data]}: FedCluster is faster {where}", each)]


def numbers_of_clusters(histories: Histories) -> list[Verdict]:
    verdicts = []
    if panels_of(histories, "fig5", "cifar10"):
        each = more_clusters(histories, "cifar10")
        verdicts += [*each, all_of("fig5", "CIFAR-10: larger M is faster", each)]
    if panels_of(histories, "fig5", "mnist"):
        five = mean_faster(histories, "mnist", FIVE, AVG)
        verdicts.append(comparable("fig5", "MNIST: 5 clusters are comparable to FedAvg", five))
        verdicts += [
            larger("fig5", f"MNIST: {M} clusters are faster than FedAvg", mean_faster(histories, "mnist", ours, AVG))
            for M, ours in ((10, TEN), (20, TWENTY))
        ]
    return verdicts


def mean_faster(histories: Histories, data: str, ours: str, theirs: str) -> list[float]:
    """The advantage in figure 5, on average over both ρ_device."""
    return mean_over([faster(histories, data, panel, ours, theirs) for panel in panels_of(histories, "fig5", data)])


def more_clusters(histories: Histories, data: str) -> list[Verdict]:
    return [
        larger("fig5", f"{NAMES[data]}: M = 10 is faster than M = 5", mean_faster(histories, data, TEN, FIVE)),
        larger("fig5", f"{NAMES[data]}: M = 20 is faster than M = 10", mean_faster(histories, data, TWENTY, TEN)),
    ]


def clusters_heterogeneity(histories: Histories) -> list[Verdict]:
    verdicts = []
    for data, name in NAMES.items():
        for panel in panels_of(histories, "fig6", data):
            low, middle, high = (f"FedCluster, ρ_cluster = {share}" for share in (0.1, 0.5, 0.9))
            steps = [
                larger(
                    "fig6", f"{name}: ρ_cluster 0.1 is faster than 0.5", faster(histories, data, panel, low, middle)
                ),
                larger(
                    "fig6", f"{name}: ρ_cluster 0.5 is faster than 0.9", faster(histories, data, panel, middle, high)
                ),
            ]
            verdicts += [*steps, all_of("fig6", f"{name}: smaller ρ_cluster is faster", steps)]
            against = [
                larger("fig6", f"{name}: {ours} is faster than FedAvg", faster(histories, data, panel, ours, AVG))
                for ours in (low, middle, high)
            ]
            verdicts += [
                *against,
                all_of("fig6", f"{name}: FedCluster is faster than FedAvg at every ρ_cluster", against),
            ]
    return verdicts


def complexity(histories: Histories, claim: str, measure: Measure = advantage) -> list[Verdict]:
    """The advantage over FedAvg on CIFAR-10 minus that on MNIST, if there are runs on both."""
    cifar, mnist = panels_of(histories, "fig2", "cifar10"), panels_of(histories, "fig3", "mnist")
    if not cifar or not mnist:
        return []
    one = mean_over([faster(histories, "cifar10", panel, CLUSTER, AVG, measure) for panel in cifar])
    other = mean_over([faster(histories, "mnist", panel, CLUSTER, AVG, measure) for panel in mnist])
    return [larger("fig2, fig3", claim, [a - b for a, b in zip(one, other, strict=True)])]


def questions(histories: Histories) -> list[Verdict]:
    """Questions beyond the paper's claims: what do clusters add to small cohorts, does the advantage grow with
    heterogeneity, as the theory predicts, does it last, and does it depend on the measure?"""
    verdicts = []
    for figure, data in (("fig2", "cifar10"), ("fig3", "mnist")):
        panels, name = panels_of(histories, figure, data), NAMES[data]
        if panels:
            both = mean_over([faster(histories, data, panel, CLUSTER, CONTROL) for panel in panels])
            cohorts = mean_over([faster(histories, data, panel, CONTROL, AVG) for panel in panels])
            little, *_, much = (faster(histories, data, panel, CLUSTER, AVG) for panel in panels)
            more = [b - a for a, b in zip(little, much, strict=True)]
            errors, last = (each_panel(histories, figure, data, measure) for measure in (fewer_errors, last_advantage))
            verdicts += [
                larger(figure, f"{name}: small cohorts without clusters beat FedAvg", cohorts),
                larger(figure, f"{name}: clusters beat small cohorts without them", both),
                larger(figure, f"{name}: the advantage is larger at ρ_device = 0.9 than at 0.1", more),
                all_of(figure, f"{name}, test errors: FedCluster makes fewer at every ρ_device", errors),
                all_of(figure, f"{name}, after the last round: FedCluster is ahead at every ρ_device", last),
            ]
    for data, name in NAMES.items():
        if last := each_panel(histories, "fig4", data, last_advantage):
            claim = f"{name}, after the last round: FedCluster is ahead with every local optimizer"
            verdicts.append(all_of("fig4", claim, last))
    if panels_of(histories, "fig5", "cifar10"):
        five = mean_faster(histories, "cifar10", FIVE, AVG)
        verdicts.append(larger("fig5", "CIFAR-10: 5 clusters are faster than FedAvg", five))
    if panels_of(histories, "fig5", "mnist"):
        verdicts += more_clusters(histories, "mnist")
    verdicts += complexity(histories, "rounds to the same loss: FedCluster saves more on CIFAR-10", rounds_saved)
    return [replace(one, verdict=ANSWERS[one.verdict]) for one in verdicts]
