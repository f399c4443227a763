"""How a command ends: sentences and tables on the terminal and, with --html, the same as a web page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcluster.cli.common import echo
from fedcluster.cli.grid import Grid, show

if TYPE_CHECKING:
    from fedcluster.runs.metrics import Line

Html = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Also write a web page that shows this.", show_default=False),
]


class Ending:
    """Prints what a command has found as it comes. `finish` writes it to the page, if there shall be one."""

    def __init__(self, title: str, html: Path | None) -> None:
        self.title, self.html = title, html
        self.sentences: list[str] = []
        self.grids: list[tuple[Grid, str]] = []

    def say(self, sentence: str) -> None:
        echo(sentence)
        self.sentences.append(sentence)

    def show(self, grid: Grid, title: str = "") -> None:
        show(grid)
        self.grids.append((grid, title))

    def finish(
        self,
        pictures: Mapping[Path, str] | None = None,
        runs: Sequence[Path] = (),
        curves: Mapping[str, Sequence[Sequence[Line]]] | None = None,
    ) -> None:
        """Write the page: also pictures with their descriptions, runs, and curves by name, one for each seed."""
        if self.html is None:
            return
        from fedcluster.report.page import Content, Table, write_page

        tables = [Table(grid.columns, grid.rows, grid.left, title) for grid, title in self.grids]
        content = Content(self.title, self.sentences, tables, list((pictures or {}).items()), runs, curves or {})
        echo(f"Page saved to {write_page(content, self.html)}")
