"""What the command line draws while something runs: bars with an ETA, or plain lines where no one watches."""

from __future__ import annotations

import re
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from bench.records import Record

__all__ = ["PullDisplay", "RunDisplay"]


class _Display:
    """A rich progress display on a terminal; elsewhere silent, with :meth:`say` for plain lines."""

    def __init__(self, console: Console, *columns: ProgressColumn) -> None:
        self.console = console
        self._bars = Progress(
            *columns,
            console=console,
            disable=not console.is_terminal,
            speed_estimate_period=600,  # one request may take minutes, and the ETA needs several
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """Print one line, above the bars where there are some."""
        self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)


class RunDisplay(_Display):
    """Progress of a run; a :class:`runners.run.Progress`."""

    def __init__(self, console: Console, planned: int) -> None:
        """Take where to draw, and how many requests the whole run has."""
        super().__init__(
            console,
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        self._planned = planned
        self._whole: TaskID | None = None
        self._task = self._bars.add_task("preparing", total=None, note="")
        self._right = self._graded = 0
        self._cell, self._done, self._total = "", 0, 0

    def phase(self, text: str) -> None:
        """Show that something without a known length has begun."""
        self._bars.update(self._task, description=text)
        if not self.console.is_terminal:
            self.say(text)

    def cell(self, cell_id: str, done: int, total: int) -> None:
        """Begin a cell's bar."""
        self._bars.remove_task(self._task)
        self._task = self._bars.add_task(cell_id, total=total, completed=done, note="")
        if self._whole is not None:
            self._bars.advance(self._whole, done)
        elif total < self._planned:
            self._whole = self._bars.add_task("the whole run", total=self._planned, completed=done, note="")
        self._cell, self._done, self._total = cell_id, done, total
        self._right = self._graded = 0
        if not self.console.is_terminal:
            self.say(f"{cell_id}: {total - done} requests to do" + (f", {done} done earlier" if done else ""))

    def record(self, record: Record) -> None:
        """Advance the bar by one request."""
        self._done += 1
        self._graded += 1
        if record.grade is not None:
            self._right += next(iter(record.grade.scores.values()), 0.0) >= 1
        note = f"right {self._right}/{self._graded}"
        self._bars.update(self._task, advance=1, note=note)
        if self._whole is not None:
            self._bars.advance(self._whole)
        if not record.completed:
            message = record.error.message if record.error else record.outcome
            self.say(f"{record.cell} #{record.index}: {record.outcome}: {message}")
        elif not self.console.is_terminal and (self._done == self._total or self._done % 10 == 0):
            self.say(f"{self._cell}: {self._done}/{self._total}, {note}")


class PullDisplay(_Display):
    """Progress of downloads; called as ``display(model, done, total, doing)`` with sizes in bytes."""

    def __init__(self, console: Console) -> None:
        super().__init__(
            console,
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        self._tasks: dict[str, TaskID] = {}
        self._said = ""

    def __call__(self, model: str, done: int, total: int, doing: str) -> None:
        """Show how far ``doing`` has come for ``model``."""
        if not self.console.is_terminal:
            step = f"{model}: {re.sub(r',? *[0-9]+ of [0-9]+.*', '', doing)}"
            if step != self._said:  # a line for each kind of step, not for each part
                self._said = step
                self.say(f"{step} ({total / 1e6:,.0f} MB)")
            return
        if model not in self._tasks:
            self._tasks[model] = self._bars.add_task(model, total=total)
        self._bars.update(self._tasks[model], description=f"{model}: {doing}", completed=done, total=total)
