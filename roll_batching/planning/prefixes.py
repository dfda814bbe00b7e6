"""Samples that begin alike: the order that makes them neighbours, and the positions that one takes from another.

Position i of a sample is the model's state after its tokens 0 to i, and predicts token i + 1. Two samples that agree in
their first n tokens have equal positions 0 to n - 2, states and labels; each computes position n - 1 itself, because it
predicts different tokens. In a pack the samples stand in the order of `SharedPrefixes`, and each computes only the
positions that it does not share with the sample before it. That describes trees of any depth: what a sample shares with
an earlier one, it also shares with those between them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from roll_batching.errors import PlanError
from roll_batching.planning.arrays import Ints, as_ints
from roll_batching.planning.cost_model import sequence_costs

SHORTEST_PREFIX = 16
"""Fewest shared positions: below, the further runs of keys cost attention more than the positions do."""

PART_PERCENTILES = (99, 97, 94, 90, 80, 65, 50)
"""Sizes of parts of trees that are tried first, in percentiles of the trees' costs: only larger trees are cut."""
PART_DIVISORS = (1, 2, 4, 8, 16, 32)
"""Sizes of parts that are tried then: the mean cost of a rank divided by these."""


def shared_positions(tokens: ArrayLike) -> Ints:
    """Positions that two samples share whose first `tokens` (int[...]) are equal: one fewer, and none below 16."""
    positions = np.asarray(tokens, dtype=np.int64) - 1
    return np.where(positions < SHORTEST_PREFIX, 0, positions)


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """Order of n samples in which those that begin alike are neighbours.

    Raises `PlanError` unless `order` is a permutation and `shared` has one value of at least 0 per sample.
    """

    order: Ints
    """int64[n]: sample indices in that order."""
    shared: Ints
    """int64[n]: positions that sample `order[i]` shares with sample `order[i - 1]`; 0 for the first."""

    def __post_init__(self) -> None:
        order = as_ints(self.order, "prefixes.order", len(self.order))
        shared = as_ints(self.shared, "prefixes.shared", len(order))
        if not np.array_equal(np.sort(order), np.arange(len(order))):
            raise PlanError(f"prefixes.order must hold each index from 0 to {len(order) - 1} once")
        if len(shared) and (shared.min() < 0 or shared[0] != 0):
            raise PlanError(f"prefixes.shared={shared[:8].tolist()}... must begin with 0, and have no negative number")
        object.__setattr__(self, "order", order)
        object.__setattr__(self, "shared", shared)

    @classmethod
    def of(cls, tokens: ArrayLike, lengths: ArrayLike) -> SharedPrefixes:
        """Order by token ids: `tokens` int[sum(lengths)] holds the samples one after the other, ids below 2^32."""
        sizes = as_ints(lengths, "lengths", len(np.asarray(lengths)))
        flat = as_ints(tokens, "tokens", int(sizes.sum()))
        if len(flat) and (flat.min() < 0 or flat.max() >= 1 << 32):
            raise PlanError(f"tokens lie between {flat.min()} and {flat.max()}: pass ids from 0 to 2^32 - 1")
        # Big-endian bytes sort as the ids do.
        samples = np.split(flat.astype(">u4"), np.cumsum(sizes)[:-1])
        order = sorted(range(len(sizes)), key=[sample.tobytes() for sample in samples].__getitem__)
        shared = np.zeros(len(order), dtype=np.int64)
        for place in range(1, len(order)):
            before, after = samples[order[place - 1]], samples[order[place]]
            width = min(len(before), len(after))
            differs = before[:width] != after[:width]
            shared[place] = int(differs.argmax()) if differs.any() else width
        return cls(np.array(order, dtype=np.int64), shared_positions(shared))

    @classmethod
    def of_groups(cls, groups: ArrayLike, prefix_lengths: ArrayLike, lengths: ArrayLike) -> SharedPrefixes:
        """Order by group: samples of one of `groups` (int[n]) have their first `prefix_lengths` tokens (int[n]) alike.

        Raises `PlanError` for samples of one group with different prefixes, and prefixes longer than their samples.
        """
        sizes = as_ints(lengths, "lengths", len(np.asarray(lengths)))
        group, prefix = as_ints(groups, "groups", len(sizes)), as_ints(prefix_lengths, "prefix_lengths", len(sizes))
        order = np.argsort(group, kind="stable").astype(np.int64)
        same_group = np.concatenate([[False], np.diff(group[order]) == 0])
        wrong = np.flatnonzero((prefix < 0) | (prefix > sizes))
        if len(wrong):
            i = int(wrong[0])
            raise PlanError(f"sample {i} of {sizes[i]} tokens has a prefix of {prefix[i]}: give 0 to {sizes[i]}")
        torn = np.flatnonzero(same_group[1:] & (np.diff(prefix[order]) != 0))
        if len(torn):
            first, second = int(order[torn[0]]), int(order[torn[0] + 1])
            raise PlanError(
                f"samples {first} and {second} of group {group[first]} have prefixes of {prefix[first]} and "
                f"{prefix[second]} tokens: samples of one group begin alike"
            )
        return cls(order, np.where(same_group, shared_positions(prefix[order]), 0))

    def __len__(self) -> int:
        return len(self.order)

    @cached_property
    def places(self) -> Ints:
        """int64[n]: place of each sample in the order."""
        places = np.empty(len(self.order), dtype=np.int64)
        places[self.order] = np.arange(len(self.order))
        return places

    def select(self, index: Ints) -> SharedPrefixes:
        """Prefixes of the samples at `index` (int64[m], unique); sample i of the result is `index[i]`."""
        by_place = np.argsort(self.places[index], kind="stable").astype(np.int64)
        chosen = index[by_place]
        shared = np.zeros(len(chosen), dtype=np.int64)
        shared[1:] = self.between(chosen[:-1], chosen[1:])
        return SharedPrefixes(by_place, shared)

    def between(self, before: Ints, after: Ints) -> Ints:
        """int64[m]: positions shared by each pair of samples `before` and `after` (int64[m]), in this order."""
        if not len(before):
            return np.zeros(0, dtype=np.int64)
        first, last = self.places[before] + 1, self.places[after]
        level = np.frexp(last - first + 1)[1] - 1  # largest power of two in the range
        minima = self._minima
        smallest: Ints = np.minimum(minima[level, first], minima[level, last - (1 << level) + 1])
        return smallest

    @cached_property
    def _minima(self) -> Ints:
        """`_minima[k, i]`: smallest of `shared[i:i + 2^k]`, for minima of ranges."""
        rows = [self.shared]
        while 1 << len(rows) <= len(self.shared):
            half, previous = 1 << (len(rows) - 1), rows[-1]
            row = previous.copy()
            row[:-half] = np.minimum(previous[:-half], previous[half:])
            rows.append(row)
        return np.stack(rows)


@dataclass(frozen=True)
class PricedPrefixes:
    """Positions that the samples of one plan take from each other, and scaled costs of the positions that remain."""

    prefixes: SharedPrefixes
    used: Ints
    """int64[n]: tokens used of each sample."""
    lengths: Ints
    """Sorted lengths whose costs are known."""
    costs: Ints
    """Scaled cost of each of `lengths`."""
    shift: int
    """Bits by which costs are shifted, as in `ScaledCosts`."""

    @classmethod
    def of(cls, prefixes: SharedPrefixes, used: Ints, cost: Any) -> PricedPrefixes:
        """Prices by a cost model: positions from n on cost what the whole sample costs more than its first n tokens."""
        lengths = np.unique(np.concatenate([used, used - 1, prefixes.shared]))
        lengths = lengths[lengths > 0]
        # Together with `used`, so that the total of a plan without sharing stays below the limit too.
        scaled = sequence_costs(np.concatenate([lengths, used]), cost)
        return cls(prefixes, used, lengths, scaled.values[: len(lengths)], scaled.shift)

    def cost(self, lengths: Ints) -> Ints:
        """Scaled costs of `lengths` (int64[m]); 0 for 0."""
        known = self.costs[np.minimum(np.searchsorted(self.lengths, lengths), len(self.lengths) - 1)]
        return np.where(lengths > 0, known, 0)

    def own_cost(self, used: Ints, shared: Ints) -> Ints:
        """Scaled costs (int64[m]) of samples after their first `shared` positions (int64[m]); at least 0."""
        own: Ints = np.maximum(self.cost(used) - self.cost(shared), 0)
        return own

    def sort(self, members: Ints, offsets: Ints) -> Ints:
        """`members` with each part `members[offsets[i]:offsets[i + 1]]` in the order of the prefixes."""
        part = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        return members[np.lexsort((self.prefixes.places[members], part))]

    def shared(self, members: Ints, offsets: Ints) -> Ints:
        """int64[m]: positions that each of the sorted `members` takes from the one before it in its part."""
        shared = np.zeros(len(members), dtype=np.int64)
        if len(members):
            before, after = members[:-1], members[1:]
            in_order = self.prefixes.places[before] < self.prefixes.places[after]  # always, inside a part
            common = self.prefixes.between(before[in_order], after[in_order])
            last = np.minimum(self.used[before], self.used[after])[in_order] - 1  # predicts nothing in one of them
            shared[1:][in_order] = np.minimum(common, last)
            shared[offsets[:-1][offsets[:-1] < len(members)]] = 0
        shared[shared < SHORTEST_PREFIX] = 0
        return shared


@dataclass(frozen=True)
class Chain:
    """Samples in the order of `SharedPrefixes`, with what each computes after the sample before it, int64[m] each."""

    samples: Ints
    shared: Ints
    """Positions taken from the sample before; 0 where a new tree begins."""
    slots: Ints
    """Tokens of the sample after another one."""
    first_slots: Ints
    """Tokens of the sample at the beginning of a part."""
    costs: Ints
    """Cost after another one."""
    first_costs: Ints
    """Cost at the beginning of a part."""


def cut_chain(chain: Chain, cap: int, most: int) -> Ints:
    """Starts of parts (int64[parts]) of at most `cap` tokens and a cost of at most `most`, with few tokens repeated.

    Trees are never joined. A tree that is too large is cut where its branches share least; branches that share equally
    much stay together as far as the limits allow. A part of one sample may exceed the limits.
    """
    starts: list[int] = []
    slots, costs = np.concatenate([[0], np.cumsum(chain.slots)]), np.concatenate([[0], np.cumsum(chain.costs)])

    def fits(start: int, end: int) -> bool:
        tokens = int(slots[end] - slots[start + 1] + chain.first_slots[start])
        return tokens <= cap and int(costs[end] - costs[start + 1] + chain.first_costs[start]) <= most

    roots = np.flatnonzero(chain.shared == 0)
    pending = list(zip(roots.tolist(), [*roots[1:].tolist(), len(chain.samples)], strict=True))[::-1]
    while pending:
        start, end = pending.pop()
        if end - start == 1 or fits(start, end):
            starts.append(start)
            continue
        links = chain.shared[start + 1 : end]
        bounds = [start, *(np.flatnonzero(links == links.min()) + start + 1).tolist(), end]
        pending += _join(bounds, fits)[::-1]
    return np.array(sorted(starts), dtype=np.int64)


def _join(bounds: list[int], fits: Callable[[int, int], bool]) -> list[tuple[int, int]]:
    """Branches between `bounds`, joined from the left as far as they fit; at least two parts."""
    parts, start = [], 0
    for place in range(1, len(bounds)):
        last = place == len(bounds) - 1
        if last or not fits(bounds[start], bounds[place + 1]):
            parts.append((bounds[start], bounds[place]))
            start = place
    return parts


def part_sizes(costs: Ints, mean: int) -> list[int]:
    """Candidates for the largest cost of a part of a tree, in the order in which plans try them.

    `costs` (int64[trees]) are those of the trees, `mean` is the mean cost of a rank.
    """
    by_cost = np.sort(costs)
    largest = [int(by_cost[len(by_cost) * percent // 100]) for percent in PART_PERCENTILES]
    return [max(size, 1) for size in (*largest, *(mean // divisor for divisor in PART_DIVISORS))]
