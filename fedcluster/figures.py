"""Figures without pyplot's global state: in files, and in notebooks."""

from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

from fedcluster.files import write_atomically

BLUE, GREY = "#0072B2", "#5A5A5A"  # of Okabe and Ito's palette, which colour-blind readers can tell apart


def canvas(
    columns: int, width: float, height: float, widths: tuple[float, ...] | None = None, rows: int = 1
) -> tuple[Any, Any]:
    """A figure and its axes, row by row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=150)
    axes = figure.subplots(rows, columns, squeeze=False, width_ratios=widths).flatten()
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def whole_numbers(axis: Any) -> None:
    """Put ticks at whole numbers only, also where there is one of them."""
    axis.get_major_locator().set_params(integer=True, min_n_ticks=1)


def heat(ax: Any, values: Any, label: str) -> None:
    """A matrix of shares as an image, from white to blue, with a colour bar."""
    image = ax.imshow(values, aspect="auto", cmap="Blues", vmin=0, interpolation="nearest")
    ax.figure.colorbar(image, ax=ax, label=label)


def save(figure: Any, path: Path) -> None:
    write_atomically(path, lambda file: figure.savefig(file, format="png"))


@dataclass(frozen=True, eq=False)
class Plot:
    """A matplotlib figure that a notebook shows by itself."""

    figure: Any

    def save(self, path: str | Path) -> None:
        """Write it as PNG."""
        save(self.figure, Path(path))

    def _repr_png_(self) -> bytes:
        content = BytesIO()
        self.figure.savefig(content, format="png", dpi=100)
        return content.getvalue()

    def html(self, description: str) -> str:
        """An <img> that holds the picture itself."""
        data = b64encode(self._repr_png_()).decode()
        return f'<img src="data:image/png;base64,{data}" alt="{escape(description)}" style="max-width: 100%">'


def html_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table of texts; what they contain is shown, not interpreted."""

    def row(cells: Iterable[Any], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    return f"<table><thead>{row(header, 'th')}</thead><tbody>{''.join(row(one, 'td') for one in rows)}</tbody></table>"
