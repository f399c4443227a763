"""The command line. Heavy imports wait until a command needs them, so that --help answers at once."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from signal import SIGTERM, default_int_handler, signal
from typing import TYPE_CHECKING, Annotated

import typer

import fedcluster
from fedcluster.allocator import keep_memory
from fedcluster.errors import FedClusterError

if TYPE_CHECKING:
    from fedcluster.comparison import Progress

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Federated learning in which clusters of devices take turns within every round.",
    epilog="Exit codes: 0 done, 2 bad experiment or usage, 3 missing or bad data, 4 training diverged, "
    "5 output folder refused, 6 message budget exceeded, 7 a torchrun rank lost, 8 server or devices not there, "
    "130 interrupted.",
)

ExperimentFile = Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Option("-o", metavar="KEY=VALUE", help="Override a key, e.g. -o clusters.count=5.")
]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Output folder. Default: a new one under runs/.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where an earlier run in --out stopped.")]


class Cohorts(StrEnum):
    sequential = "sequential"
    stacked = "stacked"
    auto = "auto"


@contextmanager
def plainly() -> Iterator[None]:
    """What a person can cause ends in one sentence and an exit code, not in a traceback."""
    try:
        yield
    except FedClusterError as error:
        typer.echo(f"fedcluster: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
    except BrokenPipeError:  # whoever read our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except OSError as error:
        typer.echo(f"fedcluster: {error.filename or 'file system'}: {error.strerror or error}", err=True)
        raise typer.Exit(5) from None
    except KeyboardInterrupt:
        typer.echo("fedcluster: interrupted; what is written is whole, and --resume goes on from it", err=True)
        raise typer.Exit(130) from None


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
        int | None, typer.Option(min=1, help="Processes to train in. Default: one a core.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda, cuda:1, ...")] = "cpu",
    cohorts: Annotated[
        Cohorts, typer.Option(help="Devices of a cohort one after the other, in one stack, or what is faster.")
    ] = Cohorts.sequential,
    strict_budget: Annotated[
        bool, typer.Option("--strict-budget", help="Refuse algorithms that need more than one exchange a turn.")
    ] = False,
) -> None:
    """Train one experiment."""
    with plainly():
        from fedcluster.experiment import load

        described = load(experiment, o)
        from fedcluster import training
        from fedcluster.folder import fresh
        from fedcluster.workers import cores

        if out is None and resume:
            raise typer.BadParameter("--resume needs --out, the folder to go on in")
        result = training.run(
            described,
            out or fresh(experiment.stem),
            resume,
            workers=workers or cores(),
            device=device,
            cohorts=cohorts.value,
            strict_budget=strict_budget,
        )
        if result.out is None:
            return  # torchrun's other ranks
        last = result.history[-1]
        typer.echo(
            f"training loss {last['train_loss']:.4f}, test accuracy {last['test_accuracy']:.2%} after "
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
    with plainly():
        from fedcluster import report
        from fedcluster.experiment import load

        described = load(experiment or Path(__file__).with_name("demo.toml"), o)
        from fedcluster import comparison
        from fedcluster.folder import fresh
        from fedcluster.workers import cores

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
        for remark in [*result.remarks, *report.verdict(result)]:
            typer.echo(remark)
        typer.echo(f"picture: {out}/curves.png")


@app.command()
def partition(experiment: ExperimentFile, o: Overrides = None, out: Out = None) -> None:
    """Show what the fleet and the clusters look like."""
    with plainly():
        from fedcluster import report
        from fedcluster.experiment import load

        described = load(experiment, o)
        from fedcluster import partition as portraits
        from fedcluster.display import Spoken
        from fedcluster.folder import fresh

        portrait = portraits.portray(described, Spoken())
        files = portraits.write(portrait, out or fresh(f"partition-{experiment.stem}"))
        report.show(report.devices_table(portrait))
        report.show(report.clusters_table(portrait))
        typer.echo("written: " + ", ".join(str(file) for file in files))


@app.command()
def reproduce(
    figure: Annotated[str, typer.Argument(metavar="fig2|fig3|fig4|fig5|fig6|all", show_default=False)],
    scale: Annotated[
        str, typer.Option(help="quick: MNIST, 20 minutes; standard: both data sets, hours; paper: for a GPU.")
    ] = "quick",
    seeds: Annotated[int | None, typer.Option(help="How many. Default: the scale's.", show_default=False)] = None,
    lr: Annotated[str, typer.Option(help="Learning rates: paper, equal, or tuned, each curve at its best.")] = "paper",
    x: Annotated[str, typer.Option(help="What to draw over: rounds, aggregations, updates or bytes.")] = "rounds",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Output folder; what is finished there is not run again.")
    ] = None,
) -> None:
    """Reproduce a figure of the paper, and judge its claims."""
    with plainly():
        from fedcluster import report
        from fedcluster.paper.figures import FIGURES
        from fedcluster.paper.reproduce import reproduce as run_figures
        from fedcluster.workers import cores

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
        rows = [[v.claim, v.verdict, f"{v.effect:+.3f}", f"{v.low:+.3f} to {v.high:+.3f}"] for v in verdicts]
        report.show(report.ruled(["claim", "verdict", "advantage", "95 % interval"], rows, left=2))
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
    date: Annotated[str, typer.Option(help="The day on which time zones are asked for their offset.")] = "2026-01-01",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    out: Out = None,
) -> None:
    """Show the timetable of a fleet before training: by time zone or, with a trace, by availability."""
    with plainly():
        from fedcluster import plan as plans
        from fedcluster import report
        from fedcluster.folder import fresh

        found = plans.plan(fleet, availability, count, soft, seed, date, free_seconds)
        files = plans.write(found, out or fresh(f"plan-{fleet.stem}"))
        report.show(report.plan_table(found))
        left, devices = found.clusters.left_out(), len(found.fleet)
        if found.coverage is not None:
            typer.echo(
                f"{left:,} of {devices:,} devices ({left / devices:.1%}) are never free long enough: in no cluster"
            )
            if found.clusters.count < count:
                typer.echo(f"in {count - found.clusters.count} of {count} slots nobody is free: they have no cluster")
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
    with plainly():
        from fedcluster import report
        from fedcluster.experiment import load

        described = load(experiment, o)
        if epsilon is not None and not epsilon > 0:
            raise typer.BadParameter("--epsilon must be above 0")
        from fedcluster import analyze as analyses
        from fedcluster.display import Spoken
        from fedcluster.folder import fresh

        found = analyses.analyze(described, at, epsilon, Spoken())
        files = analyses.write(found, out or fresh(f"analyze-{experiment.stem}"))
        for sentence in [*analyses.headline(found), *found.remarks]:
            typer.echo(sentence)
        report.show(report.ruled(*analyses.points_table(found)))
        report.show(report.ruled(*analyses.bounds_table(found)))
        typer.echo("written: " + ", ".join(str(file) for file in files))


@app.command()
def advise(
    experiment: ExperimentFile,
    o: Overrides = None,
    pilot: Annotated[bool, typer.Option("--pilot", help="Check the advice by short runs at the three best M.")] = False,
    out: Out = None,
) -> None:
    """Say how many clusters to take, and which."""
    with plainly():
        from fedcluster import report
        from fedcluster.experiment import load

        described = load(experiment, o)
        from fedcluster import advise as advisor
        from fedcluster.display import Spoken
        from fedcluster.folder import fresh
        from fedcluster.workers import cores

        folder = out or fresh(f"advise-{experiment.stem}")

        def run_pilots(counts: list[int]) -> list[advisor.Pilot]:
            with stages() as progress:
                return advisor.run_pilots(described, counts, folder, cores(), progress)

        found = advisor.advise(described, Spoken(), run_pilots if pilot else None)
        files = advisor.write(found, described.clusters.participation, folder)
        for sentence in [*found.remarks, *advisor.verdict(found, described.clusters.participation)]:
            typer.echo(sentence)
        report.show(report.ruled(*advisor.table(found.choices, f"{described.clusters.method} clusters")))
        report.show(report.ruled(*advisor.table(found.others, f"at M = {found.take}")))
        typer.echo("written: " + ", ".join(str(file) for file in files))


@app.command()
def algorithms() -> None:
    """List the federated algorithms: what they keep, what they send, and where they come from."""
    with plainly():
        from fedcluster import catalogue, report

        found = catalogue.entries()
        columns = ["local.algorithm", "server keeps", "device keeps", "messages", "downloads", "uploads", "optimizer"]
        rows = [
            [
                entry.name,
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
            "\navgm, adagrad, adam or yogi."
        )


@app.command()
def serve(
    experiment: ExperimentFile,
    listen: Annotated[str, typer.Option(metavar="ADDRESS[:PORT]", help="Where devices reach us.")] = "127.0.0.1:9092",
    nodes: Annotated[int, typer.Option(min=1, help="Devices to wait for before the first round.")] = 1,
    certificates: Annotated[
        Path | None, typer.Option(metavar="DIR", help="What fedcluster certificates made.", show_default=False)
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Without TLS and keys, on a loopback address.")] = False,
    o: Overrides = None,
    out: Out = None,
    resume: Resume = False,
    wait: Annotated[float, typer.Option(min=1, help="Seconds to wait for devices.")] = 600.0,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds that a cohort has for its turn.")] = 600.0,
) -> None:
    """Train one experiment on devices elsewhere, which join."""
    with plainly():
        need_flower()
        from fedcluster.experiment import load

        described = load(experiment, o)
        from fedcluster.flower import server
        from fedcluster.folder import fresh

        if out is None and resume:
            raise typer.BadParameter("--resume needs --out, the folder to go on in")
        if insecure == (certificates is not None):
            raise typer.BadParameter("give --certificates DIR, or --insecure for a test on loopback")
        terms = server.Terms(nodes, wait, deadline)
        signal(SIGTERM, default_int_handler)
        result = server.serve(described, address(listen), certificates, out or fresh(experiment.stem), resume, terms)
        last = result.history[-1]
        scores = f"test accuracy {last['test_accuracy']:.2%}, " if "test_accuracy" in last else ""
        typer.echo(
            f"{scores}{last['round']} rounds, {last['device_updates']:,} device updates, {last['refused']:,} refused, "
            f"{last['elapsed']:.0f} s"
        )
        typer.echo(f"written: {result.out}")


@app.command()
def join(
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the server is.")],
    data: Annotated[str, typer.Option(metavar="PATH", help="This device's own data, as for data.name.")],
    device: Annotated[str, typer.Option(metavar="ID", help="This device's id.")],
    certificates: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With ca.crt and devices/ID.key.", show_default=False)
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Without TLS and keys, on a loopback address.")] = False,
    timezone: Annotated[str, typer.Option(metavar="ZONE", help="Such as Europe/Berlin; the server is told.")] = "",
    slots: Annotated[str, typer.Option(metavar="HOURS", help="Such as 22-6, when on line; the server is told.")] = "",
    tell_labels: Annotated[bool, typer.Option("--tell-labels", help="Tell the server how many of each class.")] = False,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="package.module:name that the server may ask for.")
    ] = None,
) -> None:
    """Take part in a federation with this machine's data, until interrupted."""
    with plainly():
        need_flower()
        from fedcluster.flower import node
        from fedcluster.flower.device import Identity

        if insecure == (certificates is not None):
            raise typer.BadParameter("give --certificates DIR, or --insecure for a test on loopback")
        check_zone(timezone)
        identity = Identity.of(
            {
                "device": device,
                "data": data,
                "timezone": timezone,
                "slots": slots,
                "tell-labels": tell_labels,
                "allow": ",".join(allow or []),
            }
        )
        key = certificates / "devices" / f"{device}.key" if certificates else None
        signal(SIGTERM, default_int_handler)
        try:
            node.join(address(server), identity, certificates, key, lambda text: typer.echo(text, err=True))
        except KeyboardInterrupt:
            typer.echo(f"device {device} has left", err=True)


@app.command()
def certificates(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.", show_default=False)],
    nodes: Annotated[int, typer.Option(min=1, max=10_000, help="Devices, which are named 0, 1, 2, ...")] = 8,
    host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Names and addresses by which devices reach the server.")
    ] = None,
) -> None:
    """Make a development authority, a server certificate and a key for every device."""
    with plainly():
        need_flower()
        from fedcluster.flower import certificates as maker

        maker.make(folder, nodes, ["localhost", "127.0.0.1", "::1", *(host or [])])
        typer.echo(f"written: {folder}/ca.crt, server.crt, server.key, and devices/0 to {nodes - 1}, valid for a year")


def need_flower() -> None:
    from importlib.util import find_spec

    from fedcluster.errors import BadExperiment

    if find_spec("flwr") is None:
        raise BadExperiment("a federation needs Flower: pip install 'fedcluster[flower]'")


def address(text: str) -> tuple[str, int]:
    """HOST, HOST:PORT or [IPv6]:PORT; 9092 where none is given, 0 for any that is free."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in host and not host.startswith("[")):
        host, port = text, "9092"
    if not port.isdecimal() or int(port) > 65535 or not host.strip("[]"):
        raise typer.BadParameter(f"{text}: write it as HOST:PORT, for example 192.0.2.7:9092")
    return host.strip("[]"), int(port)


def check_zone(name: str) -> None:
    from zoneinfo import available_timezones

    from fedcluster.errors import BadExperiment

    if name and name not in available_timezones():
        raise BadExperiment(f"--timezone {name} is not a time zone: write it as Europe/Berlin, Asia/Tokyo, UTC, ...")


def listed(names: list[str]) -> str:
    return ", ".join(names) or "-"


@contextmanager
def stages() -> Iterator["Progress"]:
    """A bar over all rounds of all runs, by stage; a few lines where there is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from fedcluster.display import console

    with Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rounds,"),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
        console=console,
        disable=not console.is_terminal,
    ) as bar:
        tasks: dict[str, object] = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
                if not console.is_terminal:
                    typer.echo(f"{stage}: {total} rounds in all", err=True)
            bar.update(tasks[stage], completed=done, total=total)  # type: ignore[arg-type]

        yield progress


def main() -> None:
    keep_memory()
    app()
