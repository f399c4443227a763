"""The command that shows runs in a browser, and how other commands show theirs."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcluster.cli.common import echo, exit_on_error, reading

if TYPE_CHECKING:
    from fedcluster.training.callbacks import Callback

ShowLive = Annotated[bool, typer.Option("--live", help="Show the run in the browser while it trains.")]
LivePort = Annotated[
    int,
    typer.Option(
        min=0, max=65535, metavar="PORT", help="Port of --live on 127.0.0.1. Default: any.", show_default=False
    ),
]


@contextmanager
def shown_live(wanted: bool, port: int, folder: Path) -> Iterator["list[Callback]"]:
    """The callback that serves the report on the run in this folder, if it is wanted; under torchrun on rank 0."""
    if not wanted or os.environ.get("RANK", "0") != "0":
        yield []
        return
    from fedcluster.report.live import Live

    with Live(folder, port) as live:
        echo(f"Live report: {live.address}", err=True)
        yield [live]


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of runs, or folders that hold several.", show_default=False),
    ],
    o: Annotated[
        Path | None,
        typer.Option(
            "-o", metavar="FILE", help="The page. Default: report.html in the first folder.", show_default=False
        ),
    ] = None,
    open: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Write a web page that shows runs: a single, self-contained file."""
    with exit_on_error():
        reading(", ".join(map(str, runs)))
        import webbrowser

        from fedcluster.report.page import write_report
        from fedcluster.runs.progress import tracked

        path = write_report(runs, o or runs[0] / "report.html", tracked)
        echo(f"Report saved to {path}")
        if open and not webbrowser.open(path.resolve().as_uri()):
            typer.echo("there is no browser here: open the file in one", err=True)
