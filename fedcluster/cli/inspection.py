"""The commands that look at a fleet, its clusters and the theory before training."""

from pathlib import Path
from typing import Annotated

import typer

from fedcluster.cli.common import ExperimentFile, Out, Overrides, echo, exit_on_error, load, reading
from fedcluster.cli.ending import Ending, Html


def partition(experiment: ExperimentFile, o: Overrides = None, out: Out = None, html: Html = None) -> None:
    """Show the fleet and its clusters: sizes, weights and labels."""
    with exit_on_error():
        described = load(experiment, o)
        from fedcluster.analysis import fleet_report
        from fedcluster.cli import tables
        from fedcluster.runs.directory import fresh
        from fedcluster.runs.progress import Spoken

        report = fleet_report.partition(described, Spoken())
        files = fleet_report.write(report, out or fresh(f"partition-{experiment.stem}"))
        ending = Ending(f"partition of {experiment.stem}", html)
        ending.show(tables.devices_table(report), "Devices")
        ending.show(tables.clusters_table(report), "Clusters")
        written(files)
        ending.finish({files[-1]: "Classes of devices and clusters, and their weights."})


def plan(
    fleet: Annotated[Path, typer.Argument(metavar="FLEET", help="Fleet file, CSV or Parquet.", show_default=False)],
    count: Annotated[int, typer.Option(min=1, help="Number of clusters, M.")],
    availability: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Trace of when devices are available.", show_default=False)
    ] = None,
    soft: Annotated[bool, typer.Option("--soft", help="Allow a device in two neighbouring slots.")] = False,
    free_seconds: Annotated[float, typer.Option(help="How long a device must be available in its slot.")] = 600.0,
    trace_format: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="intervals, state_changes, flash, fedscale or package.module:function. Default: from the content.",
            show_default=False,
        ),
    ] = None,
    date: Annotated[str, typer.Option(help="Day on which UTC offsets of time zones are taken.")] = "2026-01-01",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, metavar="INTEGER", help="Seed of random choices.")] = 0,
    out: Out = None,
    html: Html = None,
) -> None:
    """Show the timetable of a fleet before training: by time zone or, with a trace, by availability."""
    with exit_on_error():
        reading(fleet)
        from fedcluster.analysis import plan as plans
        from fedcluster.cli import tables
        from fedcluster.runs.directory import fresh

        ending = Ending(f"plan of {fleet.stem}", html)
        fleet_plan = plans.plan(fleet, availability, count, soft, seed, date, free_seconds, trace_format)
        files = plans.write(fleet_plan, out or fresh(f"plan-{fleet.stem}"))
        ending.show(tables.plan_table(fleet_plan), "Timetable")
        left, devices = fleet_plan.clusters.left_out(), len(fleet_plan.fleet)
        if fleet_plan.coverage is not None:
            ending.say(
                f"{left:,} of {devices:,} devices ({left / devices:.1%}) are never available long enough and are in no "
                "cluster"
            )
            if fleet_plan.clusters.count < count:
                empty = count - fleet_plan.clusters.count
                ending.say(f"no device is available in {empty} of {count} slots, which have no cluster")
        if fleet_plan.inequality:
            ending.say(fleet_plan.inequality)
        written(files)
        ending.finish({files[-1]: "When the devices of each cluster are free, and the size of each cluster."})


def analyze(
    experiment: ExperimentFile,
    o: Overrides = None,
    at: Annotated[
        list[Path] | None,
        typer.Option(metavar="CHECKPOINT", help="Also measure at this model: a run, a checkpoint or a model file."),
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(help="Squared gradient norm to reach. Default: a tenth of that at the start.", show_default=False),
    ] = None,
    out: Out = None,
    html: Html = None,
) -> None:
    """Measure heterogeneity and the theorem's other constants, and compute its bound."""
    with exit_on_error():
        if epsilon is not None and not 0 < epsilon < float("inf"):
            raise typer.BadParameter("--epsilon must be above 0, and finite")
        described = load(experiment, o)
        from fedcluster.analysis import analyze as analyses
        from fedcluster.analysis import analyze_report
        from fedcluster.cli.grid import Grid
        from fedcluster.runs.directory import fresh
        from fedcluster.runs.progress import Spoken
        from fedcluster.training.executors.processes import cores

        ending = Ending(f"analysis of {experiment.stem}", html)
        analysis = analyses.analyze(described, at, epsilon, Spoken(), cores())
        files = analyze_report.write(analysis, out or fresh(f"analyze-{experiment.stem}"))
        for sentence in [*analyze_report.headline(analysis), *analysis.remarks]:
            ending.say(sentence)
        for table in analyze_report.points_tables(analysis):
            ending.show(Grid(*table))
        ending.show(Grid(*analyze_report.bounds_table(analysis)), "The bound and its conditions")
        written(files)
        ending.finish({files[-1]: "The parts of H_device at each model, and the terms of the bound."})


def advise(
    experiment: ExperimentFile,
    o: Overrides = None,
    pilot: Annotated[bool, typer.Option("--pilot", help="Check the advice by short runs at the three best M.")] = False,
    out: Out = None,
    html: Html = None,
) -> None:
    """Recommend a number of clusters and a clustering."""
    with exit_on_error():
        described = load(experiment, o)
        from fedcluster.analysis import advise as advisor
        from fedcluster.analysis import advise_report
        from fedcluster.cli.grid import Grid
        from fedcluster.runs.directory import fresh
        from fedcluster.runs.progress import Spoken, stages
        from fedcluster.training.executors.processes import cores

        folder, ending = out or fresh(f"advise-{experiment.stem}"), Ending(f"advice on {experiment.stem}", html)

        def run_pilots(counts: list[int]) -> list[advisor.Pilot]:
            with stages() as progress:
                return advisor.run_pilots(described, counts, folder, cores(), progress)

        advice = advisor.advise(described, Spoken(), run_pilots if pilot else None, cores())
        files = advise_report.write(advice, described.clusters.participation, folder)
        for sentence in [*advice.remarks, *advise_report.verdict(advice, described.clusters.participation)]:
            ending.say(sentence)
        ending.show(
            Grid(*advise_report.table(advice.candidates, str(described.clusters.method))), "Numbers of clusters"
        )
        if advice.alternatives:
            ending.show(Grid(*advise_report.table(advice.alternatives, f"at M = {advice.recommended}")), "Clusterings")
        written(files)
        ending.finish({files[-1]: "C / sqrt(M) of the bound over the number of clusters, and its terms."})


def privacy(experiment: ExperimentFile, o: Overrides = None, out: Out = None, html: Html = None) -> None:
    """Show what the section privacy spends in every round, the noise for other budgets, and what cycling costs."""
    with exit_on_error():
        described = load(experiment, o)
        from fedcluster.analysis import privacy as reports
        from fedcluster.cli.grid import Grid
        from fedcluster.runs.directory import fresh
        from fedcluster.runs.progress import Spoken

        ending = Ending(f"privacy of {experiment.stem}", html)
        report = reports.build(described, Spoken())
        files = reports.write(report, out or fresh(f"privacy-{experiment.stem}"))
        for sentence in reports.headline(report):
            ending.say(sentence)
        for table in reports.tables(report):
            ending.show(Grid(*table))
        written(files)
        ending.finish({path: "Epsilon spent by round." for path in files if path.suffix == ".png"})


def algorithms() -> None:
    """List the federated algorithms: options, what server and devices keep, messages, and papers."""
    with exit_on_error():
        reading("the algorithms")
        from fedcluster.algorithms import registry
        from fedcluster.algorithms.server_optimizers import OPTIMIZERS
        from fedcluster.cli import tables
        from fedcluster.cli.grid import show

        entries = registry.entries()
        show(tables.algorithms_table(entries))
        for paper in dict.fromkeys(entry.paper for entry in entries):
            echo(paper)
        echo(
            "\nMessages are those of one device in one round. More than one download or upload exceeds FedCluster's "
            "budget: the run says so, and run --strict-budget refuses it. The table is for local.optimizer = sgd: with "
            "momentum or adam, mime and mimelite keep and send statistics (m, or m, v and t), and mimelite uploads a "
            f"gradient as well. server.optimizer works with any algorithm: {', '.join(list(OPTIMIZERS)[1:])}."
        )


def written(files: list[Path]) -> None:
    echo("Written: " + ", ".join(map(str, files)))
