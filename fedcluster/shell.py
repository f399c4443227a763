"""What all commands share: their arguments, and mistakes told in one sentence."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from fedcluster.errors import FedClusterError

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
