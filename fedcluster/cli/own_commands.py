"""Commands of other packages, as subcommands of `fedcluster`.

A package declares them as entry points; each is a function whose parameters typer turns into options:

    [project.entry-points."fedcluster.commands"]
    NAME = "package.module:function"
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from fedcluster.cli.common import exit_on_error
from fedcluster.errors import BadExperiment

if TYPE_CHECKING:
    from click import Command, Context

GROUP = "fedcluster.commands"


class Commands(TyperGroup):
    """The package's own commands, then those of other packages, which are imported when they are asked for."""

    def list_commands(self, ctx: Context) -> list[str]:
        return [*super().list_commands(ctx), *sorted(declared().keys() - self.commands.keys())]

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            mistyped: Any = error  # click's, or that of the copy in newer versions of typer
            if getattr(error, "possibilities", None):  # click will suggest these; typer has put them into the message
                mistyped.message = mistyped.message.partition(" Did you mean ")[0]
            raise

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        command = super().get_command(ctx, cmd_name)
        return load(declared()[cmd_name]) if command is None and cmd_name in declared() else command


@cache
def declared() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def load(entry: EntryPoint) -> Command:
    """The command of an entry point. Errors end in a sentence, as in the package's own commands."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    try:
        function: Callable[..., Any] = entry.load()
    except Exception as error:  # code of another package; --help must work all the same
        reason = f"the command {entry.name} ({entry.value}) cannot be imported ({type(error).__name__}: {error})"

        def function() -> None:
            raise BadExperiment(reason)

        function.__doc__ = reason

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with exit_on_error():
            return function(*args, **kwargs)

    app.command(entry.name)(call)
    return typer.main.get_command(app)
