"""Shows the progress of a run and of reading files: a bar on a terminal, periodic lines in a log file."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

SECONDS_BETWEEN_LINES = 10.0


def default_console() -> Console:
    """Returns a console of standard output; 110 columns wide if that is no terminal, for the tables of a run."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=110)


class ProgressReporter:
    """Shows the progress of a run's phases. With `enabled` False every method is a no-op.

    On a terminal: one bar per phase with the latest values beside it. Elsewhere: a line at the first and the
    last step of a phase, and in between at most every ten seconds. The first step of a process compiles and warms up:
    seconds per step and the time left are those of the steps after it.
    """

    def __init__(self, *, enabled: bool = True, console: Console | None = None) -> None:
        self.enabled = enabled
        self.console = console or default_console()
        self._bars: Progress | None = None
        self._task: TaskID | None = None
        self._phase, self._total = "", 0
        self._started = self._shown = 0.0
        self._first = 0
        self._warm: tuple[float, int] | None = None
        """When the first report of a phase came, and its step."""

    def start_phase(self, phase: str, total: int, completed_steps: int = 0) -> None:
        """Show a phase of `total` steps, of which a resumed run has completed some."""
        if not self.enabled:
            return
        self._phase, self._total, self._first = phase, total, completed_steps
        self._started, self._shown, self._warm = time.monotonic(), -SECONDS_BETWEEN_LINES, None
        if self.console.is_terminal:
            if self._bars is None:
                self._bars = Progress(
                    TextColumn("[bold]{task.description:<7}"),
                    BarColumn(bar_width=20),
                    MofNCompleteColumn(),
                    TextColumn("{task.fields[values]}"),
                    console=self.console,
                )
                self._bars.start()
            self._task = self._bars.add_task(phase, total=total, completed=completed_steps, values="")

    def advance(self, step: int, values: Mapping[str, float | None]) -> None:
        """Shows that step number `step` is over, with `values` (without those that are None)."""
        if not self.enabled:
            return
        now = time.monotonic()
        text = "  ".join((self._pace(step, now), *(f"{k} {_short(v)}" for k, v in values.items() if v is not None)))
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, completed=step, values=text)
            return
        if step < self._total and step > self._first + 1 and now - self._shown < SECONDS_BETWEEN_LINES:
            return
        self._shown = now
        place = f"{self._phase:<7} {step:>{len(str(self._total))}}/{self._total}"
        self.console.print(f"{place}  {text}", soft_wrap=True)

    def _pace(self, step: int, now: float) -> str:
        """Seconds per step; from the second report of a phase on also the time left."""
        if self._warm is None:
            self._warm = now, step
            return f"{_short((now - self._started) / max(step - self._first, 1))} s/step"
        seconds = (now - self._warm[0]) / max(step - self._warm[1], 1)
        return f"{_short(seconds)} s/step, {_clock(seconds * (self._total - step))} left"

    def note(self, text: str) -> None:
        """Prints one line of text, above the bars where there are any."""
        if self.enabled:
            self.console.print(text, soft_wrap=True)

    def close(self) -> None:
        """Stop the bars. Safe to call twice."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


def _short(value: float) -> str:
    """`value` with three significant digits: 0.125, 4,210, 37.1k, 2.5M. Counts below 10,000 are exact."""
    size = abs(value)
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if max(0.9995 * scale, 9999.5) <= size < 999.5 * scale:
            return f"{value / scale:.3g}{unit}"
    is_whole = size < 9999.5 and (isinstance(value, int) or size >= 999.5)
    return fixed(value, 0) if is_whole else f"{value:.3g}"


def _clock(seconds: float) -> str:
    """`seconds` in at most two units: 42 s, 3 min 20 s, 2 h 58 min."""
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


# ---- reading


_SILENT_SECONDS = 1.0
"""Seconds before anything is shown: small files need no progress."""
_SECONDS_BETWEEN_LINES = 10.0


class ReadingProgress:
    """Context manager that shows the bytes read, of `total`, on standard error."""

    def __init__(self, title: str, total: int, *, console: Console | None = None) -> None:
        self.title, self.total = title, total
        self.console = console or Console(stderr=True, highlight=False)
        self._done = 0
        self._bar: Progress | None = None

    def __enter__(self) -> ReadingProgress:
        self._started = time.monotonic()
        self._next = self._started + _SILENT_SECONDS
        return self

    def read(self, size: int) -> None:
        """Count `size` more bytes."""
        self._done += size
        now = time.monotonic()
        if now < self._next or self._done >= self.total:
            return
        if not self.console.is_terminal:
            self._next = now + _SECONDS_BETWEEN_LINES
            left = (now - self._started) * (self.total / max(self._done, 1) - 1)
            share = self._done / max(self.total, 1)
            self.console.print(f"{self.title}: {share:.0%}, about {max(left, 0):.0f} s left", soft_wrap=True)
            return
        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self.console, transient=True)
            self._task = self._bar.add_task(self.title, total=self.total)
            self._bar.start()
        self._bar.update(self._task, completed=self._done)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


# ---- numbers


_LONGEST = 1e12


def fixed(value: float, digits: int, *, sign: bool = False) -> str:
    """`value` with `digits` decimals; in scientific notation from 1e12 on."""
    plus = "+" if sign else ""
    return f"{value:{plus},.{digits}f}" if abs(value) < _LONGEST else f"{value:{plus}.{digits + 1}g}"
