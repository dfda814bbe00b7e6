"""The sample log rollouts.jsonl: one line per logged response, in the order of the steps."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from roll_batching.errors import RollBatchingError
from roll_batching.files import cause

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
        try:
            for line in lines:
                if self._file is None:
                    self._file = self.path.open("a", encoding="utf-8", errors="backslashreplace")
                self._file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
            if self._file is not None:
                self._file.flush()
        except OSError as error:
            raise RollBatchingError(
                f"{self.path} cannot be written: {cause(error)}. Free some space, or log fewer responses "
                "(rollout_samples)"
            ) from error

    def close(self) -> None:
        """Closes the file. Safe to call twice."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # flushed after every step
                self._file.close()
            self._file = None


def end_of_step(path: Path, step: int) -> int:
    """Bytes of `path` before its first line of a later step than `step`, or its first incomplete line."""
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
    try:
        os.truncate(path, end)
    except OSError as error:
        raise RollBatchingError(f"{path} cannot be written: {cause(error)}") from error
