"""Which samples share an optimizer step: random with a seed, decided before and apart from balancing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from roll_batching.errors import DataError

_MEMBERSHIP_STREAM = 2


@dataclass(frozen=True, eq=False)
class MiniBatches(Sequence[np.ndarray]):
    """The mini-batches of one epoch: int64 indices, each sample in exactly one."""

    batches: tuple[np.ndarray, ...]
    size: int

    def __len__(self) -> int:
        return len(self.batches)

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[np.ndarray]: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | Sequence[np.ndarray]:
        return self.batches[index]

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.batches)

    @property
    def remainder(self) -> int:
        """Samples of the last mini-batch when it is smaller than the others; else 0."""
        last = self.batches[-1].size if self.batches else self.size
        return last if last != self.size else 0

    @property
    def notice(self) -> str | None:
        """What to tell the user about a smaller last mini-batch; None when there is none."""
        if not self.remainder:
            return None
        total = sum(batch.size for batch in self.batches)
        return (
            f"{total} samples do not divide into mini-batches of {self.size}: the last of {len(self)} holds "
            f"{self.remainder}, and its optimizer step averages over those only."
        )


def mini_batches(count: int, size: int, *, seed: int, epoch: int = 0) -> MiniBatches:
    """Draw the mini-batches of an epoch over `count` samples: a pure function of its arguments.

    Args:
        count: samples, at least 1.
        size: samples per mini-batch, over all ranks; at least 1. What remains is a smaller last mini-batch.
        seed: not negative; a run that draws for several rollout batches passes another seed for each.
        epoch: which pass over the same samples, from 0.

    Raises:
        DataError: for a count or size below 1, a negative seed or epoch.
    """
    if count < 1 or size < 1:
        raise DataError(f"Mini-batches need at least one sample and a size of at least 1: {count=}, {size=}.")
    if seed < 0 or epoch < 0:
        raise DataError(f"Seed and epoch are not negative: {seed=}, {epoch=}.")
    order = np.random.default_rng([_MEMBERSHIP_STREAM, seed, epoch]).permutation(count).astype(np.int64)
    return MiniBatches(tuple(order[start : start + size] for start in range(0, count, size)), size)


def rank_slice(count: int, rank: int, size: int) -> slice:
    """The contiguous part of `count` items that `rank` of `size` takes; parts differ by at most one item.

    Raises:
        DataError: for a rank outside the group.
    """
    if not 0 <= rank < size:
        raise DataError(f"Rank {rank} is not in a group of {size}.")
    return slice(count * rank // size, count * (rank + 1) // size)
