"""Progress of reading large files: a bar on a terminal, periodic lines elsewhere, nothing in the first second."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

_SILENT_SECONDS = 1.0
"""Seconds before anything is shown."""
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
