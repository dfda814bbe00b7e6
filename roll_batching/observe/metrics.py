"""metrics.jsonl and TensorBoard events: one row per step, on disk as soon as the step is over."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""Column -> number, text, or None. Every row has `step` (from 1 in each phase) and `phase`."""


class MetricsWriter:
    """Appends rows to `folder`/metrics.jsonl and to TensorBoard events in `folder`/tensorboard.

    Only one process may write: the others pass `enabled=False`, which makes every call a no-op.
    `resume_after`, (phase, step), cuts off what an interrupted run wrote after the state that is now resumed.

    TensorBoard needs the packages of the extra `megatron`; without them (`tensorboard=False`) only the JSON
    lines are written. A number that is not finite is written as null, since JSON has no other word for it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        enabled: bool = True,
        tensorboard: bool = True,
        resume_after: tuple[str, int] | None = None,
    ) -> None:
        self.path = folder / "metrics.jsonl"
        self.rows: list[Row] = []
        self._file = None
        self._events = None
        if not enabled:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if resume_after is not None and self.path.exists():
            self.rows = _until(read_metrics(self.path), *resume_after)
        with self.path.open("w", encoding="utf-8") as file:
            file.writelines(_as_line(row) for row in self.rows)
        self._file = self.path.open("a", encoding="utf-8")
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(folder / "tensorboard"))
            for row in self.rows:
                self._add_events(row)

    def write(self, row: Mapping[str, Any]) -> None:
        """Add one row. It is flushed before this returns."""
        if self._file is None:
            return
        kept = {key: _plain(value) for key, value in row.items()}
        self.rows.append(kept)
        self._file.write(_as_line(kept))
        self._file.flush()
        if self._events is not None:
            self._add_events(kept)
            self._events.flush()

    def _add_events(self, row: Row) -> None:
        assert self._events is not None
        for key, value in row.items():
            if key != "step" and isinstance(value, (int, float)):
                self._events.add_scalar(f"{row['phase']}/{key}", value, row["step"])

    def close(self) -> None:
        """Close the files. Safe to call twice."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._events is not None:
            self._events.close()
            self._events = None


def read_metrics(path: Path) -> list[Row]:
    """The rows of a metrics.jsonl. A last line that a killed run did not finish is left out."""
    rows = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number != len(lines):
                raise
    return rows


def _until(rows: list[Row], phase: str, step: int) -> list[Row]:
    """The rows up to the last one of this phase that is not later than `step`."""
    last = max((i for i, r in enumerate(rows) if r["phase"] == phase and r["step"] <= step), default=-1)
    if last < 0:  # nothing of the phase yet: keep the phases before it
        return [r for r in rows if r["phase"] != phase]
    return rows[: last + 1]


def _as_line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):  # numpy scalars and one-element tensors
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
