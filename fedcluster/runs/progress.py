"""Progress of a run: a live line on a terminal, sparse log lines elsewhere.

Progress goes to standard error, results to standard output.
"""

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from rich.console import Console
from rich.progress import MofNCompleteColumn, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from fedcluster.reporting import wrapped
from fedcluster.runs.bars import Cut, fixed_bar

console = Console(stderr=True, highlight=False)

LOG_EVERY = 10.0  # seconds between log lines where there is no terminal, at least,
LOG_WITHIN = 300.0  # and at most, if anything was done
WIDE = 110  # characters of a line that has room for cycles and devices per second

Item = TypeVar("Item")
Progress = Callable[[str, int, int], None]
"""Called with the stage, the number of rounds done, and the number of all rounds."""


class Display:
    """Shows nothing: the display of a run inside another program."""

    def say(self, text: str) -> None:
        pass

    def announce(self, text: str) -> None:
        pass

    def begin(self, rounds: int, cycles: int, done: int) -> None:
        pass

    def cycle(self, round: int, cycle: int, devices_per_second: float) -> None:
        pass

    def round(self, line: dict[str, Any]) -> None:
        pass

    def track(self, items: Sequence[int], what: str, unit: str) -> Iterable[int]:
        """Yield the items and show how many are done: for work besides training."""
        return items

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass


class Spoken(Display):
    """Writes remarks to standard error, and the description of the run to standard output."""

    def say(self, text: str) -> None:
        say(text)

    def announce(self, text: str) -> None:
        print(wrapped(text, sys.stdout), flush=True)

    def track(self, items: Sequence[int], what: str, unit: str) -> Iterable[int]:
        return tracked(items, what, unit)


class Log(Spoken):
    """A line for the first and the last round, and for one every few seconds between."""

    def begin(self, rounds: int, cycles: int, done: int) -> None:
        self.rounds, self.shown = rounds, 0.0

    def round(self, line: dict[str, Any]) -> None:
        now = time.monotonic()
        if now - self.shown >= LOG_EVERY or line["round"] == self.rounds:
            self.shown = now
            self.say(f"round {line['round']}/{self.rounds}  {scores(line)}  {line['elapsed']:.0f} s")


class Live(Spoken):
    """Shows round, loss, metrics and the time left in one live line, and with room for it cycle and devices per
    second."""

    def __init__(self, console: Console = console) -> None:
        columns: list[ProgressColumn] = [
            TextColumn("round {task.fields[round]}/{task.fields[rounds]}"),
            fixed_bar(24 if console.width >= WIDE else 10),
            Cut("scores"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
        ]
        if console.width >= WIDE:
            columns.insert(1, TextColumn("cycle {task.fields[cycle]:>3}/{task.fields[cycles]}"))
            columns.insert(4, TextColumn("{task.fields[rate]:>6.0f} devices/s"))
        self.progress = Bar(*columns, console=console)

    def begin(self, rounds: int, cycles: int, done: int) -> None:
        self.cycles = cycles
        fields: dict[str, Any] = {
            "round": done,
            "rounds": rounds,
            "cycle": 0,
            "cycles": cycles,
            "scores": "",
            "rate": 0.0,
        }
        self.task = self.progress.add_task("", total=rounds * cycles, completed=done * cycles, **fields)
        self.progress.start()

    def cycle(self, round: int, cycle: int, devices_per_second: float) -> None:
        done = round * self.cycles + cycle + 1
        self.progress.update(self.task, completed=done, round=round + 1, cycle=cycle + 1, rate=devices_per_second)

    def round(self, line: dict[str, Any]) -> None:
        self.progress.update(self.task, scores=scores(line))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.progress.stop()


class Notebook(Spoken):
    """A bar in a Jupyter notebook, with loss and metrics beside it; remarks are printed under it."""

    def begin(self, rounds: int, cycles: int, done: int) -> None:
        from tqdm.auto import tqdm

        self.bar = tqdm(total=rounds, initial=done, unit="round")

    def round(self, line: dict[str, Any]) -> None:
        self.bar.set_postfix_str(scores(line), refresh=False)
        self.bar.update()

    def say(self, text: str) -> None:
        print(text, flush=True)

    def track(self, items: Sequence[int], what: str, unit: str) -> Iterable[int]:
        from tqdm.auto import tqdm

        shown: Iterable[int] = tqdm(items, desc=what, unit=unit, leave=False)
        return shown

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if bar := getattr(self, "bar", None):
            bar.close()


def in_notebook() -> bool:
    """Whether this is the kernel of a Jupyter notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def say(text: str) -> None:
    console.print(wrapped(text, console.file), markup=False, soft_wrap=True)


def tracked(items: Collection[Item], what: str, unit: str) -> Iterator[Item]:
    """Yield the items and show how many are done."""
    if console.is_terminal:
        columns = Cut("description"), TextColumn("{task.completed} of {task.total}"), Cut("unit"), fixed_bar(16)
        with Bar(*columns, TimeRemainingColumn(compact=True), console=console, transient=True) as progress:
            task = progress.add_task(f"{what}:", total=len(items), unit=unit)
            for item in items:
                yield item
                progress.advance(task)
        return
    shown = time.monotonic()
    for done, item in enumerate(items):
        if time.monotonic() - shown >= LOG_EVERY:
            shown = time.monotonic()
            say(f"{what}: {done} of {len(items)} {unit}")
        yield item


@contextmanager
def stages() -> Iterator[Progress]:
    """Progress of many runs: a bar for each stage, over all rounds of its runs, or lines where there is no terminal."""
    if not console.is_terminal:
        yield stages_in_lines()
        return
    with Bar(
        Cut("description"),
        fixed_bar(40 if console.width >= WIDE else 24),
        MofNCompleteColumn(),
        TextColumn("rounds,"),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
        console=console,
    ) as bar:
        tasks: dict[str, Any] = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield progress


def stages_in_lines() -> Progress:
    """A line at the start of a stage, then one at each twentieth with the time left, within LOG_EVERY to LOG_WITHIN."""
    begun: dict[str, tuple[float, int]] = {}
    latest: dict[str, tuple[float, int]] = {}

    def progress(stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage not in begun:
            begun[stage] = latest[stage] = now, done
            say(f"{stage}: {total - done} rounds to do")
            return
        (last, before), (start, first) = latest[stage], begun[stage]
        wait = LOG_EVERY if (done - before) * 20 >= total else LOG_WITHIN
        if now - last >= wait and done > before:
            latest[stage] = now, done
            left = (now - start) / (done - first) * (total - done)
            say(f"{stage}: {done} of {total} rounds, {duration(left)} left")

    return progress


def duration(seconds: float) -> str:
    """A duration as text, in the unit that fits."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def scores(line: dict[str, Any]) -> str:
    """The scores of a line; empty where the server has no data."""
    from fedcluster.models.metrics import recorded_metrics

    loss = line.get("train_loss", line.get("test_loss"))
    metrics = [f"{metric.label} {metric.text(line[f'test_{metric.name}']):>6}" for metric in recorded_metrics(line)]
    return "" if loss is None else "  ".join([f"loss {loss:.4f}", *metrics])


def default_display() -> Display:
    """The display for this notebook or terminal: live, or a log where there is neither."""
    if in_notebook():
        return Notebook()
    return Live() if console.is_terminal else Log()
