"""metrics.jsonl and TensorBoard events: one row per step, written when the step is over."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from roll_batching.errors import RollBatchingError
from roll_batching.files import atomic_file, cause

METRICS = "metrics.jsonl"
EVENTS = "tensorboard"

Metrics = dict[str, Any]
"""One row: column -> number, text, or None. A written row has `step` (from 1 in each phase) and `phase`."""


class Tracker(Protocol):
    """Receives every row, beside the file."""

    def add(self, row: Metrics) -> None:
        """Send a row."""

    def close(self) -> None:
        """End the run; no row follows."""


class MetricsWriter:
    """Appends rows to `folder`/metrics.jsonl and to TensorBoard events in `folder`/tensorboard.

    `tracker` also receives the rows written from now on.

    Only one process may write: the others pass `enabled=False`, which makes every call a no-op.
    `resume_after`, (phase, step), removes the rows after it, which an interrupted run wrote after its last checkpoint;
    the file is replaced atomically, and events are rewritten. Without it there must be no rows yet.

    TensorBoard needs the packages of the extra `megatron`; without them (`tensorboard=False`) only the JSON
    lines are written. A number that is not finite is written as null, since JSON has no NaN.

    Raises RollBatchingError when files cannot be read or written, or the file holds rows of another run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        enabled: bool = True,
        tensorboard: bool = True,
        resume_after: tuple[str, int] | None = None,
        tracker: Tracker | None = None,
    ) -> None:
        self._tracker = tracker
        self.path = folder / METRICS
        self.rows: list[Metrics] = []
        self._file: TextIO | None = None
        self._events: Any = None
        if not enabled:
            return
        with self._name_write_errors():
            folder.mkdir(parents=True, exist_ok=True)
            if resume_after is not None and self.path.exists():
                self.rows = rows_until(read_metrics(self.path), *resume_after)
                with atomic_file(self.path) as partial:
                    partial.write_text("".join(map(_to_line, self.rows)), encoding="utf-8")
            elif self.path.exists() and self.path.stat().st_size:
                raise RollBatchingError(f"{self.path} holds the rows of another run: move it away")
            self._file = self.path.open("a", encoding="utf-8")
            if tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                if (folder / EVENTS).exists():
                    shutil.rmtree(folder / EVENTS)  # written again from the rows
                _silence_tensorboard_thread()
                self._events = SummaryWriter(str(folder / EVENTS))
                for row in self.rows:
                    self._add_events(row)

    @contextlib.contextmanager
    def _name_write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RollBatchingError(
                f"{error.filename or self.path} cannot be written: {cause(error)}. Free some space or repair the "
                "folder, then resume the run"
            ) from error

    def write(self, row: Mapping[str, Any]) -> None:
        """Add one row. It is flushed before this returns."""
        if self._file is None:
            return
        plain = {key: _to_plain(value) for key, value in row.items()}
        self.rows.append(plain)
        with self._name_write_errors():
            self._file.write(_to_line(plain))
            self._file.flush()
            if self._events is not None:
                self._add_events(plain)
                self._events.flush()
        if self._tracker is not None:
            self._tracker.add(plain)

    def _add_events(self, row: Metrics) -> None:
        assert self._events is not None
        for key, value in row.items():
            if key != "step" and isinstance(value, (int, float)):
                self._events.add_scalar(f"{row['phase']}/{key}", value, row["step"])

    def close(self) -> None:
        """Close the files. Safe to call twice."""
        with contextlib.suppress(OSError):  # flushed after every row: earlier errors have been raised
            if self._file is not None:
                self._file.close()
        with contextlib.suppress(OSError):
            if self._events is not None:
                self._events.close()
        self._file = self._events = None
        if self._tracker is not None:
            self._tracker.close()
            self._tracker = None


@functools.cache
def _silence_tensorboard_thread() -> None:
    """Print no traceback of TensorBoard's thread: `flush` and `close` raise its error where rows are written."""
    original_hook = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if not type(args.thread).__module__.startswith("tensorboard."):
            original_hook(args)

    threading.excepthook = hook


def read_metrics(path: Path) -> list[Metrics]:
    """The rows of a metrics.jsonl, without a last line that a killed run left incomplete.

    Raises RollBatchingError, naming the line, when another line is not a row.
    """
    rows: list[Metrics] = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows.append({"step": row["step"], "phase": row["phase"], **row})
        except (ValueError, TypeError, KeyError) as error:
            if number != len(lines):
                raise RollBatchingError(
                    f"{path}:{number} is not a row of metrics ({type(error).__name__}: {error}): repair the line or "
                    "move the file away"
                ) from None
    return rows


def rows_until(rows: list[Metrics], phase: str, step: int) -> list[Metrics]:
    """The rows up to the last row of this phase whose step is at most `step`."""
    last = max((i for i, r in enumerate(rows) if r["phase"] == phase and r["step"] <= step), default=-1)
    if last < 0:  # nothing of the phase yet: keep the phases before it
        return [r for r in rows if r["phase"] != phase]
    return rows[: last + 1]


def _to_line(row: Metrics) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _to_plain(value: Any) -> Any:
    if hasattr(value, "item"):  # numpy scalars and one-element tensors
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
