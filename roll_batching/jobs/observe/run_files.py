"""Writes the files of a run's folder after every step: metrics and TensorBoard events, sample log, last plan.

run_info.json is written once: when and where the run started, and with which versions.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import math
import os
import platform
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

import roll_batching
from roll_batching.errors import PlanError, RollBatchingError
from roll_batching.files import atomic_file, cause
from roll_batching.planning import Plan

METRICS = "metrics.jsonl"
EVENTS = "tensorboard"

Metrics = dict[str, Any]
"""One row: column -> number, text, or None. A written row has `step` (from 1 in each phase) and `phase`."""


@contextlib.contextmanager
def _name_write_errors(path: Path, cure: str = "repair the folder, then resume the run") -> Iterator[None]:
    """Raises RollBatchingError for an OSError in the block, which writes `path`."""
    try:
        yield
    except OSError as error:
        raise RollBatchingError(
            f"{error.filename or path} cannot be written: {cause(error)}. Free some space, or {cure}"
        ) from error


class Tracker(Protocol):
    """Receives every row that is written to the file."""

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
        with _name_write_errors(self.path):
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

    def write(self, row: Mapping[str, Any]) -> None:
        """Add one row. It is flushed before this returns."""
        if self._file is None:
            return
        plain = {key: _to_plain(value) for key, value in row.items()}
        self.rows.append(plain)
        with _name_write_errors(self.path):
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


def iterate_leaves(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested `settings` that are no sections, with their paths joined by dots, below `above`."""
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            yield from iterate_leaves(value, f"{above}{key}.")
        else:
            yield above + key, value


# ---- rollouts file


ROLLOUTS = "rollouts.jsonl"


class RolloutsFile:
    """Appends lines to `folder`/rollouts.jsonl, each with `step`. The file is created by the first line.

    Raises RollBatchingError when the file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / ROLLOUTS
        self._file: TextIO | None = None

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Write one line per mapping, flushed before this returns."""
        with _name_write_errors(self.path, "log fewer responses (rollout_samples)"):
            for line in lines:
                if self._file is None:
                    self._file = self.path.open("a", encoding="utf-8", errors="backslashreplace")
                self._file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
            if self._file is not None:
                self._file.flush()

    def close(self) -> None:
        """Closes the file. Safe to call twice."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # flushed after every step
                self._file.close()
            self._file = None


def end_of_step(path: Path, step: int) -> int:
    """Counts the bytes of `path` before its first line of a later step than `step`, or first incomplete line."""
    end = 0
    with path.open("rb") as lines:
        for line in lines:
            try:
                if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                    break
            except (ValueError, TypeError, KeyError):
                break
            end += len(line)
    return end


def cut_after(path: Path, end: int) -> None:
    """Truncate `path` to its first `end` bytes. Raises RollBatchingError when it cannot be written."""
    with _name_write_errors(path):
        os.truncate(path, end)


# ---- plan file


PLAN = "last_plan.json"
MOST_SAMPLES = 20_000
"""Most samples of a plan that is written: a larger one would take longer to write than it is worth after each step."""


@dataclass(frozen=True)
class LastPlan:
    """A plan as the file holds it."""

    phase: str
    step: int
    samples: int
    plan: Plan | None
    """None where it has more than `MOST_SAMPLES` samples."""


def write_plan(folder: Path, plan: Plan, *, phase: str, step: int) -> None:
    """Replace `folder`/last_plan.json. Raises RollBatchingError when it cannot be written."""
    samples = len(plan.lengths)
    content = {
        "phase": phase,
        "step": step,
        "samples": samples,
        "plan": plan.to_dict() if samples <= MOST_SAMPLES else None,
    }
    path = folder / PLAN
    with _name_write_errors(path), atomic_file(path) as partial:
        partial.write_text(json.dumps(content), encoding="utf-8")


def read_plan(text: str) -> LastPlan:
    """The content of a last_plan.json. Raises PlanError when it is not one, or holds no valid plan."""
    try:
        content: Any = json.loads(text)
        values = content["plan"]
        plan = None if values is None else Plan.from_dict(values)
        return LastPlan(str(content["phase"]), int(content["step"]), int(content["samples"]), plan)
    except PlanError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError) as error:
        raise PlanError(f"it holds no plan ({type(error).__name__}: {error})") from None


# ---- run info


RUN_INFO = "run_info.json"
_PACKAGES = (
    *("torch", "megatron-core", "transformer-engine", "flash-attn", "flash-attn-4", "transformers"),
    *("numpy", "numba", "ray", "vllm", "sglang"),
)
"""Distributions whose versions change results or speed."""


def write_run_info(folder: Path, notices: Sequence[str]) -> None:
    """Replace `folder`/run_info.json. Raises OSError when it cannot be written."""
    environment: dict[str, Any] = {
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "device": _device(),
        "cpu_count": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "roll-batching": roll_batching.__version__,
    }
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            environment[name] = importlib.metadata.version(name)
    content = json.dumps({"environment": environment, "notices": list(notices)}, indent=1)
    with atomic_file(folder / RUN_INFO) as partial:
        partial.write_text(content + "\n", encoding="utf-8")


def _device() -> str:
    """Name of the device of this process, without importing torch."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"CPU ({platform.machine()})"
