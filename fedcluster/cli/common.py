"""What all commands share: their arguments, sentences that fit the terminal, and errors in one sentence."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcluster.cli import completion
from fedcluster.errors import FedClusterError, Terminated, TooLarge
from fedcluster.processes import terminable
from fedcluster.reporting import wrapped

if TYPE_CHECKING:
    from fedcluster.experiment import Experiment

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, the quota, the largest file allowed

LONGEST = 1000  # characters of a message


ExperimentFile = Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "-o",
        metavar="KEY=VALUE",
        help="Override a key, e.g. -o clusters.count=5.",
        autocompletion=completion.override,
    ),
]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Output folder. Default: a new one under runs/.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")]


def echo(text: str, err: bool = False) -> None:
    """Print sentences, with lines broken between words where the terminal is narrow."""
    typer.echo(wrapped(text, sys.stderr if err else sys.stdout), err=err)


def reading(what: object) -> None:
    """Say what the command begins with, before the seconds that imports take. Under torchrun one process says it."""
    if os.environ.get("RANK", "0") == "0":
        echo(f"reading {what}", err=True)


def load(path: Path, overrides: list[str] | None) -> Experiment:
    """The experiment of a file, with overrides."""
    reading("the embedded digits experiment" if path.parent == Path(__file__).parent else path)
    from fedcluster.experiment import load

    return load(path, overrides)


def need_out(out: Path | None, resume: bool) -> None:
    if out is None and resume:
        raise typer.BadParameter("--resume needs --out, the folder of the run to continue")


@contextmanager
def exit_on_error(goes_on: str | None = None) -> Iterator[None]:
    """End with one sentence and an exit code where a person caused the error, not with a traceback. `goes_on` is what
    continues a command that was interrupted."""
    try:
        with terminable():
            yield
    except FedClusterError as error:
        echo(f"fedcluster: {one_line(str(error))}", err=True)
        raise typer.Exit(error.exit_code) from None
    except BrokenPipeError:  # whoever read our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except (MemoryError, RecursionError, OverflowError, RuntimeError) as error:
        reason = exhausted(error)
        if reason is None:
            raise
        echo(f"fedcluster: {reason}", err=True)
        raise typer.Exit(TooLarge.exit_code) from None
    except OSError as error:
        then = f"; free some space and continue with {goes_on}" if error.errno in FULL and goes_on else ""
        echo(f"fedcluster: {error.filename or 'file system'}: {error.strerror or error}{then}", err=True)
        raise typer.Exit(5) from None
    except KeyboardInterrupt as error:
        terminated = isinstance(error, Terminated)
        then = f"; progress is saved, continue with {goes_on}" if goes_on else ""
        echo(f"fedcluster: {'terminated' if terminated else 'interrupted'}{then}", err=True)
        raise typer.Exit(Terminated.exit_code if terminated else 130) from None


def one_line(text: str) -> str:
    """A message in one line, without control characters and not too long: it may quote files and arguments."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(text.split()))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 200]} ... {text[-195:]}"


def exhausted(error: Exception) -> str | None:
    """A sentence for errors of memory, recursion or overflow; None for other errors."""
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error) or "out of memory" in str(error):
        return "out of memory: use a smaller model, fewer devices or clusters, or smaller batches"
    if isinstance(error, RecursionError):
        return "the input is nested too deeply to be read"
    if isinstance(error, OverflowError) or "without overflow" in str(error):
        return f"a number in the input is too large ({str(error)[:120]})"
    return None
