"""The command that shows runs in a browser."""

from pathlib import Path
from typing import Annotated

import typer

from fedcluster.cli.common import echo, exit_on_error


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
    """Write a web page that shows runs: one file, which needs nothing else."""
    with exit_on_error():
        import webbrowser

        from fedcluster.report.page import write_report

        path = write_report(runs, o or runs[0] / "report.html")
        echo(f"Report saved to {path}")
        if open and not webbrowser.open(path.resolve().as_uri()):
            typer.echo("there is no browser here: open the file in one", err=True)
