"""Progress where there is no terminal: lines that say how far it is and how long it takes, and not too many."""

import pytest

from fedcluster.runs import progress as display
from fedcluster.runs.progress import duration, stages


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("fedcluster.runs.progress.time.monotonic", lambda: now[0])
    return now


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(display, "say", lines.append)
    return lines


def test_many_runs_in_lines(clock: list[float], said: list[str]) -> None:
    with stages() as progress:
        for done in range(100, 1001):  # a hundred were there before; a second each
            progress("fig4", done, 1000)
            clock[0] += 1
    assert said[:2] == ["fig4: 900 rounds to do", "fig4: 150 of 1000 rounds, 14 minutes left"]
    assert said[-1] == "fig4: 1000 of 1000 rounds, 0 s left"
    assert len(said) == 1 + 18


def test_long_stages_are_heard_of(clock: list[float], said: list[str]) -> None:
    with stages() as progress:
        for second in range(3601):  # a round takes 1000 s
            clock[0] = second
            progress("paper", second // 1000, 1000)
    left = [(1, "277.5"), (2, "277.2"), (3, "276.9")]
    assert said == ["paper: 1000 rounds to do", *(f"paper: {j} of 1000 rounds, {n} hours left" for j, n in left)]


def test_short_stages_say_little(clock: list[float], said: list[str]) -> None:
    with stages() as progress:
        for stage in ("tuning", "runs"):
            for done in range(6):
                progress(stage, done, 5)
                clock[0] += 1
    assert said == ["tuning: 5 rounds to do", "runs: 5 rounds to do"]


def test_things_in_lines(clock: list[float], said: list[str]) -> None:
    for _ in display.tracked(range(25), "decoding", "pictures"):
        clock[0] += 1
    assert said == ["decoding: 10 of 25 pictures", "decoding: 20 of 25 pictures"]


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 s"), (89, "89 s"), (90, "2 minutes"), (5000, "83 minutes"), (9000, "2.5 hours")]
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words
