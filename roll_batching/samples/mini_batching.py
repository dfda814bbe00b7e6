"""Division of an epoch into mini-batches, one per optimizer step: random with a seed, independent of balancing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import ArrayLike

from roll_batching.errors import DataError

_MEMBERSHIP_STREAM = 2
"""First word of the seed: other draws with the same seed and epoch are independent of these."""


@dataclass(frozen=True, eq=False)
class MiniBatches(Sequence[np.ndarray]):
    """The mini-batches of one epoch: int64 indices, with each sample in exactly one."""

    batches: tuple[np.ndarray, ...]
    size: int
    """Samples of a full mini-batch; with `rollouts`, rollouts of it."""
    rollouts: tuple[int, ...] | None = None
    """Rollouts of each mini-batch, where it is drawn over rollouts."""

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
        """Samples (or rollouts) of the last mini-batch when it holds fewer than `size`; else 0."""
        last = self._sizes[-1]
        return last if last != self.size else 0

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self.rollouts or tuple(batch.size for batch in self.batches)

    @property
    def notice(self) -> str | None:
        """Warning about mini-batches smaller than `size`; None without any."""
        small = [size for size in self._sizes if size != self.size]
        if not small:
            return None
        if len(small) == 1 and self.remainder:
            unit = "samples" if self.rollouts is None else "rollouts"
            return (
                f"{sum(self._sizes)} {unit} do not divide into mini-batches of {self.size}: the last of {len(self)} "
                f"holds {self.remainder}, and its optimizer step averages over those only."
            )
        return (
            f"Groups that stay together do not fill mini-batches of {self.size} samples: {len(small)} of "
            f"{len(self)} are smaller, down to {min(small)}."
        )


def mini_batches(
    count: int,
    size: int,
    *,
    seed: int,
    epoch: int = 0,
    group_ids: ArrayLike | None = None,
    rollout_ids: ArrayLike | None = None,
) -> MiniBatches:
    """Random mini-batches of one epoch over `count` samples, a pure function of its arguments.

    Args:
        count: samples, at least 1.
        size: samples per mini-batch, over all ranks; at least 1. The last mini-batch may be smaller.
        seed: not negative; pass a different one for each rollout batch.
        epoch: number of the pass over the same samples, from 0.
        group_ids: int `[count]`; samples with one id share a mini-batch, side by side in their given order
            (DPO's pairs, say). A group that would overfill a mini-batch begins the next.
        rollout_ids: int `[count]`; a mini-batch is `size` rollouts, with all samples of each side by side. Where every
            rollout has one sample, given in ascending order, the members are those without it.

    Raises:
        DataError: for a count or size below 1, a negative seed or epoch, ids of another length, group ids beside
            rollout ids, a group larger than a mini-batch.
    """
    if count < 1 or size < 1:
        raise DataError(f"Mini-batches need at least one sample and a size of at least 1: {count=}, {size=}.")
    if seed < 0 or epoch < 0:
        raise DataError(f"Seed and epoch are not negative: {seed=}, {epoch=}.")
    if rollout_ids is not None:
        if group_ids is not None:
            raise DataError("group_ids and rollout_ids both say what stays together: give one of them.")
        by_rollout = _samples_of_rollouts(rollout_ids, count)
        return _expand_rollouts(mini_batches(len(by_rollout), size, seed=seed, epoch=epoch), by_rollout)
    random = np.random.default_rng([_MEMBERSHIP_STREAM, seed, epoch])
    if group_ids is None:
        order = random.permutation(count).astype(np.int64)
        return MiniBatches(tuple(order[start : start + size] for start in range(0, count, size)), size)
    order, cuts = _grouped(group_ids, count, size, random)
    return MiniBatches(tuple(np.split(order, cuts)), size)


def mini_batches_by_rank(
    home_rank: ArrayLike, ranks: int, size: int, *, seed: int, epoch: int = 0, rollout_ids: ArrayLike | None = None
) -> MiniBatches:
    """Mini-batches with an equal share of each rank's own samples, as in ROLL.

    Args:
        home_rank: int `[count]`: the rank that each sample stays on, from 0.
        ranks: number of data-parallel ranks.
        size: samples per mini-batch, over all ranks; a multiple of `ranks`. A rank with fewer samples has a smaller
            share of the last mini-batch.
        seed, epoch: as for `mini_batches`.
        rollout_ids: as for `mini_batches`; all samples of a rollout stay on one rank, and sizes count rollouts.

    Raises:
        DataError: as `mini_batches`, and for a size that the ranks cannot share, or a rollout on several ranks.
    """
    home = np.asarray(home_rank, dtype=np.int64)
    if rollout_ids is not None:
        by_rollout = _samples_of_rollouts(rollout_ids, home.size)
        spread = [rollout for rollout, samples in enumerate(by_rollout) if len(set(home[samples].tolist())) > 1]
        if spread:
            raise DataError(f"Samples {by_rollout[spread[0]].tolist()} are one rollout, and stay on several ranks.")
        homes = home[[samples[0] for samples in by_rollout]]
        return _expand_rollouts(mini_batches_by_rank(homes, ranks, size, seed=seed, epoch=epoch), by_rollout)
    order = np.concatenate(list(mini_batches(home.size, size, seed=seed, epoch=epoch)))
    if size % ranks:
        raise DataError(f"Mini-batches of {size} samples must be a multiple of the {ranks} ranks, which share them.")
    batch_of = np.empty(home.size, dtype=np.int64)
    for rank in range(ranks):
        local = order[home[order] == rank]
        batch_of[local] = np.arange(local.size) // (size // ranks)
    return MiniBatches(tuple(order[batch_of[order] == index] for index in range(int(batch_of.max()) + 1)), size)


def _samples_of_rollouts(rollout_ids: ArrayLike, count: int) -> list[np.ndarray]:
    """Indices of the samples of each rollout, ascending by its id."""
    rollout_of = np.unique(_one_each("rollout_ids", rollout_ids, count), return_inverse=True)[1]
    return np.split(np.argsort(rollout_of, kind="stable"), np.cumsum(np.bincount(rollout_of))[:-1])


def _expand_rollouts(drawn: MiniBatches, by_rollout: Sequence[np.ndarray]) -> MiniBatches:
    """Mini-batches of the samples of the `drawn` rollouts."""
    batches = tuple(np.concatenate([by_rollout[rollout] for rollout in batch]) for batch in drawn)
    return MiniBatches(batches, drawn.size, tuple(map(len, drawn)))


def _grouped(group_ids: ArrayLike, count: int, size: int, random: np.random.Generator) -> tuple[np.ndarray, list[int]]:
    """(samples in random order with groups kept together, boundaries of the mini-batches)."""
    names, group_of = np.unique(_one_each("group_ids", group_ids, count), return_inverse=True)
    members = np.bincount(group_of)
    if (members > size).any():
        largest = int(members.argmax())
        raise DataError(
            f"Group {names[largest]} has {members[largest]} samples, more than a mini-batch of {size}: raise its size."
        )
    draw = random.permutation(names.size)
    position = np.empty_like(draw)
    position[draw] = np.arange(names.size)
    order = np.argsort(position[group_of], kind="stable").astype(np.int64)
    cuts, used, end = [], 0, 0
    for group_size in members[draw].tolist():
        if used + group_size > size:
            cuts.append(end)
            used = 0
        used, end = used + group_size, end + group_size
    return order, cuts


def _one_each(name: str, ids: ArrayLike, count: int) -> np.ndarray:
    array = np.asarray(ids)
    if array.shape != (count,):
        raise DataError(f"{name} needs one id for each of the {count} samples; its shape is {array.shape}.")
    return array


def rank_slice(count: int, rank: int, size: int) -> slice:
    """The contiguous part of `count` items that `rank` of `size` takes; parts differ by at most one item.

    Raises `DataError` for a rank outside the group.
    """
    if not 0 <= rank < size:
        raise DataError(f"Rank {rank} is not in a group of {size}: ranks count from 0.")
    return slice(count * rank // size, count * (rank + 1) // size)
