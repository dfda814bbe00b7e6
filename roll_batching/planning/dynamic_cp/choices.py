"""What each unit of samples costs and needs at each context-parallel size; packs of units on blocks of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from roll_batching.planning.arrays import Flags, Ints, offsets_of, round_up, sums_of
from roll_batching.planning.pack_times import PackTimes
from roll_batching.planning.problem import PlanProblem


@dataclass(frozen=True)
class SizeChoices:
    """Times and slots of units by context-parallel size; row i of an array is of size `sizes[i]` = 2^i."""

    sizes: Ints
    times: Ints
    """int64[sizes, units]: nanoseconds that a unit adds to a pack."""
    slots: Ints
    """int64[sizes, units]: tokens of all slots of a unit."""
    fixed: Ints
    """int64[sizes]: nanoseconds of a pack without its units."""
    floor: int
    """Least nanoseconds of a pack."""
    caps: Ints
    """int64[sizes]: most tokens of all slots of a pack."""
    smallest: Ints
    """int64[units]: index of the smallest size at which a unit fits into a pack."""

    @classmethod
    def of(cls, problem: PlanProblem, times: PackTimes) -> SizeChoices:
        """Choices of the units of a problem, whose oversize units are dropped or cut."""
        constraints, units = problem.constraints, problem.units
        sizes = np.array(constraints.legal_cp_sizes, dtype=np.int64)
        used, shared = problem.used[units.samples], np.zeros(len(units.samples), dtype=np.int64)
        if problem.prefixes is not None:
            shared = problem.prefixes.shared(units.samples, units.offsets)
        unit_times, slots = [], []
        for size in sizes.tolist():
            added = times.sequences(used, size) - np.where(shared > 0, times.sequences(np.maximum(shared, 1), size), 0)
            unit_times.append(sums_of(np.maximum(added, 0), units.offsets))
            slots.append(sums_of(round_up(used - shared, constraints.sequence_alignment_of(size)), units.offsets))
        caps = np.array([constraints.usable_tokens_of(size) for size in sizes.tolist()], dtype=np.int64)
        stacked = np.stack(slots)
        return cls(
            sizes=sizes,
            times=np.stack(unit_times),
            slots=stacked,
            fixed=np.array([times.fixed(size) for size in sizes.tolist()], dtype=np.int64),
            floor=times.floor,
            caps=caps,
            smallest=np.argmax(stacked <= caps[:, None], axis=0).astype(np.int64),
        )

    @cached_property
    def fits(self) -> Flags:
        """bool[sizes, units]: whether a unit fits into a pack. Rounding may let it fit a small size and no larger."""
        below: Flags = self.slots <= self.caps[:, None]
        return below

    def least_mean(self, ranks: int) -> int:
        """A lower bound of the mean nanoseconds of a rank: all units at the sizes with the least work."""
        work = np.where(self.fits, self.times * self.sizes[:, None], np.iinfo(np.int64).max)
        return int(work.min(axis=0).sum()) // ranks

    def times_of(self, packs: Sequence[Sequence[int]], levels: Ints) -> Ints:
        """int64[packs]: nanoseconds of packs of units at `levels` (int64[packs])."""
        counts = np.array([len(pack) for pack in packs], dtype=np.int64)
        units = np.fromiter(itertools.chain.from_iterable(packs), dtype=np.int64, count=int(counts.sum()))
        unit_times = self.times[np.repeat(levels, counts), units]
        times: Ints = np.maximum(self.fixed[levels] + sums_of(unit_times, offsets_of(counts)), self.floor)
        return times

    def pack_times(self, packs: PlacedPacks) -> Ints:
        """int64[packs]: nanoseconds of each pack."""
        return self.times_of(packs.units, np.array(packs.levels, dtype=np.int64))


# ---- packs on blocks of ranks


@dataclass(frozen=True)
class PlacedPacks:
    """Units of each pack, its first rank and its level (its size is 2^level), in an order that every rank follows."""

    units: list[list[int]]
    first_ranks: list[int]
    levels: list[int]
    step_time: int
    """Predicted nanoseconds of the step."""
