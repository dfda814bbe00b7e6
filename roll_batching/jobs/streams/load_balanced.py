"""cosmos-rl's datasets over our stream: a shard of a dataset, and its samples as micro-batches of optimizer steps.

Both are `IterableDataset`s for a DataLoader with `batch_size=None` and any number of workers. What they give does not
depend on that number: every worker forms all micro-batches, from lengths alone, and reads the samples of its own only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from roll_batching.errors import DataError
from roll_batching.jobs.streams.former import PoolFormer
from roll_batching.jobs.streams.length_index import Indexed, OnError, identity_of, length_of, measured, read_sample
from roll_batching.planning.arrays import Ints

logger = logging.getLogger(__name__)

BatchingStrategy = Literal["prefer_closest", "prefer_first"]
_SHARD_STREAM = 5


class ShardedIterableDataset(IterableDataset[Any]):
    """One data-parallel rank's share of a dataset, sample by sample, in an order of its own in every epoch.

    Args:
        base_dataset: asked for samples by number.
        dp_rank: this data-parallel rank.
        dp_world_size: data-parallel ranks.
        seed: of the order.

    Raises:
        DataError: for a rank that is none, or a negative seed; while iterating, for a sample that cannot be read.
    """

    def __init__(self, base_dataset: Indexed, dp_rank: int, dp_world_size: int, seed: int = 0) -> None:
        super().__init__()
        if seed < 0 or not 0 <= dp_rank < dp_world_size:
            raise DataError(
                f"dp_rank is in 0..dp_world_size-1, seed not negative: {dp_rank=}, {dp_world_size=}, {seed=}."
            )
        self.base_dataset, self.dp_rank, self.dp_world_size, self.seed = base_dataset, dp_rank, dp_world_size, seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The epoch whose order the next iteration has."""
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
    """Where the samples stand in the dataset."""
    skipped: list[int]
    """Samples that could not be read and were left out (`on_error="skip"`)."""
    state: dict[str, Any]
    """The position behind this step: `LoadBalancedDataset.load_state_dict` goes on there, whatever loader gave it."""
    last: bool
    """Whether this rank has no further step."""


class LoadBalancedDataset(IterableDataset[StepBatches]):
    """A rank's samples as micro-batches up to a token cap: each iteration yields those of one optimizer step.

    A sample is a sequence, or k sequences that stay together in one micro-batch, such as the two of a pair.

    Args:
        base_dataset: asked for samples by number; or a `ShardedIterableDataset`, which then says rank, ranks and seed.
        pool_size: samples to choose from (their numbers and lengths: no sample waits in memory).
        max_tokens_for_batch: most tokens of a micro-batch, a hard cap: rows times the longest, or, packed, their sum.
        length_key: the key of a sequence's tokens; one that is no mapping is measured itself.
        batching_strategy: how rectangles are formed; see `pool.choose`.
        seq_packing_enabled: form packs instead; the strategy is then not used.
        seed: of the order.
        dp_rank: this data-parallel rank.
        dp_world_size: data-parallel ranks.
        accumulate_steps: micro-batches of an optimizer step.
        infinite_loop: begin the next epoch where one ends; else end with the first. Ranks may then end at different
            steps (`StepBatches.last`): those that have ended compute fillers until the longest has.
        lengths: int64[n] of all samples, where they are known; by default they are measured, once, by reading all.
            int64[n, k] where each sample is a list of k sequences: these must be given.
        length_cache: file that keeps what was measured.
        on_error: a sample that cannot be read ends the iteration with an error that names it, after which the same step
            can be asked for again; or it is left out, said, and counted.
        sequence_multiple: lengths are rounded up to a multiple of this, as the plan's alignment asks.

    Raises:
        DataError: for numbers below 1, unknown words, samples above the cap, and, while iterating, a sample that cannot
            be read, or has another length than was measured.
    """

    def __init__(
        self,
        base_dataset: Indexed | ShardedIterableDataset,
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
            base_dataset, seed, dp_rank, dp_world_size = (
                shard.base_dataset,
                shard.seed,
                shard.dp_rank,
                shard.dp_world_size,
            )
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
            lengths = measured(base_dataset, self._length_of, cache=cache, on_error=on_error)
        if len(lengths) != len(base_dataset):
            raise DataError(f"{len(lengths)} lengths are given for {len(base_dataset)} samples.")
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self.skipped = int((self._lengths.reshape(len(self._lengths), -1) < 1).any(axis=1).sum())
        """Samples that were left out so far, in this process: those without length, then each that cannot be read."""
        self._former = PoolFormer(
            self._lengths,
            max_tokens=max_tokens_for_batch,
            strategy="packed" if seq_packing_enabled else batching_strategy,
            pool_size=pool_size,
            sequence_multiple=sequence_multiple,
            seed=seed,
            rank=dp_rank,
            size=dp_world_size,
            infinite=infinite_loop,
            dataset=identity_of(base_dataset),
        )
        self._epoch, self._to_skip = 0, 0
        self._position: dict[str, Any] | None = None
        """Behind the last step that was given; None: at the beginning of the epoch."""
        self._loaded = False
        """Whether the next iteration begins there."""
        self._steps = 0
        """Steps before it, since the loader began: workers take turns by it."""

    def _length_of(self, sample: Any) -> int:
        return length_of(sample, self.length_key)

    def _differs(self, sample: Any, index: int) -> str | None:
        """How long a sample is and how long it was measured, where that differs."""
        expected = self._lengths[index].tolist()
        together = isinstance(expected, list)
        found = [self._length_of(sequence) for sequence in sample] if together else self._length_of(sample)
        if found == expected:
            return None
        has, had = (" and ".join(map(str, np.atleast_1d(one))) for one in (found, expected))
        return f"{has} tokens, and {had} were measured"

    def __len__(self) -> int:
        """Optimizer steps of an epoch, about: from the tokens of this rank's share, as if micro-batches were full."""
        state = self._former.state_dict()
        tokens = int(self._lengths[state["rank"] :: state["size"]].sum())
        return max(1, -(-tokens // (self._former.max_tokens * self.accumulate_steps)))

    def set_epoch(self, epoch: int) -> None:
        """The next iteration begins with this epoch; a loaded position is forgotten."""
        self._epoch, self._position, self._loaded, self._steps = epoch, None, False, 0

    def skip_batches(self, steps: int) -> None:
        """The next iteration passes over so many optimizer steps; they are formed and not read.

        A state that was saved (`state_dict`, or `StepBatches.state`) goes there at once.
        """
        self._to_skip = steps

    def state_dict(self) -> dict[str, Any]:
        """The position in plain values, behind the last step that was given in this process."""
        if self._position is None:
            self._former.start_epoch(self._epoch)
            return {**self._former.state_dict(), "steps": 0}
        return dict(self._position)

    def load_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, repartition: bool = False
    ) -> None:
        """The next iteration goes on from a saved position, with any number of workers.

        What may differ, what is refused, and what `repartition` does: `PoolFormer.load_state_dict`.

        A state that a worker saved (torchdata's `StatefulDataLoader`) is loaded by the same one of as many workers.
        """
        self._former.load_state_dict(state, repartition=repartition)
        taken = int(state["steps"]) if isinstance(state, Mapping) and "steps" in state else 0
        self._steps = taken if get_worker_info() is not None else 0
        self._position, self._loaded = {**self._former.state_dict(), "steps": taken}, True

    def __iter__(self) -> Iterator[StepBatches]:
        return _Steps(self)


class _Steps(Iterator[StepBatches]):
    """One pass of one process; a step whose samples cannot be read can be asked for again."""

    def __init__(self, dataset: LoadBalancedDataset) -> None:
        self._dataset = dataset
        self._worker, self._workers = _worker()
        former = dataset._former
        if dataset._loaded and dataset._position is not None:
            former.load_state_dict(dataset._position)
        else:
            former.start_epoch(dataset._epoch)
            dataset._position = None
        for _ in range(dataset._to_skip):
            self._formed()
        dataset._to_skip = 0
        self._next = dataset._steps
        dataset._steps, dataset._loaded = 0, False

    def _formed(self) -> list[list[int]]:
        """Places of the next step's samples."""
        former = self._dataset._former
        step: list[list[int]] = []
        while len(step) < self._dataset.accumulate_steps:
            batch = former.next_batch()
            if not batch.size:
                break
            step.append(batch.tolist())
        return step

    def __next__(self) -> StepBatches:
        dataset = self._dataset
        while True:
            before = dataset._former.state_dict()
            formed = self._formed()
            if not formed:
                raise StopIteration
            if self._next % self._workers == self._worker:
                try:
                    step = self._read(formed)
                except BaseException:
                    dataset._former.load_state_dict(before)
                    raise
                self._next += 1
                step.state = {**dataset._former.state_dict(), "steps": self._next}
                step.last = dataset._former.ended
                dataset._position = step.state
                return step
            self._next += 1

    def _read(self, formed: list[list[int]]) -> StepBatches:
        dataset = self._dataset
        step = StepBatches()
        step.indices, step.skipped = [], []
        for batch in formed:
            kept = []
            for index in batch:
                try:
                    sample = read_sample(dataset.base_dataset, index)
                    self._require_length(sample, index)
                    kept.append((index, sample))
                except DataError as error:
                    if dataset.on_error == "raise":
                        raise
                    logger.warning("%s It is left out.", error)
                    step.skipped.append(index)
            if kept:
                step.indices.append([index for index, _ in kept])
                step.append([sample for _, sample in kept])
        dataset.skipped += len(step.skipped)
        return step

    def _require_length(self, sample: Any, index: int) -> None:
        if difference := self._dataset._differs(sample, index):
            raise DataError(
                f"Sample {index} has {difference}: give lengths of this dataset, or remove the length_cache of "
                "another; a dataset must give a sample the same length each time."
            )


def _worker() -> tuple[int, int]:
    """This loader process's number, and how many there are."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)
