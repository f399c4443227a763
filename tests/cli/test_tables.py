"""Tables fit the terminal; in a pipe a row stays a line."""

import pytest

from fedcluster.analysis.compare import Outcome
from fedcluster.cli.grid import Grid, show
from fedcluster.cli.tables import size_text

WIDE = Grid([f"column {n}" for n in range(12)], [[f"{row}.{n}" for n in range(12)] for row in range(6)])


@pytest.mark.parametrize("columns", [40, 80, 100])
def test_a_wide_table_is_split_with_its_first_column_in_each_part(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    show(WIDE)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    parts = [line for line in lines if "column" in line]
    assert len(parts) > 1
    assert all(part.split("column")[1].strip() == "0" for part in parts)
    printed = {cell for line in lines for cell in line.split()}
    assert all(f"{row}.{n}" in printed for row in range(6) for n in range(12))


def test_a_few_rows_become_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    show(Grid(WIDE.columns, WIDE.rows[:3]))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 40
    assert [cell.strip() for cell in lines[1].split("  ") if cell] == ["column 0", "0.0", "1.0", "2.0"]


def test_without_a_terminal_a_row_is_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    show(WIDE)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if "3.0" in line] == [[f"3.{n}" for n in range(12)]]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (76, "76 bytes"), (317_680, "318 kB"), (4e6, "4 MB"), (2.5e10, "25 GB"), (5e13, "50,000 GB")],
)
def test_sizes_are_in_a_unit_that_fits(count: float, text: str) -> None:
    assert size_text(count) == text


def test_one_seed_has_no_deviation() -> None:
    def shown(*losses: float) -> str:
        lines = [[{"train_loss": loss}] for loss in losses]
        return Outcome("fedavg", 0.1, 1, lines).final_text("train_loss", "{:.1f}".format)

    assert shown(0.5) == "0.5"
    assert shown(0.4, 0.5, 0.6) == "0.5 ± 0.1"
    assert shown(0.5, 0.5) == "0.5 ± 0.0"
