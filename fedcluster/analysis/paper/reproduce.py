"""The paper's figures from one command: runs that resume, the data, a plot and verdicts on the claims."""

import json
import time
from pathlib import Path
from typing import NamedTuple

from fedcluster.analysis.jobs import Job, run_all
from fedcluster.analysis.names import FIGURES, PAPER_AXES
from fedcluster.analysis.paper import choices, plots, table
from fedcluster.analysis.paper.claims import Histories, Verdict, judge, questions
from fedcluster.analysis.paper.figures import FEDAVG, TITLES, Curve, Panel, experiment, panels, rate
from fedcluster.analysis.paper.table import Runs
from fedcluster.analysis.tuning import best_rates
from fedcluster.errors import BadExperiment, Diverged
from fedcluster.experiment import Experiment, parse, read
from fedcluster.files import write_atomically
from fedcluster.reporting import Say
from fedcluster.runs.metrics import Line, read_lines
from fedcluster.runs.progress import Progress, duration
from fedcluster.training.executors.in_process import InProcess
from fedcluster.training.setup import prepare
from fedcluster.training.threads import repeatable


class Settings(NamedTuple):
    """What all figures of a folder have in common."""

    scale: str
    lr: str
    seeds: int

    def __str__(self) -> str:
        model = choices.SCALES[self.scale].model
        seeds = f"{self.seeds} seeds (band: lowest to highest)" if self.seeds > 1 else "one seed"
        return f"{choices.MODELS.get(model, model)}, {seeds}, {choices.RATES[self.lr]}"


def reproduce(
    figures: list[str],
    scale: str,
    rates: str,
    seeds: int | None,
    x: str,
    out: Path,
    workers: int,
    progress: Progress,
    say: Say,
) -> list[Verdict]:
    """Run what the figures need, plot each as soon as its data are complete, and judge the claims from all figures in
    `out`. A run that several figures share is run once. Runs that are finished in `out` are not repeated, and a figure
    whose data are there needs none."""
    known = scale in choices.SCALES and rates in choices.RATES and x in PAPER_AXES and set(figures) <= set(FIGURES)
    if not known:
        raise BadExperiment(
            f"cannot reproduce {', '.join(figures)} at scale {scale}, rates {rates}, over {x}: figures are "
            f"{', '.join(FIGURES)} or all, scales {', '.join(choices.SCALES)}, rates {', '.join(choices.RATES)}, "
            f"axes {', '.join(PAPER_AXES)}"
        )
    seeds = seeds or choices.SCALES[scale].seeds
    settings = Settings(scale, rates, seeds)
    check_folder(out, settings)
    out.mkdir(parents=True, exist_ok=True)
    wanted = {figure: panels(figure, scale) for figure in figures}
    for figure in [figure for figure, found in wanted.items() if not found]:
        say(f"{figure} needs CIFAR-10, which is not part of scale {scale}")
        del wanted[figure]
    data = {figure: out / f"{figure}.csv" for figure in wanted}
    to_run = {figure: found for figure, found in wanted.items() if not data[figure].exists()}
    best = tune(to_run, scale, out, workers, progress) if rates == "tuned" else {}
    jobs = {
        (panel, curve, seed): job(with_rate(experiment(panel, curve, scale, rates, seed), best.get((panel, curve))))
        for found in to_run.values()
        for panel in found
        for curve in panel.curves
        for seed in range(seeds)
    }
    if jobs:
        say(forecast(list(jobs.values()), out, workers))
    verdicts: list[Verdict] = []
    for figure, found in wanted.items():
        if figure in to_run:
            mine = {key: one for key, one in jobs.items() if key[0].figure == figure}
            write_atomically(data[figure], run_figure(figure, mine, out / "runs", workers, progress, say))
        else:
            say(f"{figure} is plotted from {data[figure]}")
        runs = table.curves(data[figure], found, seeds)
        verdicts = write_verdicts(out, settings)
        path = out / (f"{figure}.png" if x == "rounds" else f"{figure}-{x}.png")
        plots.draw(found, runs, x, f"{TITLES[figure]}: {settings}", path)
    return verdicts


def run_figure(
    figure: str,
    jobs: dict[tuple[Panel, Curve, int], Job],
    out: Path,
    workers: int,
    progress: Progress,
    say: Say,
) -> str:
    """Run a figure; its data as CSV."""
    histories = run_all(list(jobs.values()), out, workers, lambda done, total: progress(figure, done, total))
    runs: Runs = {}
    for (panel, curve, _), one in jobs.items():
        lines = complete(histories[one.name], out / one.name, curve, say)
        runs.setdefault((panel, curve), []).append(lines)
    panels = list(dict.fromkeys(panel for panel, _ in runs))
    return table.to_csv(panels, runs, lambda panel, curve: jobs[panel, curve, 0].experiment.local.lr)


def check_folder(out: Path, settings: Settings) -> None:
    try:
        there = json.loads((out / "verdicts.json").read_bytes())
        same = Settings(there["scale"], there["lr"], there["seeds"]) == settings
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError):
        same = False
    if not same:
        raise BadExperiment(f"--out: {out} has figures of another scale, other rates or seeds: choose another folder")


def write_verdicts(out: Path, settings: Settings) -> list[Verdict]:
    """Judge the claims from every figure in `out`, and write the verdicts."""
    histories: Histories = {}
    for path in [out / f"{figure}.csv" for figure in FIGURES]:
        if path.exists():
            histories |= table.read(path)
    claims, own = judge(histories), questions(histories)
    parts = {"claims": [v.numbers() for v in claims], "questions": [v.numbers() for v in own]}
    record = settings._asdict() | parts
    write_atomically(out / "verdicts.json", json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    write_atomically(out / "verdicts.md", markdown(claims, own, str(settings)))
    write_atomically(out / "choices.md", choices.unsaid(*settings))
    return claims + own


def job(described: Experiment) -> Job:
    """A run named by its experiment's digest, so that figures share it."""
    return Job(f"{described.data.name}-{described.digest()[:12]}-seed{described.seed}", described)


def with_rate(described: Experiment, lr: float | None) -> Experiment:
    return described if lr is None else described.override(**{"local.lr": lr})


def tune(
    wanted: dict[str, list[Panel]], scale: str, out: Path, workers: int, progress: Progress
) -> dict[tuple[Panel, Curve], float]:
    """Each curve's best learning rate, on seeds that are not used again, searched from the paper's for FedAvg."""
    curves = [(panel, curve) for found in wanted.values() for panel in found for curve in panel.curves]
    best = best_rates(
        {(panel, curve): rate(panel, FEDAVG, "paper") for panel, curve in curves},
        lambda key, lr, seed: job(with_rate(experiment(*key, scale, "paper", seed), lr)),
        out / "runs",
        workers,
        progress,
    )
    return {key: found.lr for key, found in best.items()}


def complete(lines: list[Line] | Diverged, folder: Path, curve: Curve, say: Say) -> list[Line]:
    """A run's curve. A run that diverged has learned nothing: its remaining rounds have the scores of the start."""
    if not isinstance(lines, Diverged):
        return lines
    say(f"{curve.label} diverged in {folder.name}: {lines}")
    start = {"round": 0, **json.loads((folder / "run.json").read_bytes())["start"]}
    done = read_lines(folder / "metrics.jsonl")
    rounds = parse(read(folder / "experiment.toml"), str(folder))["rounds"]
    last = done[-1] if done else {}
    return [start, *done, *(last | start | {"round": j} for j in range(len(done) + 1, rounds + 1))]


def forecast(jobs: list[Job], out: Path, workers: int) -> str:
    """The number of runs left and an estimate of their time, from one device's training on each data set."""
    left = {one.name: one for one in jobs if not (out / "runs" / one.name / "model.safetensors").exists()}
    seconds, cost = 0.0, dict[tuple[str, str], float]()
    for one in left.values():
        described = one.experiment
        kind = (str(described.data.name), described.local.optimizer)
        if kind not in cost:
            cost[kind] = seconds_a_round(described.override(method="fedcluster"))
        seconds += cost[kind] * described.rounds
    return f"{len(left)} runs to do, about {duration(seconds / workers)} on {workers} process{'es' * (workers > 1)}"


def seconds_a_round(described: Experiment) -> float:
    """The seconds of a round on one core: the second training of a device, times the devices of a round, and a test."""
    with repeatable():
        setup = prepare(described)
        here = setup.executor
        assert isinstance(here, InProcess)
        sent = setup.algorithm.broadcast(setup.start)
        here.train_device(0, (0, 0, 0), sent, None)
        began = time.perf_counter()
        here.train_device(0, (0, 0, 1), sent, None)
        each = time.perf_counter() - began
        began = time.perf_counter()
        setup.evaluate(setup.start.model)
        return each * setup.schedule.cohort_size() + time.perf_counter() - began


EXPLAINED = """Lower by: the training loss of what the claim favours, on (geometric) average over the rounds, or what
the claim names (test errors, the loss after the last round, the rounds to the same loss); with Student's 95 % interval
over paired seeds.
"""


def markdown(claims: list[Verdict], own: list[Verdict], how: str) -> str:
    """The verdicts as tables."""
    lines = [f"# Verdicts\n\n{how}.\n{EXPLAINED}"]
    for title, found in (("The paper's claims", claims), ("Our own questions", own)):
        lines += [
            f"## {title}\n",
            "| figure | claim | verdict | lower by | 95 % interval |",
            "| --- | --- | --- | ---: | ---: |",
        ]
        for v in found:
            lines.append(f"| {v.figure} | {v.claim} | **{v.verdict}** | {' | '.join(v.lower())} |")
        lines.append("")
    return "\n".join(lines)
