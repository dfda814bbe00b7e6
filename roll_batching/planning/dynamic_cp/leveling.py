"""Moves and swaps of units between packs of one rank, so that ranks take equally long."""

from __future__ import annotations

import numpy as np

from roll_batching.planning.arrays import Ints
from roll_batching.planning.compiled import compiled
from roll_batching.planning.dynamic_cp.choices import SizeChoices
from roll_batching.planning.dynamic_cp.placed import PlacedPacks

MOST_MOVES = 1500
"""Moves and swaps of a search; it ends earlier where none shortens the slowest rank."""
MOST_PARTNERS = 6
"""Ranks, from the fastest on, with which the slowest tries to exchange units."""


def level_ranks(packs: PlacedPacks, choices: SizeChoices, ranks: int) -> PlacedPacks:
    """`packs` with units moved and swapped between packs of size 1; never slower."""
    single = [pack for pack, level in enumerate(packs.levels) if level == 0]
    if not single:
        return packs
    loads = rank_loads(packs, choices, ranks)
    pack_of = np.full(choices.times.shape[1], -1, dtype=np.int64)
    for place, pack in enumerate(single):
        pack_of[packs.units[pack]] = place
    rank_of = np.array([packs.first_ranks[pack] for pack in single], dtype=np.int64)
    members = np.flatnonzero(pack_of >= 0).astype(np.int64)
    cap = int(choices.caps[0])
    _exchange(members, pack_of, rank_of, choices.times[0], choices.slots[0], loads, cap)
    units = [list(pack) for pack in packs.units]
    for place, pack in enumerate(single):
        units[pack] = members[pack_of[members] == place].tolist()
    kept = [pack for pack, inside in enumerate(units) if inside]
    levelled = PlacedPacks(
        units=[units[pack] for pack in kept],
        first_ranks=[packs.first_ranks[pack] for pack in kept],
        levels=[packs.levels[pack] for pack in kept],
        step_time=0,
    )
    time = int(rank_loads(levelled, choices, ranks).max())
    return PlacedPacks(levelled.units, levelled.first_ranks, levelled.levels, time) if time < packs.step_time else packs


def rank_loads(packs: PlacedPacks, choices: SizeChoices, ranks: int) -> Ints:
    """int64[ranks]: nanoseconds of each rank."""
    loads = np.zeros(ranks, dtype=np.int64)
    for first, level, time in zip(packs.first_ranks, packs.levels, choices.pack_times(packs).tolist(), strict=True):
        loads[first : first + (1 << level)] += time
    return loads


@compiled
def _exchange(members: Ints, pack_of: Ints, rank_of: Ints, times: Ints, slots: Ints, loads: Ints, cap: int) -> None:
    """Exchanges units between the slowest rank and fast ones, in place, while that shortens the slowest rank."""
    packs = len(rank_of)
    used = np.zeros(packs, dtype=np.int64)
    for unit in members:
        used[pack_of[unit]] += slots[unit]
    for _ in range(MOST_MOVES):
        slow = int(np.argmax(loads))
        order = np.argsort(loads)
        best_time, best_unit, best_other, best_pack = loads[slow], -1, -1, -1
        for partner in order[:MOST_PARTNERS]:
            if partner == slow or loads[partner] >= best_time:
                continue
            for unit in members:
                if rank_of[pack_of[unit]] != slow:
                    continue
                lighter = loads[slow] - times[unit]
                for pack in range(packs):  # a move
                    if rank_of[pack] == partner and used[pack] + slots[unit] <= cap:
                        time = max(lighter, loads[partner] + times[unit])
                        if time < best_time:
                            best_time, best_unit, best_other, best_pack = time, unit, -1, pack
                for other in members:  # a swap
                    pack = pack_of[other]
                    if rank_of[pack] != partner or times[other] >= times[unit]:
                        continue
                    if used[pack] + slots[unit] - slots[other] > cap:
                        continue
                    if used[pack_of[unit]] + slots[other] - slots[unit] > cap:
                        continue
                    time = max(lighter + times[other], loads[partner] + times[unit] - times[other])
                    if time < best_time:
                        best_time, best_unit, best_other, best_pack = time, unit, other, pack
            if best_unit >= 0:
                break
        if best_unit < 0:
            return
        own = pack_of[best_unit]
        partner = rank_of[best_pack]
        loads[slow] -= times[best_unit]
        loads[partner] += times[best_unit]
        used[own] -= slots[best_unit]
        used[best_pack] += slots[best_unit]
        pack_of[best_unit] = best_pack
        if best_other >= 0:
            loads[slow] += times[best_other]
            loads[partner] -= times[best_other]
            used[own] += slots[best_other]
            used[best_pack] -= slots[best_other]
            pack_of[best_other] = own
