"""What a person sees: lines that fit 80 columns, brackets that are not eaten as markup, one suggestion."""

import io
import re
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import typer
from rich.console import Console

from fedcluster.analysis.names import AXES, RATES, SCALES
from fedcluster.cli.main import app
from fedcluster.reporting import wrapped
from fedcluster.runs.progress import Live
from tests.conftest import Here

Write = Callable[..., Path]
FLEET = "device,timezone,samples\na,Asia/Tokyo,20\nb,Asia/Tokyo,30\nc,Europe/Berlin,40\nd,America/Lima,60\n"


@pytest.fixture
def narrow(here: Here, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A command in a terminal of 80 columns. Its lines are shorter, but for one with a long path."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("fedcluster.training.executors.processes.cores", lambda: 1)

    def call(*words: object) -> str:
        code, out, err = here(*words)
        assert code == 0, err
        long = [line for line in (out + err).splitlines() if len(line) > 80 and " " in line.strip()]
        assert not long
        return out

    return call


def test_every_command_that_prints_tables_fits_80_columns(narrow: Callable[..., str], write_experiment: Write) -> None:
    fleet = {"devices": 12, "samples": 20, "test_share": 0.2}
    path = write_experiment(fleet=fleet, clusters={"count": 10, "participation": 1.0}, rounds=2)
    Path("fleet.csv").write_text(FLEET)
    assert "device updates" in narrow("compare", path, "--seeds", "2", "--out", "compared")
    narrow("compare", path, "--seeds", "2", "--x", "bytes", "--out", "compared", "--resume")
    assert "q_K" in narrow("partition", path)
    narrow("plan", "fleet.csv", "--count", "3")
    few = write_experiment("few.toml", fleet={"devices": 4, "samples": 10}, clusters={"count": 2})
    assert "bound" in narrow("analyze", few)
    assert "M" in narrow("advise", few)
    narrow("run", path, "--out", "run")
    assert "worst decile" in narrow("evaluate", "run", "--devices")
    listed = narrow("algorithms")
    assert "local_ghbm" in listed
    assert "past models" in listed
    assert "round_momentum, amplified" in " ".join(listed.split())


def test_one_seed_shows_no_deviation_and_small_models_kilobytes(
    narrow: Callable[..., str], write_experiment: Write
) -> None:
    text = narrow("compare", write_experiment(), "--seeds", "1", "--methods", "fedavg,fedcluster")
    assert "±" not in text
    assert " kB" in text


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_live_line_keeps_its_bar_and_does_not_wrap(columns: int) -> None:
    console, shown = (Console(width=columns, color_system=None, file=io.StringIO()) for _ in range(2))
    live = Live(console)
    live.begin(rounds=1000, cycles=10, done=0)
    live.cycle(round=998, cycle=9, devices_per_second=12345.0)
    live.round({"train_loss": 12.3456, "test_loss": 1.0, "test_rmse": 123.4, "test_mae": 99.9, "test_r2": 0.5})
    shown.print(live.progress.get_renderable())
    live.progress.stop()
    assert isinstance(shown.file, io.StringIO)
    (line,) = shown.file.getvalue().splitlines()
    assert len(line) <= columns
    assert line.count("━") + line.count("╸") >= 10
    assert "round 999/1000" in line
    assert "left" in line


def test_sentences_break_between_words_and_paths_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "runs/" + "x" * 90
    monkeypatch.setenv("COLUMNS", "40")
    assert wrapped(f"Written: {path}", io.StringIO()).splitlines() == ["Written:", path]
    monkeypatch.delenv("COLUMNS")
    assert wrapped("word " * 50, io.StringIO()) == "word " * 50


def test_no_bracket_of_a_help_text_is_eaten(here: Here) -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    found = 0
    for name, command in group.commands.items():
        shown = "".join(here(name, "--help")[1].replace("│", " ").split())
        texts = [command.help or "", *(getattr(param, "help", None) or "" for param in command.params)]
        for bracket in re.findall(r"\[[^]]*\]", " ".join(texts)):
            found += 1
            assert "".join(bracket.replace("\\", "").split()) in shown
    assert found


def test_a_mistyped_command_is_answered_by_one_suggestion(here: Here) -> None:
    code, _, err = here("rnu")
    assert (code, err.count("Did you mean")) == (2, 1)


def test_names_that_are_checked_before_imports_are_those_of_the_analysis() -> None:
    from fedcluster.analysis.paper import choices
    from fedcluster.runs.plots import X

    assert tuple(X) == AXES
    assert (tuple(choices.SCALES), tuple(choices.RATES)) == (SCALES, RATES)
