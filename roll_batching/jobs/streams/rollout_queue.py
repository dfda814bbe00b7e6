"""FIFO queue of scored rollouts with a staleness limit and a timeout, and tensors or plans of batched rollouts.

The queue is any object with `get(timeout=...)` that raises `queue.Empty`: of `queue` for threads, of
`multiprocessing` for processes. Give it a `maxsize`, so that a producer that is faster than training waits instead of
filling memory with samples that are too old when their turn comes.

Batchers divide micro-batches into one row per data-parallel rank. `DataCollatorForRollout` makes TRL's padded rectangle
of them, for loops that scatter row i to rank i. `rollout_step` makes the samples and the plan of an optimizer step.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset, get_worker_info

from roll_batching.errors import DataError
from roll_batching.planning import Plan, PlanConstraints
from roll_batching.samples.batch import SampleBatch

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
        """Removes and returns the oldest item. Raises `queue.Empty` after `timeout` seconds without an item."""
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
    """One value per token: 1 for a token of the loss, else 0."""
    old_log_probs: list[float]
    """One log-prob per token, under the weights that sampled it; values of the prompt are not read."""
    advantage: float
    group_id: int
    """Number of the prompt, the same for all responses to it."""
    model_version: int
    """Version of the weights that sampled the response."""
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
        """Counts `samples` taken samples that are `staleness` weight versions old."""
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


# ---- rollout packer


Rows = Sequence[Sequence[Any]]
"""A micro-batch: for each data-parallel rank its samples, `RolloutSample`s or mappings with the same fields."""

_PER_TOKEN = ("input_ids", "completion_mask", "old_log_probs")


@dataclass(frozen=True)
class DataCollatorForRollout:
    """Packs the rows of micro-batches: samples end to end, positions from 0 in each, advantages per token.

    `__call__` takes a list of one micro-batch, from a DataLoader with `batch_size=1`; `step` takes all micro-batches of
    an optimizer step and gives them the step's denominator. Rows are padded to the longest of their micro-batch, so
    that a dispatcher can send row i to rank i. A row without samples (at the end of the data) is all padding.

    Tensors by name: `[num_processes, T]` input_ids, attention_mask, completion_mask, position_ids (int64),
    old_log_probs, advantages (fp32); `[num_processes]` fp32 global_n_tokens, the tokens to divide the loss by, equal on
    all ranks; metrics, by name `[num_processes, most samples of a row]` fp32, NaN where a row has fewer.

    Raises `DataError` for another number of rows or micro-batches, no token to learn from, or a field that is missing
    or not as long as its sample; names the sample's group.
    """

    pad_token_id: int
    num_processes: int = 1

    def __call__(self, examples: Sequence[Rows]) -> dict[str, Any]:
        """Packs the single micro-batch in `examples` into tensors; its number of tokens is the denominator."""
        if len(examples) != 1:
            raise DataError(
                f"{len(examples)} micro-batches in one call: use batch_size=1, or collate_fn=collator.step with "
                "batch_size=gradient_accumulation_steps"
            )
        return self.step(examples)[0]

    def step(self, micro_batches: Sequence[Rows]) -> list[dict[str, Any]]:
        """Packs every micro-batch of an optimizer step into tensors, with the tokens of all as denominator.

        The loss of a step, summed over micro-batches and ranks, is then a mean over its tokens under any division.
        """
        tokens = sum(sum(_field(sample, "completion_mask")) for rows in micro_batches for row in rows for sample in row)
        if not tokens:
            raise DataError(
                "These micro-batches have no token to learn from: completion_mask is 0 in all their samples. Do not "
                "queue samples without a response."
            )
        return [self._pack(rows, tokens) for rows in micro_batches]

    def _pack(self, rows: Rows, tokens: int) -> dict[str, Any]:
        _check_rows(rows, self.num_processes)
        for sample in (sample for row in rows for sample in row):
            _check(sample)

        def padded(values_of: Callable[[Any], Sequence[Any]], dtype: torch.dtype, fill: float = 0) -> Tensor:
            flat = [torch.tensor([value for sample in row for value in values_of(sample)], dtype=dtype) for row in rows]
            return pad_sequence(flat, batch_first=True, padding_value=fill)

        def length(sample: Any) -> int:
            return len(_field(sample, "input_ids"))

        names = sorted({name for row in rows for sample in row for name in _field(sample, "metrics", {})})
        return {
            "input_ids": padded(lambda sample: _field(sample, "input_ids"), torch.int64, self.pad_token_id),
            "attention_mask": padded(lambda sample: [1] * length(sample), torch.int64),
            "completion_mask": padded(lambda sample: _field(sample, "completion_mask"), torch.int64),
            "old_log_probs": padded(lambda sample: _field(sample, "old_log_probs"), torch.float32),
            "position_ids": padded(lambda sample: range(length(sample)), torch.int64),
            "advantages": padded(lambda sample: [_field(sample, "advantage")] * length(sample), torch.float32),
            "global_n_tokens": torch.full((self.num_processes,), float(tokens)),
            "metrics": {
                name: padded(
                    lambda sample, name=name: [_field(sample, "metrics", {}).get(name, float("nan"))],  # type: ignore[misc]
                    torch.float32,
                    float("nan"),
                )
                for name in names
            },
        }


def rollout_step(
    micro_batches: Sequence[Rows], constraints: PlanConstraints, *, cost: Any = None
) -> tuple[SampleBatch, Plan]:
    """Makes the samples of an optimizer step, and the plan in which rank i computes row i of every micro-batch.

    Ids count the samples from 0. A rank passes `plan.shard(batch, rank)` to `train_step`, whose loss is divided by the
    counts of the whole step. Fields: input_ids, response_mask and old_log_probs (one value per token),
    advantages (per sample). Every rank has the same number of micro-batches; an empty row becomes a filler.

    Raises:
        DataError: for samples whose fields do not fit.
        PlanError: for a row above the cap of `constraints`, or a number of micro-batches that they do not allow.
    """
    for rows in micro_batches:
        _check_rows(rows, constraints.dp_size)
    samples = [sample for rows in micro_batches for row in rows for sample in row]
    for sample in samples:
        _check(sample)
    columns = {name: [_field(sample, name) for sample in samples] for name in _PER_TOKEN}
    batch = SampleBatch.from_lists(
        {
            "input_ids": columns["input_ids"],
            "response_mask": columns["completion_mask"],
            "old_log_probs": [[float(value) for value in values] for values in columns["old_log_probs"]],
            "advantages": [float(_field(sample, "advantage")) for sample in samples],
        },
        {"input_ids": "token", "response_mask": "token", "old_log_probs": "token", "advantages": "sample"},
    )
    ids = iter(range(len(samples)))  # in the order of `samples`: by micro-batch, then by row
    rows_of_ids = [[[next(ids) for _ in row] for row in rows] for rows in micro_batches]
    bins = [[rows[rank] for rows in rows_of_ids] for rank in range(constraints.dp_size)]
    return batch, Plan.from_bins(bins, batch.lengths.numpy(), constraints, cost=cost)


def _field(sample: Any, name: str, default: Any = None) -> Any:
    value = sample.get(name, default) if isinstance(sample, Mapping) else getattr(sample, name, default)
    if value is None:
        raise DataError(f"A sample of group {_group(sample)} has no {name}: add it to the sample")
    return value


def _group(sample: Any) -> Any:
    return sample.get("group_id") if isinstance(sample, Mapping) else getattr(sample, "group_id", None)


def _check_rows(rows: Rows, ranks: int) -> None:
    if len(rows) != ranks:
        raise DataError(f"A micro-batch has {len(rows)} rows for {ranks} data-parallel ranks: one row per rank")


def _check(sample: Any) -> None:
    length = len(_field(sample, "input_ids"))
    for name in _PER_TOKEN:
        if len(_field(sample, name)) != length:
            raise DataError(
                f"A sample of group {_group(sample)} has {length} input_ids and {len(_field(sample, name))} {name}: "
                "one per token"
            )
