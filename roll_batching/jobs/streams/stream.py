"""A length-aware stream: each rank forms batches from a small pool of its own samples, up to a token cap.

The strategies and the pool are those of cosmos-rl's load-balanced batching. What differs: a saved position
is restored at once (epoch, cursor and pool; nothing is replayed or read twice), an error in a sample reaches
the caller and loses nothing, and a sample above the cap is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from roll_batching.errors import DataError
from roll_batching.jobs.streams.pool import PoolStrategy, choose, require_strategy

S = TypeVar("S")
_POOL_STREAM = 3


@dataclass(frozen=True)
class FormedBatch(Generic[S]):
    """One micro-batch of one rank."""

    indices: tuple[int, ...]
    """Where its samples stand in the dataset."""
    samples: tuple[S, ...]
    lengths: tuple[int, ...]
    """Tokens of each sample, before alignment."""
    tokens: int
    """Tokens that it computes: the sum of the aligned lengths, or rows times the longest of them."""


@dataclass(frozen=True)
class _Pooled(Generic[S]):
    index: int
    sample: S
    length: int
    slot: int


class LengthAwareStream(Iterator[list[FormedBatch[S]]], Generic[S]):
    """Yields the micro-batches of one optimizer step of one rank: `batches_per_step` of them.

    Before each micro-batch the pool is filled from this rank's share of the samples (every `size`-th, shuffled
    anew in each epoch). The oldest sample in the pool begins it, then samples join while it stays under the
    cap: `prefer_closest` takes the one that keeps rows x longest smallest, of equals the one nearest in length
    to the longest, of equals the oldest; `prefer_first` too, but of equals at once the oldest; `packed` takes every
    one that fits, the oldest first, and counts the sum of the lengths. Whatever is left stays in the pool; nothing
    is dropped.

    Args:
        samples: the dataset; read once per sample and epoch, when it enters the pool.
        length_of: tokens of a sample.
        max_tokens: cap on the tokens that a micro-batch computes.
        strategy: see above.
        pool_size: samples to choose from.
        batches_per_step: micro-batches of an optimizer step.
        sequence_multiple: lengths are rounded up to a multiple of this.
        seed: of the order.
        rank: this data-parallel rank.
        size: data-parallel ranks.
        infinite: go on with the next epoch for ever (the pool may then mix two epochs). Otherwise the stream
            ends with the first epoch, the last step being what is left; ranks may then end at different steps.

    Raises:
        DataError: for numbers below 1, an unknown strategy, a rank without samples. While streaming: for a
            sample above the cap, naming it. An error that `samples` or `length_of` raises comes through; the
            stream stays where it was, so that the call can be made again.
    """

    def __init__(
        self,
        samples: Sequence[S],
        length_of: Callable[[S], int],
        *,
        max_tokens: int,
        strategy: PoolStrategy = "prefer_closest",
        pool_size: int = 32,
        batches_per_step: int = 1,
        sequence_multiple: int = 1,
        seed: int = 0,
        rank: int = 0,
        size: int = 1,
        infinite: bool = True,
    ) -> None:
        numbers = {
            "max_tokens": max_tokens,
            "pool_size": pool_size,
            "batches_per_step": batches_per_step,
            "sequence_multiple": sequence_multiple,
        }
        for name, number in numbers.items():
            if number < 1:
                raise DataError(f"{name} is at least 1; got {number}.")
        require_strategy(strategy)
        if seed < 0 or not 0 <= rank < size:
            raise DataError(f"seed is not negative and rank is in 0..size-1: {seed=}, {rank=}, {size=}.")
        if rank >= len(samples):
            raise DataError(f"Rank {rank} of {size} has no samples: the dataset holds {len(samples)}.")
        self.samples = samples
        self.length_of = length_of
        self.max_tokens = max_tokens
        self.strategy = strategy
        self.pool_size = pool_size
        self.batches_per_step = batches_per_step
        self.sequence_multiple = sequence_multiple
        self.infinite = infinite
        self._identity = {"seed": seed, "rank": rank, "size": size, "samples": len(samples)}
        self._epoch, self._cursor = 0, 0
        self._pool: list[_Pooled[S]] = []
        self._order = self._order_of(0)

    @property
    def epoch(self) -> int:
        """The epoch that the next sample to enter the pool belongs to, from 0."""
        return self._epoch

    def _order_of(self, epoch: int) -> np.ndarray:
        seed, rank, size, count = self._identity.values()
        share = np.arange(rank, count, size)
        return share[np.random.default_rng([_POOL_STREAM, seed, rank, epoch]).permutation(share.size)]

    def __next__(self) -> list[FormedBatch[S]]:
        before = self._epoch, self._cursor, self._order, list(self._pool)
        try:
            step: list[FormedBatch[S]] = []
            while len(step) < self.batches_per_step:
                self._fill()
                if not self._pool:
                    break
                step.append(self._form())
        except BaseException:
            self._epoch, self._cursor, self._order, self._pool = before
            raise
        if not step:
            raise StopIteration
        return step

    def _fill(self) -> None:
        while len(self._pool) < self.pool_size:
            if self._cursor == self._order.size:
                if not self.infinite:
                    return
                self._epoch, self._cursor = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
            self._pool.append(self._admit(int(self._order[self._cursor])))
            self._cursor += 1

    def _admit(self, index: int) -> _Pooled[S]:
        sample = self.samples[index]
        length = self.length_of(sample)
        slot = -(-length // self.sequence_multiple) * self.sequence_multiple
        if length < 1:
            raise DataError(f"Sample {index} has no tokens (length {length}).")
        if slot > self.max_tokens:
            aligned = f" ({slot} aligned to {self.sequence_multiple})" if slot != length else ""
            raise DataError(
                f"Sample {index} has {length} tokens{aligned}, more than max_tokens={self.max_tokens}: raise the "
                "cap, shorten the sample, or leave it out."
            )
        return _Pooled(index, sample, length, slot)

    def _form(self) -> FormedBatch[S]:
        slots = [p.slot for p in self._pool]
        chosen = choose(np.array(slots, dtype=np.int64), self.max_tokens, self.strategy).tolist()
        members = [self._pool[place] for place in chosen]
        taken = set(chosen)
        self._pool = [pooled for place, pooled in enumerate(self._pool) if place not in taken]
        slots = [p.slot for p in members]
        return FormedBatch(
            tuple(p.index for p in members),
            tuple(p.sample for p in members),
            tuple(p.length for p in members),
            sum(slots) if self.strategy == "packed" else len(slots) * max(slots),
        )

    def state_dict(self) -> dict[str, Any]:
        """The position in plain values, at most `pool_size` indices among them."""
        return {
            **self._identity,
            "epoch": self._epoch,
            "cursor": self._cursor,
            "pool": [pooled.index for pooled in self._pool],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position: only the samples that were in the pool are read again.

        Cap, strategy and pool size may differ from those it was saved with.

        Raises:
            DataError: when the state is of another dataset, seed, rank or number of ranks, or incomplete.
        """
        if missing := sorted(self.state_dict().keys() - state.keys()):
            raise DataError(f"The saved stream position lacks {', '.join(missing)}.")
        for name, own in self._identity.items():
            if state[name] != own:
                raise DataError(f"The saved stream position has {name}={state[name]}, this stream {name}={own}.")
        epoch, cursor, pool = int(state["epoch"]), int(state["cursor"]), [int(i) for i in state["pool"]]
        order = self._order_of(epoch)
        if not 0 <= cursor <= order.size or not set(pool) <= set(order.tolist()):
            raise DataError(f"The saved stream position is impossible: epoch {epoch}, cursor {cursor}, {pool=}.")
        members = [self._admit(index) for index in pool]
        self._epoch, self._cursor, self._order, self._pool = epoch, cursor, order, members
