"""Parts of a live line that keep their place where the terminal is narrow."""

from rich.progress import BarColumn, ProgressColumn, Task
from rich.table import Column
from rich.text import Text


class Cut(ProgressColumn):
    """A text that is cut at the end where the line is too short, so that the other columns keep their place."""

    def __init__(self, field: str) -> None:
        super().__init__()
        self.field = field

    def render(self, task: Task) -> Text:
        text = task.description if self.field == "description" else str(task.fields[self.field])
        return Text(text, no_wrap=True, overflow="ellipsis")


def fixed_bar(width: int) -> BarColumn:
    """A bar that keeps its width."""
    return BarColumn(bar_width=width, table_column=Column(no_wrap=True, min_width=width))
