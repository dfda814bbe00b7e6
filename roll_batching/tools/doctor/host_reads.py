"""Counts the places at which the host waits for the GPU."""

from __future__ import annotations

import collections
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from roll_batching.strategy import infer


class HostReads:
    """Waits of the host for the device by their innermost lines in this package or Megatron."""

    def __init__(self) -> None:
        self.places: collections.Counter[str] = collections.Counter()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts operations inside that torch reports as synchronizing; none on a CPU."""
        if not torch.cuda.is_available():
            yield
            return
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = self._see
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)

    def _see(self, message: Any, *_: Any, **__: Any) -> None:
        if "synchroniz" not in str(message):
            return
        stack = [f for f in traceback.extract_stack() if "warnings" not in f.filename and __file__ != f.filename]
        named = [f for f in stack if any(x in f.filename for x in ("roll_batching/", "megatron/"))]
        last = (named or stack)[-1]
        where = last.filename.split("site-packages/")[-1].rpartition("roll_batching/")
        self.places[f"{where[1]}{where[2]}:{last.lineno} {last.line}"] += 1


def count_host_reads(run: Callable[[], object]) -> tuple[HostReads, HostReads]:
    """(Host reads inside Megatron's schedule, all others) of `run`, a step or pass of a strategy."""
    inside, around, schedule = HostReads(), HostReads(), infer.run_schedule

    def watched(*arguments: Any, **options: Any) -> Any:
        with inside.counted():
            return schedule(*arguments, **options)

    infer.run_schedule = watched
    try:
        with around.counted():
            run()
    finally:
        infer.run_schedule = schedule
    return inside, around
