"""Commands of other packages, as subcommands of `fedcluster`.

A package declares them as entry points; each is a function whose parameters typer turns into options:

    [project.entry-points."fedcluster.commands"]
    NAME = "package.module:function"
"""

from collections.abc import Callable
from functools import cache, wraps
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from click import Command, Context, exceptions
from typer.core import TyperGroup

from fedcluster.cli.common import exit_on_error
from fedcluster.errors import BadExperiment

GROUP = "fedcluster.commands"


class Commands(TyperGroup):
    """The package's own commands, then those of other packages, which are imported when they are asked for."""

    def list_commands(self, ctx: Context) -> list[str]:
        return [*super().list_commands(ctx), *sorted(declared().keys() - self.commands.keys())]

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        self.suggest_commands = not hasattr(exceptions, "NoSuchCommand")  # such a click suggests a command itself
        return super().resolve_command(ctx, args)

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
