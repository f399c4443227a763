"""The command line. Heavy imports wait until a command needs them, so that --help answers at once."""

import os
from typing import Annotated

import typer

import fedcluster
from fedcluster.allocator import keep_memory
from fedcluster.cli import federation, inspection, starting, training
from fedcluster.cli.completion import answer_bash
from fedcluster.cli.own_commands import Commands
from fedcluster.cli.report import report

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Federated learning in which clusters of devices take turns within every round.",
    epilog="Exit codes: 0 done, 2 bad experiment or usage, 3 missing or bad data, 4 training diverged, "
    "5 output folder refused, 6 message budget exceeded, 7 a process was lost, 8 server or devices unavailable, "
    "9 processes that do not compute alike, 10 out of memory or number too large, 11 a callback failed, "
    "130 interrupted, 143 terminated.",
)

COMMANDS = (
    starting.new,
    training.run,
    training.compare,
    inspection.partition,
    training.reproduce,
    inspection.plan,
    inspection.analyze,
    inspection.advise,
    inspection.privacy,
    training.evaluate,
    starting.runs,
    report,
    inspection.algorithms,
    federation.serve,
    federation.join,
    federation.certificates,
)


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


for command in COMMANDS:
    app.command()(command)


def main() -> None:
    if os.environ.get("_FEDCLUSTER_COMPLETE") == "complete_bash":
        answer_bash(app)
        return
    keep_memory()
    app()
