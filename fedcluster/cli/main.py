"""The command line. Heavy imports wait until a command needs them, so that --help answers at once."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

import fedcluster
from fedcluster.allocator import keep_memory
from fedcluster.cli import federation
from fedcluster.cli.common import ExperimentFile, Out, Overrides, Resume, exit_on_error
from fedcluster.cli.own_commands import Commands

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Federated learning in which clusters of devices take turns within every round.",
    epilog="Exit codes: 0 done, 2 bad experiment or usage, 3 missing or bad data, 4 training diverged, "
    "5 output folder refused, 6 message budget exceeded, 7 a process lost, 8 server or devices not there, "
    "9 processes that do not compute alike, 10 out of memory or numbers, 11 a callback failed, "
    "130 interrupted, 143 terminated.",
)


class Cohorts(StrEnum):
    sequential = "sequential"
    stacked = "stacked"
    auto = "auto"


class Precision(StrEnum):
    float32 = "float32"
    bf16 = "bf16"


def version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedcluster {fedcluster.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    experiment: ExperimentFile,
    o: Overrides = None,
    out: Out = None,
    resume: Resume = False,
    workers: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Processes to train in. Default: one a core.", show_default=False),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda, cuda:1, ...")] = "cpu",
    cohorts: Annotated[
        Cohorts, typer.Option(help="Devices of a cohort one after the other, in one stack, or what is faster.")
    ] = Cohorts.sequential,
    precision: Annotated[
        Precision, typer.Option(help="Gradients in float32, or in mixed precision with bfloat16.")
    ] = Precision.float32,
    strict_budget: Annotated[
        bool, typer.Option("--strict-budget", help="Refuse algorithms that need more than one exchange a turn.")
    ] = False,
) -> None:
    """Train one experiment."""
    with exit_on_error("--resume"):
        from fedcluster.experiment import load

        described = load(experiment, o)
        from fedcluster.cli.tables import test_scores
        from fedcluster.runs.directory import fresh
        from fedcluster.training import run as training
        from fedcluster.training.executors.processes import cores

        if out is None and resume:
            raise typer.BadParameter("--resume needs --out, the folder to go on in")
        result = training.run(
            described,
            out or fresh(experiment.stem),
            resume,
            workers=workers or cores(),
            device=device,
            cohorts=cohorts.value,
            precision=precision.value,
            strict_budget=strict_budget,
        )
        if result.out is None:
            return  # torchrun's other ranks
        last = result.history[-1]
        if last["train_loss"] > 1000:  # of 10,000 classes, guessing has 9.2
            typer.echo(
                f"the training loss {last['train_loss']:.3g} is absurd: lower local.lr, or scale the data's features",
                err=True,
            )
        typer.echo(
            f"training loss {last['train_loss']:.4f}, {test_scores(last)}after "
            f"{last['round']} rounds, {last['device_updates']:,} device updates, {last['elapsed']:.0f} s"
        )
        typer.echo(f"picture: {result.out}/curves.png")


@app.command()
def compare(
    experiment: Annotated[
        Path | None, typer.Argument(metavar="[EXPERIMENT.toml]", help="Default: digits, embedded.", show_default=False)
    ] = None,
    o: Overrides = None,
    methods: Annotated[str, typer.Option(help="Which of them, separated by commas.")] = "fedavg,fedcluster,centralized",
    seeds: Annotated[int, typer.Option(help="How many seeds, from the experiment's own on.")] = 3,
    lr: Annotated[
        str, typer.Option(help="paper: FedAvg's rate is M times local.lr; equal; tuned: each its best.")
    ] = "paper",
    target: Annotated[
        float | None,
        typer.Option(help="Training loss to reach. Default: the highest last one of all runs.", show_default=False),
    ] = None,
    x: Annotated[
        str, typer.Option(help="Compare over rounds, aggregations, updates, bytes or, with a [clock], time.")
    ] = "rounds",
    out: Out = None,
    resume: Resume = False,
) -> None:
    """Train by several methods on the same fleet, start and budget."""
    with exit_on_error("--resume"):
        from fedcluster.cli import tables as report
        from fedcluster.experiment import load

        described = load(experiment or Path(__file__).with_name("demo.toml"), o)
        from fedcluster.analysis import compare as comparison
        from fedcluster.runs.directory import fresh
        from fedcluster.runs.progress import stages
        from fedcluster.training.executors.processes import cores

        if out is None and resume:
            raise typer.BadParameter("--resume needs --out, the folder to go on in")
        out = out or fresh(f"compare-{experiment.stem if experiment else 'digits'}")
        with stages() as progress:
            result = comparison.compare(
                described,
                [name.strip() for name in methods.split(",")],
                seeds,
                lr,
                target,
                out,
                resume,
                workers=cores(),
                progress=progress,
                x=x,
            )
        report.show(report.outcomes_table(result))
        for remark in report.verdict(result):
            typer.echo(remark)
        typer.echo(f"picture: {out}/curves.png")


@app.command()
def partition(experiment: ExperimentFile, o: Overrides = None, out: Out = None) -> None:
    """Show what the fleet and the clusters look like."""
    with exit_on_error():
        from fedcluster.cli import tables as report
        from fedcluster.experiment import load

        described = load(experiment, o)
        from fedcluster.analysis import fleet_report
        from fedcluster.runs.directory import fresh
        from fedcluster.runs.progress import Spoken

        found = fleet_report.build(described, Spoken())
        files = fleet_report.write(found, out or fresh(f"partition-{experiment.stem}"))
        report.show(report.devices_table(found))
        report.show(report.clusters_table(found))
        typer.echo("written: " + ", ".join(str(file) for file in files))


@app.command()
def reproduce(
    figure: Annotated[str, typer.Argument(metavar="fig2|fig3|fig4|fig5|fig6|all", show_default=False)],
    scale: Annotated[
        str, typer.Option(help="quick: MNIST, 20 minutes; standard: both data sets, hours; paper: for a GPU.")
    ] = "quick",
    seeds: Annotated[int | None, typer.Option(min=1, max=1000, help="Their number; default: the scale's.")] = None,
    lr: Annotated[str, typer.Option(help="Learning rates: paper, equal, or tuned, each curve at its best.")] = "paper",
    x: Annotated[str, typer.Option(help="What to draw over: rounds, aggregations, updates or bytes.")] = "rounds",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Output folder; what is finished there is not run again.")
    ] = None,
) -> None:
    """Reproduce a figure of the paper, and judge its claims."""
    with exit_on_error("the same command"):
        from fedcluster.analysis.paper.figures import FIGURES
        from fedcluster.analysis.paper.reproduce import reproduce as run_figures
        from fedcluster.cli import tables as report
        from fedcluster.runs.progress import stages
        from fedcluster.training.executors.processes import cores

        out = out or Path("runs", f"paper-{scale}-{lr}")
        with stages() as progress:
            verdicts = run_figures(
                list(FIGURES) if figure == "all" else [figure],
                scale,
                lr,
                seeds,
                x,
                out,
                cores(),
                progress,
                lambda text: typer.echo(text, err=True),
            )
        rows = [[v.claim, v.verdict, *v.lower()] for v in verdicts]
        report.show(report.ruled(["claim", "verdict", "lower by", "95 % interval"], rows, left=2))
        typer.echo(f"pictures, data and verdicts: {out}/")


@app.command()
def plan(
    fleet: Annotated[Path, typer.Argument(metavar="FLEET", help="Fleet file, CSV or Parquet.", show_default=False)],
    count: Annotated[int, typer.Option(min=1, help="Clusters, M.")],
    availability: Annotated[
        Path | None, typer.Option(metavar="FILE", help="When devices are free: a trace.", show_default=False)
    ] = None,
    soft: Annotated[bool, typer.Option("--soft", help="A device may sit in two neighbouring slots.")] = False,
    free_seconds: Annotated[float, typer.Option(help="How long a device must be free in its slot.")] = 600.0,
    trace_format: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="intervals, state_changes, flash, fedscale or package.module:function. Default: the content tells.",
            show_default=False,
        ),
    ] = None,
    date: Annotated[str, typer.Option(help="The day on which time zones are asked for their offset.")] = "2026-01-01",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    out: Out = None,
) -> None:
    """Show the timetable of a fleet before training: by time zone or, with a trace, by availability."""
    with exit_on_error():
        from fedcluster.analysis import plan as plans
        from fedcluster.cli import tables as report
        from fedcluster.runs.directory import fresh

        found = plans.plan(fleet, availability, count, soft, seed, date, free_seconds, trace_format)
        files = plans.write(found, out or fresh(f"plan-{fleet.stem}"))
        report.show(report.plan_table(found))
        left, devices = found.clusters.left_out(), len(found.fleet)
        if found.coverage is not None:
            typer.echo(
                f"{left:,} of {devices:,} devices ({left / devices:.1%}) are never free long enough: in no cluster"
            )
            if found.clusters.count < count:
                typer.echo(f"in {count - found.clusters.count} of {count} slots nobody is free: they have no cluster")
        if found.inequality:
            typer.echo(found.inequality)
        typer.echo("written: " + ", ".join(str(file) for file in files))


@app.command()
def analyze(
    experiment: ExperimentFile,
    o: Overrides = None,
    at: Annotated[
        list[Path] | None,
        typer.Option(metavar="CHECKPOINT", help="Also at this model: a run's folder, a checkpoint or a model file."),
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(
            help="Squared gradient norm to come down to. Default: a tenth of the start's.", show_default=False
        ),
    ] = None,
    out: Out = None,
) -> None:
    """Measure heterogeneity and the theorem's other constants, and what they promise."""
    with exit_on_error():
        from fedcluster.cli import tables as report
        from fedcluster.experiment import load

        described = load(experiment, o)
        if epsilon is not None and not 0 < epsilon < float("inf"):
            raise typer.BadParameter("--epsilon must be above 0, and finite")
        from fedcluster.analysis import analyze as analyses
        from fedcluster.analysis import analyze_report
        from fedcluster.runs.directory import fresh
        from fedcluster.runs.progress import Spoken
        from fedcluster.training.executors.processes import cores

        found = analyses.analyze(described, at, epsilon, Spoken(), cores())
        files = analyze_report.write(found, out or fresh(f"analyze-{experiment.stem}"))
        for sentence in [*analyze_report.headline(found), *found.remarks]:
            typer.echo(sentence)
        for table in analyze_report.points_tables(found):
            report.show(report.ruled(*table))
        report.show(report.ruled(*analyze_report.bounds_table(found)))
        typer.echo("written: " + ", ".join(str(file) for file in files))


@app.command()
def advise(
    experiment: ExperimentFile,
    o: Overrides = None,
    pilot: Annotated[bool, typer.Option("--pilot", help="Check the advice by short runs at the three best M.")] = False,
    out: Out = None,
) -> None:
    """Say how many clusters to take, and which."""
    with exit_on_error():
        from fedcluster.cli import tables as report
        from fedcluster.experiment import load

        described = load(experiment, o)
        from fedcluster.analysis import advise as advisor
        from fedcluster.analysis import advise_report
        from fedcluster.runs.directory import fresh
        from fedcluster.runs.progress import Spoken, stages
        from fedcluster.training.executors.processes import cores

        folder = out or fresh(f"advise-{experiment.stem}")

        def run_pilots(counts: list[int]) -> list[advisor.Pilot]:
            with stages() as progress:
                return advisor.run_pilots(described, counts, folder, cores(), progress)

        found = advisor.advise(described, Spoken(), run_pilots if pilot else None, cores())
        files = advise_report.write(found, described.clusters.participation, folder)
        for sentence in [*found.remarks, *advise_report.verdict(found, described.clusters.participation)]:
            typer.echo(sentence)
        report.show(report.ruled(*advise_report.table(found.candidates, str(described.clusters.method))))
        if found.alternatives:
            report.show(report.ruled(*advise_report.table(found.alternatives, f"at M = {found.recommended}")))
        typer.echo("written: " + ", ".join(str(file) for file in files))


@app.command()
def algorithms() -> None:
    """List the federated algorithms: what they keep, what they send, and where they come from."""
    with exit_on_error():
        from fedcluster.algorithms import registry as catalogue
        from fedcluster.cli import tables as report

        found = catalogue.entries()
        kept, sent = ["server keeps", "device keeps"], ["messages", "downloads", "uploads"]
        columns = ["algorithm.name", "options", *kept, *sent, "optimizer"]
        rows = [
            [
                entry.name,
                listed(entry.options),
                listed(entry.server_keeps),
                listed(entry.device_keeps),
                f"{len(entry.down)} down, {len(entry.up)} up",
                " then ".join(map(listed, entry.down)),
                " then ".join(map(listed, entry.up)),
                listed(entry.optimizers),
            ]
            for entry in found
        ]
        report.show(report.ruled(columns, rows, left=len(columns)))
        for paper in dict.fromkeys(entry.paper for entry in found):
            typer.echo(paper)
        typer.echo(
            "\nMessages are those of one device in one round. More than one download or upload exceeds FedCluster's"
            "\nbudget: the run says so, and run --strict-budget refuses it. With any algorithm, server.optimizer may be"
            "\navgm, adagrad, adam or yogi. The table is for local.optimizer = sgd: with momentum or adam, mime and"
            "\nmimelite keep and send statistics (m, or m, v and t), and mimelite uploads a gradient as well."
        )


def listed(names: list[str]) -> str:
    return ", ".join(names) or "-"


for command in (federation.serve, federation.join, federation.certificates):
    app.command()(command)


def main() -> None:
    keep_memory()
    app()
