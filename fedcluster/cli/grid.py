"""Tables of text that fit the terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedcluster.reporting import line_width

WIDEST = 400  # characters of a line in a file or a pipe
FEW = 4  # rows that may become columns
FIRST = 34  # characters of the first column in a table that is too wide: longer texts are wrapped


@dataclass(frozen=True)
class Grid:
    """The cells of a table. The first `left` columns are aligned to the left."""

    columns: list[str]
    rows: list[list[str]]
    left: int = 1

    def render(self, space: int = 1, first: int | None = None) -> Table:
        """With this much space on either side of a cell. The cells of the first column are wrapped after `first`
        characters, the others are not wrapped."""
        table = Table(box=box.SIMPLE_HEAD, padding=(0, space), collapse_padding=space == 0, pad_edge=space > 0)
        for number, name in enumerate(self.columns):
            wrap = number == 0 and first is not None
            table.add_column(
                Text(name),
                justify="left" if number < self.left else "right",
                no_wrap=not wrap,
                max_width=first if wrap else None,
            )
        for row in self.rows:
            table.add_row(*map(Text, row))  # names may have brackets, which are no markup
        return table

    def transposed(self) -> Grid:
        """A column for each row, for a few rows with many cells."""
        columns, *rows = zip(self.columns, *self.rows, strict=True)
        return Grid(list(columns), [list(row) for row in rows])

    def part(self, chosen: list[int]) -> Grid:
        """The first column and the chosen ones."""
        at = [0, *chosen]
        left = sum(number < self.left for number in at)
        return Grid([self.columns[n] for n in at], [[row[n] for n in at] for row in self.rows], left)


def show(grid: Grid) -> None:
    """Print a table so that it fits the terminal: with less space, with a few rows as columns, with its first column
    wrapped, or as several tables of some columns each. In a file or a pipe, which have no width, a row stays a line."""
    console = Console(highlight=False)
    limit = line_width(console.file) or WIDEST

    def fits(table: Table) -> bool:
        return width(console, table) <= limit

    forms = [grid.render(), grid.render(space=0)]
    if len(grid.rows) <= FEW:
        forms.append(grid.transposed().render())
    forms.append(grid.render(first=FIRST))
    fitting = [table for table in forms if fits(table)][:1]
    for table in fitting or split(grid, fits):
        console.width = max(limit, width(console, table))
        console.print(table)


def width(console: Console, table: Table) -> int:
    return console.measure(table, options=console.options.update(max_width=WIDEST)).maximum


def split(grid: Grid, fits: Callable[[Table], bool]) -> list[Table]:
    """Tables of as many columns as fit, each with the first column."""
    tables: list[Table] = []
    start = 1
    while start < len(grid.columns):
        end = start + 1
        while end < len(grid.columns) and fits(grid.part(list(range(start, end + 1))).render(first=FIRST)):
            end += 1
        tables.append(grid.part(list(range(start, end))).render(first=FIRST))
        start = end
    return tables
