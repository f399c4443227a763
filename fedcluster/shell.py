"""What all commands share: their arguments, progress over many runs, and mistakes told in one sentence."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcluster.errors import FedClusterError

if TYPE_CHECKING:
    from fedcluster.jobs import Progress

ExperimentFile = Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Option("-o", metavar="KEY=VALUE", help="Override a key, e.g. -o clusters.count=5.")
]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Output folder. Default: a new one under runs/.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where an earlier run in --out stopped.")]


@contextmanager
def plainly(goes_on: str | None = None) -> Iterator[None]:
    """What a person can cause ends in one sentence and an exit code, not in a traceback. Interrupted, it says what
    goes on."""
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
        then = f", and {goes_on} goes on from it" if goes_on else ""
        typer.echo(f"fedcluster: interrupted; what is written is whole{then}", err=True)
        raise typer.Exit(130) from None


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
