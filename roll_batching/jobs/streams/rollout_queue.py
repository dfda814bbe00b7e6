"""Scored rollouts out of a queue that others fill: first in, first out, none too old, and none waited for in vain.

The queue is any with `get(timeout=...)` that raises `queue.Empty`: of `queue` for threads, of `multiprocessing` for
processes. Give it a `maxsize`, so that a producer that is faster than training waits instead of filling memory with
samples that are too old when their turn comes.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from torch.utils.data import IterableDataset, get_worker_info

from roll_batching.errors import DataError

S = TypeVar("S", bound="Versioned")

END = None
"""What a producer puts last: nothing more comes. Each producer may; the first ends the iteration."""


class Versioned(Protocol):
    """What a queue holds."""

    @property
    def model_version(self) -> int:
        """Version of the weights that it was drawn with."""
        ...


class SampleQueue(Protocol):
    """What `queue.Queue` and `multiprocessing.Queue` have in common, as far as it is needed."""

    def get(self, block: bool = ..., timeout: float | None = ...) -> Any:
        """The oldest item; `queue.Empty` after `timeout` seconds without."""
        ...

    def qsize(self) -> int:
        """About how many items there are."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSample:
    """One response with its prompt, scored. TRL's fields."""

    input_ids: list[int]
    """Prompt and response."""
    completion_mask: list[int]
    """1 for the tokens that are learnt from, one per token."""
    old_log_probs: list[float]
    """One per token, of that token under the weights that drew it; what the prompt's are is not read."""
    advantage: float
    group_id: int
    """Of its prompt."""
    model_version: int
    """Of the weights that drew it."""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class QueueFigures:
    """What came out of a queue since the figures were last taken."""

    taken: int = 0
    dropped: int = 0
    """Too old when their turn came."""
    waited: float = 0.0
    """Seconds that training waited for the producer."""
    staleness: int = 0
    most: int = 0

    def to_row(self, depth: int) -> dict[str, float]:
        """Columns for metrics; `depth` is what waits in the queue now."""
        return {
            "staleness_mean": self.staleness / max(self.taken, 1),
            "staleness_max": self.most,
            "dropped_samples": self.dropped,
            "queue_depth": depth,
            "queue_wait_seconds": self.waited,
        }


class RolloutQueueDataset(IterableDataset, Generic[S]):  # type: ignore[type-arg]
    """The samples of a queue, as they come, without those that are more than `max_staleness` versions old.

    Args:
        rollout_queue: the queue; a bounded one (see above). It holds samples with a `model_version`, and `END`.
        model_version_fn: the version of the weights in training.
        check_health_fn: called with `stale_after_s` whenever nothing came for `poll_interval_s`; raises when the
            producer is dead.
        stale_after_s: seconds without a sample after which the producer is taken for stalled.
        max_staleness: versions that a sample may be behind; an older one is dropped and counted.
        poll_interval_s: see `check_health_fn`.

    Raises:
        DataError: for numbers below 0; while iterating, for a producer that stalls, a sample of a version that does
            not exist yet, inside a DataLoader's worker. What `check_health_fn` raises comes through. The
            iteration can be begun again: no sample is lost.
    """

    def __init__(
        self,
        rollout_queue: SampleQueue,
        model_version_fn: Callable[[], int],
        check_health_fn: Callable[[float], object] = lambda seconds: None,
        stale_after_s: float = 600.0,
        max_staleness: int = 3,
        poll_interval_s: float = 1.0,
    ) -> None:
        if max_staleness < 0 or stale_after_s <= 0 or poll_interval_s <= 0:
            raise DataError(
                "max_staleness is at least 0, stale_after_s and poll_interval_s are above it: "
                f"{max_staleness=}, {stale_after_s=}, {poll_interval_s=}."
            )
        self.queue = rollout_queue
        self.model_version_fn = model_version_fn
        self.check_health_fn = check_health_fn
        self.stale_after_s = stale_after_s
        self.max_staleness = max_staleness
        self.poll_interval_s = poll_interval_s
        self.figures = QueueFigures()

    def staleness(self, sample: S) -> int:
        """Versions that it is behind the weights in training."""
        return self.model_version_fn() - sample.model_version

    def is_fresh(self, sample: S) -> bool:
        """Whether it may be trained on now. For a batcher that lets samples wait."""
        return self.staleness(sample) <= self.max_staleness

    def take_row(self) -> dict[str, float]:
        """The figures since the last call, as columns for metrics."""
        depth = 0
        with contextlib.suppress(NotImplementedError):  # multiprocessing on macOS cannot tell
            depth = self.queue.qsize()
        row, self.figures = self.figures.to_row(depth), QueueFigures()
        return row

    def __iter__(self) -> Iterator[S]:
        if get_worker_info() is not None:
            raise DataError("What is read from a queue is gone from it, so one process must read: num_workers=0")
        while True:
            sample = self._next()
            if sample is END:
                return
            staleness = self.staleness(sample)
            if staleness < 0:
                raise DataError(
                    f"A sample has model_version {sample.model_version}, and the weights in training are of version "
                    f"{self.model_version_fn()}: count versions up when the producer is given new weights, not later."
                )
            if staleness > self.max_staleness:
                self.figures.dropped += 1
                continue
            self.figures.taken += 1
            self.figures.staleness += staleness
            self.figures.most = max(self.figures.most, staleness)
            yield sample

    def _next(self) -> Any:
        began = time.monotonic()
        try:
            while True:
                with contextlib.suppress(queue.Empty):
                    return self.queue.get(timeout=self.poll_interval_s)
                self.check_health_fn(self.stale_after_s)
                if time.monotonic() - began > self.stale_after_s:
                    raise DataError(
                        f"No rollout has come for stale_after_s={self.stale_after_s:g} seconds, and its producer says "
                        "that it is well: look what it waits for, or raise the limit."
                    )
        finally:
            self.figures.waited += time.monotonic() - began
