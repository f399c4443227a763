"""The commands around a run: a file to begin with, and a list of what was run."""

import time
from pathlib import Path
from typing import Annotated

import typer

from fedcluster.cli import completion
from fedcluster.cli.common import Overrides, echo, exit_on_error, reading


def new(
    data: Annotated[
        str,
        typer.Argument(
            metavar="NAME|PATH",
            help="A known data set (digits, mnist, cifar10, ...), or your own data: anything that data.name may be.",
            autocompletion=completion.data,
        ),
    ] = "digits",
    o: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The file to write. Default: the data's name with .toml.", show_default=False
        ),
    ] = None,
) -> None:
    """Write a commented experiment file for a data set."""
    with exit_on_error():
        reading(data)
        from fedcluster.analysis import starter
        from fedcluster.runs.progress import say

        out = out or Path(f"{Path(data).stem or 'experiment'}.toml")
        starter.write(data, out, o or [], say)
        echo(f"Written: {out}")
        echo(f"Train with: fedcluster run {out}")


def runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to look in.")] = Path("runs"),
) -> None:
    """List runs: whether they are running, finished, interrupted or diverged, and their last scores."""
    with exit_on_error():
        from fedcluster.cli import tables
        from fedcluster.cli.grid import show
        from fedcluster.errors import BadRun
        from fedcluster.runs.listing import list_runs

        if not folder.is_dir():
            raise BadRun(f"{folder} is not a folder: name the one that holds the runs")
        found = list_runs(folder)
        if not found:
            echo(f"no runs in {folder}")
            return
        show(tables.runs_table(found, folder, time.time()))
