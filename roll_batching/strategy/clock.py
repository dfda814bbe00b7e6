"""Where the time of a training step goes, without waiting for a device: by phase, on this rank.

On CUDA what the device does is timed by events, which are read when the step has ended anyway, and every phase is an
NVTX range; on the CPU, and for what the host does alone, the clock is read.
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

Phase = Literal["plan", "pack", "forward_backward", "loss", "wait", "optimizer"]
PHASES: tuple[Phase, ...] = ("plan", "pack", "forward_backward", "loss", "wait", "optimizer")
"""What a step consists of, none of it inside another:

- plan: micro-batches of lengths, on the host, of the plans made since the step before ended; most of them are made
  beside a step (`rl.update`), whose other phases then run meanwhile;
- pack: checks, what ranks agree on before they begin, and packing as far as it is waited for, on the host;
- forward_backward: the model, and the loss's backward;
- loss: from the model's output to the loss, log-probs among it;
- wait: from the end of this rank's own passes until gradients are summed over ranks and the step's loss is known to
  all: the sums themselves, and the slower ranks;
- optimizer: the norm of the gradient, the update, and the schedule.
"""


@dataclass(frozen=True)
class _Span:
    phase: Phase
    inside: Phase | None
    begin: Any
    end: Any


class _Open(threading.local):
    """The phases that a thread is in, the innermost last."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []


class StepClock:
    """Times the phases of one step after the other on `device`; what another thread does beside it, too."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._open = _Open()
        self._spans: deque[_Span] = deque()  # a thread may add one while they are read

    @contextlib.contextmanager
    def phase(self, phase: Phase, *, on_host: bool = False) -> Iterator[None]:
        """The block belongs to `phase`, and not to the one around it. `on_host`: the device has no part in it."""
        around = self._open.phases
        inside = around[-1] if around else None
        mark = time.perf_counter if on_host or not self._on_device else _event
        around.append(phase)
        if self._on_device:
            torch.cuda.nvtx.range_push(phase)
        begin = mark()
        try:
            yield
        finally:
            self._spans.append(_Span(phase, inside, begin, mark()))
            if self._on_device:
                torch.cuda.nvtx.range_pop()
            around.pop()

    def timed(self, phase: Phase, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose calls belong to `phase`."""

        def act(*arguments: Any, **options: Any) -> Any:
            with self.phase(phase):
                return function(*arguments, **options)

        return act

    def timing(self, phase: Phase, owner: Any, name: str) -> contextlib.AbstractContextManager[None]:
        """Inside, calls of the function `owner.name` belong to `phase`."""
        function = getattr(owner, name)
        if function is None:  # a model whose gradients nobody reduces has none
            return contextlib.nullcontext()
        return _replaced(owner, name, self.timed(phase, function))

    def forget(self) -> None:
        """What was timed so far is not read."""
        self._spans.clear()

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """The block is a step: of one that fails nothing is left to the figures of the next."""
        try:
            yield
        except BaseException:
            self.forget()
            raise

    def read(self) -> dict[Phase, float]:
        """Seconds of every phase since the last reading. The device must have finished them."""
        seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        while self._spans:
            span = self._spans.popleft()
            if isinstance(span.begin, float):
                spent = span.end - span.begin
            else:
                spent = span.begin.elapsed_time(span.end) / 1000
            seconds[span.phase] += spent
            if span.inside is not None:
                seconds[span.inside] -= spent
        return seconds


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
