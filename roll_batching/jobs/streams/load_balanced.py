"""Datasets of cosmos-rl's load-balanced batching: a shard of a dataset, and the micro-batches of optimizer steps.

Both are `IterableDataset`s for a DataLoader with `batch_size=None` and any number of workers. The stream does not
depend on the number of workers: every worker forms all micro-batches, from lengths alone, and reads the samples of its
own steps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from roll_batching.errors import DataError
from roll_batching.jobs.streams.length_index import (
    IndexedDataset,
    OnError,
    fingerprint_of,
    length_of,
    load_or_measure_lengths,
    read_sample,
)
from roll_batching.jobs.streams.pool_batcher import PoolBatcher
from roll_batching.planning.arrays import Ints

logger = logging.getLogger(__name__)

BatchingStrategy = Literal["prefer_closest", "prefer_first"]
_SHARD_STREAM = 5
"""Marks the random numbers of this purpose; see `jobs.seeds`."""


class ShardedIterableDataset(IterableDataset[Any]):
    """One data-parallel rank's share of a dataset, sample by sample, reshuffled in every epoch.

    Args:
        base_dataset: a map-style dataset.
        dp_rank: this data-parallel rank.
        dp_world_size: data-parallel ranks.
        seed: of the order.

    Raises:
        DataError: for a rank outside `dp_world_size` or a negative seed; while iterating, for an unreadable sample.
    """

    def __init__(self, base_dataset: IndexedDataset, dp_rank: int, dp_world_size: int, seed: int = 0) -> None:
        super().__init__()
        if seed < 0 or not 0 <= dp_rank < dp_world_size:
            raise DataError(
                f"dp_rank is in 0..dp_world_size-1, seed not negative: {dp_rank=}, {dp_world_size=}, {seed=}."
            )
        self.base_dataset, self.dp_rank, self.dp_world_size, self.seed = base_dataset, dp_rank, dp_world_size, seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, whose order the next iteration has."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(range(self.dp_rank, len(self.base_dataset), self.dp_world_size))

    def __iter__(self) -> Iterator[Any]:
        share = np.arange(self.dp_rank, len(self.base_dataset), self.dp_world_size)
        order = np.random.default_rng([_SHARD_STREAM, self.seed, self.dp_rank, self._epoch]).permutation(share)
        worker, workers = _worker()
        for index in order[worker::workers].tolist():
            yield read_sample(self.base_dataset, index)


class StepBatches(list[list[Any]]):
    """The micro-batches of one optimizer step of one rank, each a list of samples; none is empty."""

    indices: list[list[int]]
    """Indices of the samples in the dataset."""
    skipped: list[int]
    """Indices of samples that could not be read and were left out (`on_error="skip"`)."""
    state: dict[str, Any]
    """Position after this step, for `LoadBalancedDataset.load_state_dict` with any number of workers."""
    last: bool
    """Whether this is the rank's last step."""


class LoadBalancedDataset(IterableDataset[StepBatches]):
    """Forms micro-batches up to a token cap of a rank's samples; each iteration yields those of one optimizer step.

    A sample is a sequence, or k sequences that share a micro-batch, such as the two of a pair.

    Args:
        base_dataset: a map-style dataset; or a `ShardedIterableDataset`, whose rank, ranks and seed then count.
        pool_size: samples to choose from (indices and lengths only: no sample waits in memory).
        max_tokens_for_batch: most tokens of a micro-batch, a hard cap: rows times the longest, or, packed, their sum.
        length_key: the key of a sequence's tokens; `len` of the sequence where it is not a mapping.
        batching_strategy: how rectangles are formed; see `pool.choose`.
        seq_packing_enabled: form packs instead; `batching_strategy` has no effect then.
        seed: of the order.
        dp_rank: this data-parallel rank.
        dp_world_size: data-parallel ranks.
        accumulate_steps: micro-batches of an optimizer step.
        infinite_loop: repeat epochs without end; else stop after the first. Ranks may then end at different steps
            (`StepBatches.last`): those that have ended compute fillers until the last one has.
        lengths: int64[n] of all samples, if known; by default they are measured once, by reading all samples.
            int64[n, k] where each sample is a list of k sequences, which are never measured.
        length_cache: file for measured lengths.
        on_error: a sample that cannot be read raises an error that names it, and the next call tries the same step
            again ("raise"); or it is left out, logged and counted ("skip").
        sequence_multiple: lengths are rounded up to a multiple of this, as the plan's alignment asks.

    Raises:
        DataError: for numbers below 1, unknown names, samples above the cap, and, while iterating, a sample that
            cannot be read or does not have its measured length.
    """

    def __init__(
        self,
        base_dataset: IndexedDataset | ShardedIterableDataset,
        pool_size: int = 32,
        max_tokens_for_batch: int = 32768,
        length_key: str = "input_ids",
        batching_strategy: BatchingStrategy = "prefer_closest",
        *,
        seq_packing_enabled: bool = False,
        seed: int = 0,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        accumulate_steps: int = 1,
        infinite_loop: bool = True,
        lengths: Ints | None = None,
        length_cache: str | Path | None = None,
        on_error: OnError = "raise",
        sequence_multiple: int = 1,
    ) -> None:
        super().__init__()
        if isinstance(base_dataset, ShardedIterableDataset):
            shard = base_dataset
            base_dataset, seed = shard.base_dataset, shard.seed
            dp_rank, dp_world_size = shard.dp_rank, shard.dp_world_size
        if accumulate_steps < 1:
            raise DataError(f"accumulate_steps is at least 1; got {accumulate_steps}.")
        if batching_strategy not in get_args(BatchingStrategy):
            raise DataError(f"batching_strategy is prefer_closest or prefer_first; got {batching_strategy!r}.")
        if on_error not in get_args(OnError):
            raise DataError(f"on_error is raise or skip; got {on_error!r}.")
        self.base_dataset, self.length_key, self.on_error = base_dataset, length_key, on_error
        self.accumulate_steps = accumulate_steps
        if lengths is None:
            cache = None if length_cache is None else Path(length_cache)
            lengths = load_or_measure_lengths(base_dataset, self._length_of, cache=cache, on_error=on_error)
        if len(lengths) != len(base_dataset):
            raise DataError(f"{len(lengths)} lengths are given for {len(base_dataset)} samples.")
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self.skipped = int((self._lengths.reshape(len(self._lengths), -1) < 1).any(axis=1).sum())
        """Samples left out so far in this process: those without length, and those that could not be read."""
        self._pool_batcher = PoolBatcher(
            self._lengths,
            max_tokens=max_tokens_for_batch,
            strategy="packed" if seq_packing_enabled else batching_strategy,
            pool_size=pool_size,
            sequence_multiple=sequence_multiple,
            seed=seed,
            rank=dp_rank,
            size=dp_world_size,
            infinite=infinite_loop,
            dataset=fingerprint_of(base_dataset),
        )
        self._epoch, self._to_skip = 0, 0
        self._position: dict[str, Any] | None = None
        """Position after the last step returned; None: at the beginning of the epoch."""
        self._loaded = False
        """Whether the next iteration starts at `_position`."""
        self._steps = 0
        """Steps before `_position`, since the loader started: step k belongs to worker k % workers."""

    def _length_of(self, sample: Any) -> int:
        return length_of(sample, self.length_key)

    def _require_length(self, sample: Any, index: int) -> None:
        """Raises DataError for a sample of another length than its measured one."""
        measured = self._lengths[index].tolist()
        has_sequences = isinstance(measured, list)
        length = [self._length_of(sequence) for sequence in sample] if has_sequences else self._length_of(sample)
        if length != measured:
            now, before = (" and ".join(map(str, np.atleast_1d(tokens))) for tokens in (length, measured))
            raise DataError(
                f"Sample {index} has {now} tokens, and {before} were measured: pass lengths of this dataset, or remove "
                "the length_cache of another; a sample must have the same length each time it is read."
            )

    def __len__(self) -> int:
        """Approximate optimizer steps of an epoch: tokens of this rank's share over those of full micro-batches."""
        state = self._pool_batcher.state_dict()
        tokens = int(self._lengths[state["rank"] :: state["size"]].sum())
        return max(1, -(-tokens // (self._pool_batcher.max_tokens * self.accumulate_steps)))

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration with this epoch, and discard a loaded position."""
        self._epoch, self._position, self._loaded, self._steps = epoch, None, False, 0

    def skip_batches(self, steps: int) -> None:
        """Skip so many optimizer steps in the next iteration: they are formed, but not read.

        Loading a saved state (`state_dict`, or `StepBatches.state`) takes constant time instead.
        """
        self._to_skip = steps

    def state_dict(self) -> dict[str, Any]:
        """The position as plain data, after the last step returned in this process."""
        if self._position is None:
            self._pool_batcher.start_epoch(self._epoch)
            return {**self._pool_batcher.state_dict(), "steps": 0}
        return dict(self._position)

    def load_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, repartition: bool = False
    ) -> None:
        """Start the next iteration at a saved position, with any number of workers.

        `state`, `repartition` and errors are those of `PoolBatcher.load_state_dict`. A state that a worker saved
        (torchdata's `StatefulDataLoader`) must be loaded by the same worker of equally many.
        """
        self._pool_batcher.load_state_dict(state, repartition=repartition)
        steps = int(state["steps"]) if isinstance(state, Mapping) and "steps" in state else 0
        self._steps = steps if get_worker_info() is not None else 0
        self._position, self._loaded = {**self._pool_batcher.state_dict(), "steps": steps}, True

    def __iter__(self) -> Iterator[StepBatches]:
        return _Steps(self)


class _Steps(Iterator[StepBatches]):
    """Iterator of one process; after an error the next call tries the same step again."""

    def __init__(self, dataset: LoadBalancedDataset) -> None:
        self._dataset = dataset
        self._worker, self._workers = _worker()
        batcher = dataset._pool_batcher
        if dataset._loaded and dataset._position is not None:
            batcher.load_state_dict(dataset._position)
        else:
            batcher.start_epoch(dataset._epoch)
            dataset._position = None
        for _ in range(dataset._to_skip):
            self._form_step()
        dataset._to_skip = 0
        self._next = dataset._steps
        dataset._steps, dataset._loaded = 0, False

    def _form_step(self) -> list[list[int]]:
        """Forms the next step; returns the indices of its samples, by micro-batch."""
        batcher = self._dataset._pool_batcher
        step: list[list[int]] = []
        while len(step) < self._dataset.accumulate_steps:
            batch = batcher.next_batch()
            if not batch.size:
                break
            step.append(batch.tolist())
        return step

    def __next__(self) -> StepBatches:
        dataset = self._dataset
        while True:
            before = dataset._pool_batcher.state_dict()
            indices = self._form_step()
            if not indices:
                raise StopIteration
            if self._next % self._workers == self._worker:
                try:
                    step = self._read(indices)
                except BaseException:
                    dataset._pool_batcher.load_state_dict(before)
                    raise
                self._next += 1
                step.state = {**dataset._pool_batcher.state_dict(), "steps": self._next}
                step.last = dataset._pool_batcher.ended
                dataset._position = step.state
                return step
            self._next += 1

    def _read(self, indices: list[list[int]]) -> StepBatches:
        dataset = self._dataset
        step = StepBatches()
        step.indices, step.skipped = [], []
        for batch in indices:
            samples = []
            for index in batch:
                try:
                    sample = read_sample(dataset.base_dataset, index)
                    dataset._require_length(sample, index)
                    samples.append((index, sample))
                except DataError as error:
                    if dataset.on_error == "raise":
                        raise
                    logger.warning("%s It is left out.", error)
                    step.skipped.append(index)
            if samples:
                step.indices.append([index for index, _ in samples])
                step.append([sample for _, sample in samples])
        dataset.skipped += len(step.skipped)
        return step


def _worker() -> tuple[int, int]:
    """Number of this DataLoader worker, and the number of workers."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)
