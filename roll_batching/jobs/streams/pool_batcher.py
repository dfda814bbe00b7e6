"""Forms micro-batches of one data-parallel rank from a pool of samples, by lengths, seed and position alone.

The choice of a micro-batch from the pool follows cosmos-rl's strategies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from roll_batching.errors import DataError
from roll_batching.planning.arrays import Ints
from roll_batching.planning.compiled import compiled, compiled_once

PoolStrategy = Literal["prefer_closest", "prefer_first", "packed"]
_MODES: dict[str, int] = {name: number for number, name in enumerate(get_args(PoolStrategy))}


def require_strategy(strategy: str) -> None:
    """Raises DataError unless `strategy` is one of `PoolStrategy`."""
    if strategy not in _MODES:
        raise DataError(f"strategy is one of {', '.join(_MODES)}; got {strategy!r}.")


def choose(slots: Ints, cap: int, strategy: PoolStrategy) -> Ints:
    """Chooses the next micro-batch; returns its samples' indices in the pool, in the order in which they join.

    The oldest sample (index 0) begins. `prefer_closest` adds the sample that keeps rows x longest smallest; among
    equals the sample nearest in length to the longest, then the oldest. `prefer_first` takes the oldest among equals.
    `packed` adds every sample that still fits, the oldest first, and counts the sum.

    Args:
        slots: int64[n] of tokens that each waiting sample takes, the oldest first; none above `cap`; n >= 1.
        cap: most tokens of the micro-batch.
        strategy: see above.
    """
    places = np.empty(len(slots), dtype=np.int64)
    with compiled_once("pool"):
        return places[: _choose(slots, cap, _MODES[strategy], places)]


def take(waiting: Ints, slots: Ints, count: int, cap: int, strategy: PoolStrategy, taken: Ints) -> int:
    """Moves samples chosen among the first `count` of `waiting` to `taken`; returns their number.

    `waiting` (indices in the dataset) and `slots` (their tokens) are compacted in place; all are int64 arrays of at
    least `count`.
    """
    return int(_take(waiting, slots, count, cap, _MODES[strategy], taken))


@compiled
def _take(waiting: Ints, slots: Ints, count: int, cap: int, mode: int, taken: Ints) -> int:
    num_taken = _choose(slots[:count], cap, mode, taken)
    gone = np.zeros(count, dtype=np.uint8)
    for k in range(num_taken):
        index = taken[k]  # in the pool; becomes the index in the dataset
        gone[index] = 1
        taken[k] = waiting[index]
    left = 0
    for index in range(count):
        if not gone[index]:
            waiting[left], slots[left] = waiting[index], slots[index]
            left += 1
    return num_taken


@compiled
def _choose(slots: Ints, cap: int, mode: int, places: Ints) -> int:
    """Writes the chosen indices to `places`; returns their number. `mode`: index in `PoolStrategy`."""
    count = len(slots)
    number = 0
    if mode == 2:  # packed
        # One pass is enough: the batch only grows, so a sample that did not fit cannot fit later.
        total = 0
        for place in range(count):
            if total + slots[place] <= cap:
                places[number] = place
                number += 1
                total += slots[place]
        return number
    gone = np.zeros(count, dtype=np.uint8)
    places[0], gone[0], number, longest = 0, 1, 1, slots[0]
    while number < count:
        best, grown, distance = -1, 0, 0
        for place in range(count):
            if gone[place]:
                continue
            length = slots[place]
            after = max(longest, length)
            away = abs(length - longest) if mode == 0 else 0  # prefer_closest
            if best < 0 or after < grown or (after == grown and away < distance):
                best, grown, distance = place, after, away
        if grown * (number + 1) > cap:
            break
        places[number] = best
        gone[best] = 1
        number += 1
        longest = grown
    return number


# ---- pool batcher


_STREAM = 4
"""Marks the random numbers of this purpose; see `jobs.seeds`."""
_IDENTITY = ("seed", "rank", "size", "samples", "lengths", "dataset")
_DIFFERENCE = {
    "seed": "another seed",
    "samples": "another number of samples",
    "lengths": "a dataset of other lengths",
    "dataset": "another dataset",
}


class PoolBatcher:
    """Forms micro-batches of one data-parallel rank's share of a dataset, epoch after epoch.

    The share is every `size`-th sample, reshuffled in each epoch. Before each micro-batch a pool is filled in that
    order; `pool.choose` takes the micro-batch from it. No sample is read, only lengths. Samples left at the end of an
    epoch stay in the pool, so none is dropped (the pool may then hold samples of two epochs).

    Args:
        lengths: int64[n], tokens of every sample of the dataset; below 1: the sample is left out. int64[n, k] for
            samples of k sequences that share a micro-batch (pairs: 2).
        max_tokens: most tokens of a micro-batch: rows times the longest, or the sum when packed. A sequence is a row.
        strategy: how a micro-batch is chosen from the pool.
        pool_size: samples to choose from.
        sequence_multiple: each length is rounded up to a multiple of this.
        seed: of the order.
        rank: this data-parallel rank.
        size: data-parallel ranks.
        infinite: repeat epochs without end; else stop after the first.
        dataset: fingerprint of the dataset, compared on resuming; None: only lengths are compared.

    Raises:
        DataError: for numbers below 1, an unknown strategy, samples above the cap (named), and, if `infinite`, a share
            without samples.
    """

    def __init__(
        self,
        lengths: Ints,
        *,
        max_tokens: int,
        strategy: PoolStrategy = "prefer_closest",
        pool_size: int = 32,
        sequence_multiple: int = 1,
        seed: int = 0,
        rank: int = 0,
        size: int = 1,
        infinite: bool = True,
        dataset: str | None = None,
    ) -> None:
        numbers = {"max_tokens": max_tokens, "pool_size": pool_size, "sequence_multiple": sequence_multiple}
        for name, number in numbers.items():
            if number < 1:
                raise DataError(f"{name} is at least 1; got {number}.")
        require_strategy(strategy)
        if seed < 0 or not 0 <= rank < size:
            raise DataError(f"seed is not negative and rank is in 0..size-1: {seed=}, {rank=}, {size=}.")
        lengths = np.ascontiguousarray(lengths, dtype=np.int64)
        self.max_tokens, self.strategy, self.pool_size, self.infinite = max_tokens, strategy, pool_size, infinite
        self._slots, rows = _slots(lengths, sequence_multiple, packed=strategy == "packed")
        self._cap = max_tokens // rows
        aligned = f"aligned to {sequence_multiple}" if rows == 1 else "in rows of one length"
        _require_cap(lengths, self._slots * rows, max_tokens, aligned)
        values = (seed, rank, size, len(lengths), hashlib.sha256(lengths.tobytes()).hexdigest()[:16], dataset)
        self._identity: dict[str, Any] = dict(zip(_IDENTITY, values, strict=True))
        self._origin: list[dict[str, Any]] | None = None
        """Saved states of all ranks, when resuming with a different DP size; their unread samples are redistributed."""
        self._last_dealt = -1
        """Last epoch of `_origin`: its order and earlier ones come from there, later ones from this layout."""
        self._epoch, self._cursor, self._count = 0, 0, 0
        self._order = self._order_of(0)
        if infinite and not self._order.size:
            held = int((self._slots > 0).sum())
            raise DataError(f"Rank {rank} of {size} has no samples: the dataset holds {held}; use fewer ranks.")
        self._waiting = np.empty(pool_size, dtype=np.int64)
        self._waiting_slots = np.empty(pool_size, dtype=np.int64)
        self._taken = np.empty(pool_size, dtype=np.int64)
        with compiled_once("pool"):
            # Compiles it before the first batch.
            take(np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64), 1, 1, strategy, np.zeros(1, dtype=np.int64))

    @property
    def epoch(self) -> int:
        """The epoch that the next sample to enter the pool belongs to, from 0."""
        return self._epoch

    @property
    def ended(self) -> bool:
        """Whether no sample is left, in this rank's share or its pool."""
        return not (self.infinite or self._count or self._cursor < self._order.size)

    def next_batch(self) -> Ints:
        """Forms the next micro-batch; returns its samples' indices, int64, none when the data has ended."""
        self._fill()
        if not self._count:
            return self._taken[:0].copy()
        num_taken = take(self._waiting, self._waiting_slots, self._count, self._cap, self.strategy, self._taken)
        self._count -= num_taken
        return self._taken[:num_taken].copy()

    def _fill(self) -> None:
        room = self.pool_size
        while self._count < room:
            if self._cursor == self._order.size:
                if not self.infinite:
                    return
                self._epoch, self._cursor = self._epoch + 1, 0
                self._origin, self._last_dealt = None, -1  # every redistributed sample has entered the pool
                self._order = self._order_of(self._epoch)
            drawn = self._order[self._cursor : self._cursor + room - self._count]
            end = self._count + drawn.size
            self._waiting[self._count : end] = drawn
            self._waiting_slots[self._count : end] = self._slots[drawn]
            self._count, self._cursor = end, self._cursor + drawn.size

    def _order_of(self, epoch: int) -> Ints:
        seed, rank, size = (self._identity[name] for name in ("seed", "rank", "size"))
        if self._origin is not None and epoch <= self._last_dealt:
            return _unread(self._slots, self._origin, self._last_dealt)[rank::size]
        return _share(self._slots, seed, rank, size, epoch)

    def start_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, with an empty pool."""
        self._origin, self._last_dealt = None, -1
        self._epoch, self._cursor, self._count = epoch, 0, 0
        self._order = self._order_of(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position as plain data, with at most `pool_size` indices."""
        return {
            **self._identity,
            "epoch": self._epoch,
            "cursor": self._cursor,
            "pool": self._waiting[: self._count].tolist(),
            "origin": self._origin,
        }

    def load_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, repartition: bool = False
    ) -> None:
        """Go to a saved position, without replaying the stream. Cap, strategy and pool size may have changed.

        Args:
            state: this rank's, or those of all ranks, in order.
            repartition: allow states of another number of ranks, given for all of them. The samples that those ranks
                had not read, of their epochs up to the latest, are distributed over these ranks: each is read once.

        Raises:
            DataError: naming the difference, for a state of another dataset or seed, of another rank or number of ranks
                (without `repartition`), or an incomplete or impossible one.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        for saved in states:
            if missing := sorted({*_IDENTITY, "epoch", "cursor", "pool", "origin"} - saved.keys()):
                raise DataError(f"The saved stream position lacks {', '.join(missing)}: load a whole one.")
            for name, difference in _DIFFERENCE.items():
                if saved[name] != self._identity[name]:
                    expected = self._identity[name]
                    cure = f"Set seed: {saved[name]}" if name == "seed" else "Resume with the saved run's data"
                    raise DataError(
                        f"The saved stream position is of {difference}: {name} {saved[name]!r}, here {expected!r}. "
                        f"{cure}, or start a new run under another exp_name"
                    )
        rank, size = self._identity["rank"], self._identity["size"]
        if any(saved["size"] != size for saved in states):
            self._deal_anew(states, repartition)
            return
        of_this_rank = [saved for saved in states if saved["rank"] == rank]
        if not of_this_rank:
            raise DataError(
                f"The saved stream position is of rank {states[0]['rank']}, this is rank {rank}: load on each rank the "
                "state that it saved."
            )
        self._restore(of_this_rank[0])

    def _restore(self, state: Mapping[str, Any]) -> None:
        pool = np.array(state["pool"], dtype=np.int64)
        before = self._origin, self._last_dealt
        self._origin = None if state["origin"] is None else list(state["origin"])
        self._last_dealt = -1 if self._origin is None else max(saved["epoch"] for saved in self._origin)
        epoch, cursor = int(state["epoch"]), int(state["cursor"])
        order = self._order_of(epoch)
        in_range = not pool.size or (0 <= int(pool.min()) and int(pool.max()) < len(self._slots))
        if epoch < 0 or not 0 <= cursor <= order.size or not in_range or (pool.size and not self._slots[pool].all()):
            self._origin, self._last_dealt = before
            raise DataError(
                f"The saved stream position is impossible: {epoch=}, {cursor=}, {pool=}. Resume from another "
                "checkpoint."
            )
        room = max(self.pool_size, pool.size)  # a saved pool may be larger: it shrinks to `pool_size` as it empties
        self._waiting, self._waiting_slots = np.resize(self._waiting, room), np.resize(self._waiting_slots, room)
        self._taken = np.resize(self._taken, room)
        self._waiting[: pool.size], self._waiting_slots[: pool.size] = pool, self._slots[pool]
        self._epoch, self._cursor, self._order, self._count = epoch, cursor, order, pool.size

    def _deal_anew(self, states: list[Mapping[str, Any]], repartition: bool) -> None:
        old, size = states[0]["size"], self._identity["size"]
        if not repartition:
            raise DataError(
                f"The saved stream position is of {old} data-parallel ranks, and there are {size}: resume with as "
                "many, or pass repartition: true, which deals the samples not read yet to the ranks of this run."
            )
        ranks = sorted(saved["rank"] for saved in states)
        if ranks != list(range(old)):
            raise DataError(f"repartition needs the positions of all {old} saved ranks; given are those of {ranks}.")
        self._origin = [dict(saved) for saved in sorted(states, key=lambda saved: int(saved["rank"]))]
        self._last_dealt = max(saved["epoch"] for saved in self._origin)
        self._epoch, self._cursor, self._count = self._last_dealt, 0, 0
        self._order = self._order_of(self._epoch)


def _share(slots: Ints, seed: int, rank: int, size: int, epoch: int) -> Ints:
    """A rank's samples in the order of an epoch, int64."""
    share = np.arange(rank, len(slots), size)
    share = share[slots[share] > 0]
    return share[np.random.default_rng([_STREAM, seed, rank, epoch]).permutation(share.size)]


def _unread(slots: Ints, states: Sequence[Mapping[str, Any]], last: int) -> Ints:
    """Returns the samples, int64, that ranks at `states` have not returned in epochs up to `last`.

    The pools come first, then the rest of each rank's share.
    """
    pools = [np.array(saved["pool"], dtype=np.int64) for saved in states]
    rest = []
    for saved in states:
        last_dealt = -1 if saved["origin"] is None else max(earlier["epoch"] for earlier in saved["origin"])
        for epoch in range(int(saved["epoch"]), last + 1):
            if epoch <= last_dealt:  # that run had been repartitioned itself
                order = _unread(slots, saved["origin"], last_dealt)[saved["rank"] :: saved["size"]]
            else:
                order = _share(slots, saved["seed"], saved["rank"], saved["size"], epoch)
            rest.append(order[saved["cursor"] :] if epoch == saved["epoch"] else order)
    return np.concatenate([*pools, *rest])


def _slots(lengths: Ints, multiple: int, *, packed: bool) -> tuple[Ints, int]:
    """Returns the aligned tokens of each sample (int64[n], 0: left out), and how many rows of them a sample takes.

    Sequences that share a micro-batch count their sum in a pack; in a rectangle each has a row as long as the longest.
    """
    aligned = np.maximum(-(-lengths // multiple) * multiple, 0)
    if lengths.ndim == 1:
        return aligned, 1
    together = aligned.sum(axis=1) if packed else aligned.max(axis=1)
    return np.where((lengths > 0).all(axis=1), together, 0), 1 if packed else lengths.shape[1]


def _require_cap(lengths: Ints, computed: Ints, max_tokens: int, aligned: str) -> None:
    above = np.flatnonzero(computed > max_tokens)
    if not above.size:
        return
    first = int(above[0])
    sequences = lengths[first].ravel().tolist()
    tokens = " and ".join(map(str, sequences)) + " tokens" + (", which stay together" if len(sequences) > 1 else "")
    takes = f" ({computed[first]} {aligned})" if computed[first] != sum(sequences) else ""
    rest = f", and {above.size - 1:,} more samples are longer than that" if above.size > 1 else ""
    raise DataError(
        f"Sample {first} has {tokens}{takes}, more than max_tokens={max_tokens}{rest}: raise the cap, shorten them, or "
        "leave them out."
    )
