"""Times of the phases of optimizer steps on this rank, without synchronising the device.

On CUDA they are timed by events, which are read when the step has ended, and every phase is an NVTX range. On the CPU,
and for phases on the host, the wall clock is read.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from roll_batching.strategy.schedule import changed_attributes

Phase = Literal["plan", "pack", "forward_backward", "loss", "wait", "optimizer"]
PHASES: tuple[Phase, ...] = ("plan", "pack", "forward_backward", "loss", "wait", "optimizer")
"""Phases of a step. They do not overlap, except plan:

- plan: planning on the host since the last step; a background thread plans most steps while the one before trains;
- pack: checks, the consensus of all ranks, and packing as far as the schedule waits for it, on the host;
- forward_backward: the model, and the loss's backward;
- loss: from the model's output to the loss, with log-probs;
- wait: from the end of this rank's passes until gradients and loss are reduced over all ranks: the collectives, and
  the slower ranks;
- optimizer: gradient norm, update and learning-rate schedule.
"""


@dataclass(frozen=True)
class _Span:
    phase: Phase
    outer: Phase | None
    begin: Any
    end: Any


class StepClock:
    """Times the phases of consecutive steps on `device`, in any thread."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._of_thread = threading.local()
        self._spans: deque[_Span] = deque()  # a thread may add one while they are read

    @contextlib.contextmanager
    def phase(self, phase: Phase, *, on_host: bool = False) -> Iterator[None]:
        """Context timed as `phase`; outer phases do not count that time. `on_host`: the device is not used."""
        stack: list[Phase] = self._of_thread.__dict__.setdefault("phases", [])  # nested, the innermost last
        outer = stack[-1] if stack else None
        mark = time.perf_counter if on_host or not self._on_device else _event
        stack.append(phase)
        if self._on_device:
            torch.cuda.nvtx.range_push(phase)
        begin = mark()
        try:
            yield
        finally:
            self._spans.append(_Span(phase, outer, begin, mark()))
            if self._on_device:
                torch.cuda.nvtx.range_pop()
            stack.pop()

    def timed(self, phase: Phase, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with its calls timed as `phase`."""

        def call(*arguments: Any, **options: Any) -> Any:
            with self.phase(phase):
                return function(*arguments, **options)

        return call

    def timing(self, phase: Phase, owner: Any, name: str) -> contextlib.AbstractContextManager[None]:
        """Context in which calls of the function `owner.name` are timed as `phase`."""
        function = getattr(owner, name)
        if function is None:  # without DDP there is no finalize_model_grads_func
            return contextlib.nullcontext()
        return changed_attributes(owner, {name: self.timed(phase, function)})

    def discard(self) -> None:
        """Discards all times since the last reading."""
        self._spans.clear()

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Context of a step: the times of one that fails are discarded."""
        try:
            yield
        except BaseException:
            self.discard()
            raise

    def read(self) -> dict[Phase, float]:
        """Seconds of every phase since the last reading. Call it when the device has finished them."""
        seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        while self._spans:
            span = self._spans.popleft()
            if isinstance(span.begin, float):
                spent = span.end - span.begin
            else:
                spent = span.begin.elapsed_time(span.end) / 1000
            seconds[span.phase] += spent
            if span.outer is not None:
                seconds[span.outer] -= spent
        return seconds


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
