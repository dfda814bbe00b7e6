"""FIFO queue of scored rollouts with a staleness limit and a timeout.

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
"""Last item of a producer. With several producers, the first such item ends the iteration."""


class Versioned(Protocol):
    """A sample that knows its weight version."""

    @property
    def model_version(self) -> int:
        """Version of the weights that sampled it."""
        ...


class SampleQueue(Protocol):
    """The common interface of `queue.Queue` and `multiprocessing.Queue`."""

    def get(self, block: bool = ..., timeout: float | None = ...) -> Any:
        """The oldest item. Raises `queue.Empty` after `timeout` seconds without any."""
        ...

    def qsize(self) -> int:
        """Approximate number of items."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSample:
    """One response with its prompt, scored. TRL's fields."""

    input_ids: list[int]
    """Prompt and response."""
    completion_mask: list[int]
    """1 for the tokens of the loss, one per token."""
    old_log_probs: list[float]
    """One per token, under the weights that sampled it; values of the prompt are not read."""
    advantage: float
    group_id: int
    """Number of its prompt."""
    model_version: int
    """Version of the weights that sampled it."""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class QueueMetrics:
    """Staleness, drops and waiting time of samples taken from a queue."""

    taken: int = 0
    dropped: int = 0
    """Samples that were too old when taken."""
    wait_seconds: float = 0.0
    """Seconds that training waited for the producer."""
    _staleness_sum: int = 0
    _staleness_max: int = 0

    def add(self, staleness: int, samples: int = 1) -> None:
        """Count samples taken, `staleness` weight versions old."""
        self.taken += samples
        self._staleness_sum += staleness * samples
        self._staleness_max = max(self._staleness_max, staleness)

    def to_dict(self, depth: int) -> dict[str, float]:
        """Columns for metrics; `depth` is the number of samples in the queue."""
        return {
            "staleness_mean": self._staleness_sum / max(self.taken, 1),
            "staleness_max": self._staleness_max,
            "dropped_samples": self.dropped,
            "queue_depth": depth,
            "queue_wait_seconds": self.wait_seconds,
        }


class RolloutQueueDataset(IterableDataset, Generic[S]):  # type: ignore[type-arg]
    """Iterates over the samples of a queue, and drops those more than `max_staleness` weight versions old.

    Args:
        rollout_queue: the queue; a bounded one (see above). It holds samples with a `model_version`, and `END`.
        model_version_fn: the version of the weights in training.
        check_health_fn: called with `stale_after_s` after each `poll_interval_s` without a sample; raises when the
            producer is dead.
        stale_after_s: seconds without a sample after which the producer counts as stalled.
        max_staleness: most versions between a sample and the weights in training; older ones are dropped and counted.
        poll_interval_s: seconds between health checks.

    Raises:
        DataError: for numbers below 0; while iterating, for a producer that stalls, a sample of a version that does
            not exist yet, inside a DataLoader's worker. What `check_health_fn` raises comes through. The
            iteration can be restarted: no sample is lost.
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
        self.metrics = QueueMetrics()

    def staleness(self, sample: S) -> int:
        """Versions between the sample and the weights in training."""
        return self.model_version_fn() - sample.model_version

    def is_fresh(self, sample: S) -> bool:
        """Whether the sample is within `max_staleness` now; for a batcher in which samples wait."""
        return self.staleness(sample) <= self.max_staleness

    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call."""
        depth = 0
        with contextlib.suppress(NotImplementedError):  # multiprocessing on macOS has no qsize
            depth = self.queue.qsize()
        metrics, self.metrics = self.metrics.to_dict(depth), QueueMetrics()
        return metrics

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
                self.metrics.dropped += 1
                continue
            self.metrics.add(staleness)
            yield sample

    def _next(self) -> Any:
        started = time.monotonic()
        try:
            while True:
                with contextlib.suppress(queue.Empty):
                    return self.queue.get(timeout=self.poll_interval_s)
                self.check_health_fn(self.stale_after_s)
                if time.monotonic() - started > self.stale_after_s:
                    raise DataError(
                        f"No rollout has come for stale_after_s={self.stale_after_s:g} seconds, and its producer says "
                        "that it is well: look what it waits for, or raise the limit."
                    )
        finally:
            self.metrics.wait_seconds += time.monotonic() - started
