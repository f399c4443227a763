"""What [privacy] of an experiment costs, before anything is trained: `fedcluster privacy`."""

import csv
import io
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedcluster.errors import BadExperiment
from fedcluster.experiment import Experiment
from fedcluster.figures import BLUE, GREY, canvas, save, whole_numbers
from fedcluster.files import write_atomically
from fedcluster.privacy.bands import deviation_of_sum
from fedcluster.privacy.mechanism import Mechanism
from fedcluster.runs.progress import Display
from fedcluster.training.setup import prepare

TARGETS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
STEPS = (1, 2, 5)  # rounds that are shown: these, ten times these, ...
POINTS = 16  # of the curve
ORANGE = "#D55E00"


@dataclass(frozen=True)
class Cost:
    """The noise of a way to train at the same epsilon. `cycle`: the deviation of the noise on a cycle's mean movement,
    in units of the clip. `round` and `run`: noise over the movement of a round and of the whole run, as multiples of
    FedAvg's; the movements of M cycles add up to M times that of one."""

    name: str
    cycle: float
    round: float
    run: float


@dataclass(frozen=True)
class PrivacyReport:
    """`epsilons` by round, the noise multiplier for `targets`, and what cycling costs, which only noise of the server
    does. `expected` is the mean size of a cohort."""

    mechanism: Mechanism
    rounds: int
    expected: float
    epsilons: list[tuple[int, float]]
    targets: Sequence[tuple[float, float | None]]
    costs: list[Cost]


def build(experiment: Experiment, display: Display) -> PrivacyReport:
    if experiment.differential_privacy is None:
        raise BadExperiment(
            "there is no differential privacy in this experiment: give privacy.epsilon (or noise_multiplier), "
            "privacy.delta and privacy.clip, for example -o privacy.epsilon=8 -o privacy.delta=1e-6 -o privacy.clip=1"
        )
    setup = prepare(experiment, display.say, track=display.track)
    mechanism, rounds = setup.privacy, experiment.rounds
    assert mechanism is not None, "the section is there"
    cycles = setup.schedule.round(0)
    expected = sum(cycle.expected for cycle in cycles) / len(cycles)
    shown = sorted({*milestones(rounds), *(1 + (rounds - 1) * k // POINTS for k in range(POINTS + 1))})
    epsilons = [(j, mechanism.epsilon(j)) for j in display.track(shown, "epsilon by round", "points")]
    others = display.track(range(len(TARGETS)), "noise for other budgets", "budgets")
    targets = [(TARGETS[k], noise_for(mechanism, TARGETS[k], rounds)) for k in others]
    costs = costs_of(mechanism, rounds, len(cycles), expected) if mechanism.central else []
    return PrivacyReport(mechanism, rounds, expected, epsilons, targets, costs)


def milestones(rounds: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... and the last round."""
    powers = range(len(str(rounds)))
    return sorted({rounds, *(step * 10**power for power in powers for step in STEPS if step * 10**power < rounds)})


def noise_for(mechanism: Mechanism, epsilon: float, rounds: int) -> float | None:
    """The least noise multiplier; None where there is none in the range of the accountant."""
    try:
        return mechanism.accountant.noise_multiplier(epsilon, Counter(mechanism.rounds_spent(rounds)))
    except BadExperiment:
        return None


def costs_of(mechanism: Mechanism, rounds: int, clusters: int, expected: float) -> list[Cost]:
    """FedAvg, which asks the devices of all clusters at once, and FedCluster with one band and with several."""
    z = mechanism.noise_multiplier
    costs = [Cost("FedAvg, all at once", z / (expected * clusters), 1.0, 1.0)]
    if clusters == 1:
        return costs
    for bands in sorted({1, 2, max(2, clusters // 2), clusters, mechanism.bands}):
        name = f"{clusters} clusters" if bands == 1 else f"{clusters} clusters, {bands} bands"
        round = deviation_of_sum(bands, clusters, before=min(10 * clusters, (rounds - 1) * clusters))
        run = deviation_of_sum(bands, min(rounds, 1000) * clusters) / math.sqrt(min(rounds, 1000))
        own = deviation_of_sum(bands, 1, before=10 * clusters)
        costs.append(Cost(name, z * own / expected, round, run))
    return costs


def headline(report: PrivacyReport) -> list[str]:
    mechanism, said = report.mechanism, report.mechanism.describe(report.rounds)
    rate = mechanism.schedule.options.participation
    if mechanism.central:
        said.append(
            f"A round touches a device at most once, at rate {rate:g}, so {report.rounds:,} rounds are "
            f"{report.rounds:,} sampled Gaussian mechanisms. A cohort has {report.expected:g} devices on average."
        )
    if report.costs and len(report.costs) > 1 and mechanism.bands == 1:
        order = mechanism.schedule.options.order
        needs = "" if order in ("cyclic", "once") else f' and clusters.order = "cyclic" (now "{order}")'
        said.append(f'Bands need privacy.mechanism = "banded"{needs}. They cost no epsilon.')
    return said


def epsilon_table(report: PrivacyReport) -> tuple[list[str], list[list[str]]]:
    rows = [[f"{j:,}", number(epsilon)] for j, epsilon in report.epsilons if j in milestones(report.rounds)]
    return ["round", "epsilon"], rows


def target_table(report: PrivacyReport) -> tuple[list[str], list[list[str]]]:
    columns = ["epsilon", "noise / clip", "of a cohort's mean"]
    divisor = report.expected if report.mechanism.central else math.sqrt(report.expected)
    rows = [[f"{epsilon:g}", number(z), number(None if z is None else z / divisor)] for epsilon, z in report.targets]
    return columns, rows


def cost_table(report: PrivacyReport) -> tuple[list[str], list[list[str]]]:
    columns = ["at the same epsilon", "noise / clip, cycle", "noise / movement, round", "run"]
    rows = [[cost.name, number(cost.cycle), f"{cost.round:.2f}", f"{cost.run:.2f}"] for cost in report.costs]
    return columns, rows


def number(value: float | None) -> str:
    return "-" if value is None else "infinite" if math.isinf(value) else f"{value:.4g}"


def write(report: PrivacyReport, out: Path) -> list[Path]:
    """privacy.csv (all three tables) and privacy.png."""
    out.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.writer(text)
    for columns, rows in tables(report):
        writer.writerows([columns, *rows, []])
    write_atomically(out / "privacy.csv", text.getvalue())
    draw(report, out / "privacy.png")
    return [out / "privacy.csv", out / "privacy.png"]


def tables(report: PrivacyReport) -> Iterable[tuple[list[str], list[list[str]]]]:
    return [table for table in (epsilon_table(report), target_table(report), cost_table(report)) if table[1]]


def draw(report: PrivacyReport, path: Path) -> None:
    panels = 2 if len(report.costs) > 1 else 1
    figure, axes = canvas(panels, 4.8 * panels, 3.8)
    rounds, epsilons = zip(*report.epsilons, strict=True)
    axes[0].plot(rounds, epsilons, color=BLUE, linewidth=2)
    if budget := report.mechanism.section.epsilon:
        axes[0].axhline(budget, color=GREY, linestyle=":", linewidth=1)
        axes[0].annotate(
            f"budget {budget:g}", (rounds[0], budget), va="top", xytext=(0, -3), textcoords="offset points", color=GREY
        )
    whole_numbers(axes[0].xaxis)
    axes[0].set(xlabel="round", ylabel="epsilon spent", ylim=(0, None), xlim=(0, None))
    axes[0].set_title(f"What {report.rounds:,} rounds spend (delta {report.mechanism.section.delta:.1g})", fontsize=11)
    if panels == 2:
        names = [cost.name.replace(", ", ",\n") for cost in report.costs]
        for offset, values, colour, label in (
            (-0.19, [cost.round for cost in report.costs], ORANGE, "over a round"),
            (0.19, [cost.run for cost in report.costs], BLUE, "over the run"),
        ):
            at = [place + offset for place in range(len(names))]
            axes[1].bar(at, values, 0.36, color=colour, label=label)
            for x, value in zip(at, values, strict=True):
                axes[1].annotate(f"{value:.2f}", (x, value), ha="center", va="bottom", fontsize=8)
        axes[1].set_xticks(range(len(names)), names, fontsize=8)
        axes[1].set_ylabel("noise / movement, times FedAvg's")
        axes[1].set_title("What cycling costs at the same epsilon", fontsize=11)
        axes[1].legend(frameon=False)
    save(figure, path)
