"""Local search over packs: swaps that lower lockstep cost and rank excess, never above the cap.

The lockstep cost is the sum over indices k of the largest cost among the ranks at k. The rank excess is
what ranks have above a level, in sum. The search lowers a weighted sum of both.

A swap exchanges two units of different packs; each pack also holds some empty units, so that a swap with
one of them is a move. Most candidates are neighbours in the order of sizes: in nearly full packs only units
of like size can change places; one in eight is a unit of any other pack. A loss is accepted up to a
threshold that falls to zero (threshold accepting), so that the search needs integers only and gives the
same result on every machine.
"""

from __future__ import annotations

import numpy as np

from roll_batching.planning.compiled import compiled, draw, next_random, seed_state
from roll_batching.planning.inputs import Ints

EMPTY_UNITS = 2
"""Empty units per pack: how many moves into a pack can follow each other."""


@compiled
def sort_columns(load: Ints, dp_size: int, count: int, homes: bool) -> tuple[Ints, Ints]:
    """Columns by falling cost: `columns[k, r]` (pack) and `column_of[pack]`.

    Cutting the sorted packs into groups of dp_size minimises the lockstep cost. With `homes`, packs are
    rank-major and stay on their rank: the k-th costliest of every rank share column k.
    """
    columns = np.empty((count, dp_size), dtype=np.int64)
    column_of = np.empty(dp_size * count, dtype=np.int64)
    if homes:
        for rank in range(dp_size):
            order = np.argsort(-load[rank * count : (rank + 1) * count], kind="mergesort")
            for k in range(count):
                pack = rank * count + order[k]
                columns[k, rank] = pack
                column_of[pack] = k
    else:
        order = np.argsort(-load, kind="mergesort")
        for position in range(dp_size * count):
            columns[position // dp_size, position % dp_size] = order[position]
            column_of[order[position]] = position // dp_size
    return columns, column_of


@compiled
def assign_ranks(columns: Ints, load: Ints, homes: bool) -> tuple[Ints, Ints]:
    """A rank for every pack, and the rank totals: each column's costliest pack to the lightest rank.

    Columns are taken by falling spread. With `homes` the packs are on their ranks already.
    """
    count, dp_size = columns.shape
    rank_of_pack = np.empty(count * dp_size, dtype=np.int64)
    totals = np.zeros(dp_size, dtype=np.int64)
    if homes:
        for k in range(count):
            for rank in range(dp_size):
                rank_of_pack[columns[k, rank]] = rank
                totals[rank] += load[columns[k, rank]]
        return rank_of_pack, totals
    spread = np.empty(count, dtype=np.int64)
    for k in range(count):
        inside = load[columns[k]]
        spread[k] = inside.max() - inside.min()
    for k in np.argsort(-spread, kind="mergesort"):
        falling = np.argsort(-load[columns[k]], kind="mergesort")
        rising = np.argsort(totals, kind="mergesort")
        for position in range(dp_size):
            pack = columns[k, falling[position]]
            rank_of_pack[pack] = rising[position]
            totals[rising[position]] += load[pack]
    return rank_of_pack, totals


@compiled
def costliest_but(columns: Ints, load: Ints, k: int, first: int, second: int) -> int:
    """The costliest pack of column k apart from two packs, or -1."""
    best = -1
    for rank in range(columns.shape[1]):
        pack = columns[k, rank]
        if pack != first and pack != second and (best < 0 or load[pack] > load[best]):
            best = pack
    return best


@compiled
def column_tops(columns: Ints, load: Ints) -> Ints:
    """The costliest pack of every column."""
    top = np.empty(len(columns), dtype=np.int64)
    for k in range(len(columns)):
        top[k] = costliest_but(columns, load, k, -1, -1)
    return top


@compiled
def excess_above(totals: Ints, level: int) -> int:
    """What the ranks have above `level`, in sum."""
    above = 0
    for rank in range(len(totals)):
        above += max(0, totals[rank] - level)
    return above


@compiled
def excess_gain(totals: Ints, level: int, rank_a: int, rank_b: int, change: int) -> int:
    """How much excess vanishes when `change` goes from one rank to another."""
    if rank_a == rank_b:
        return 0
    return (
        max(0, totals[rank_a] - level)
        + max(0, totals[rank_b] - level)
        - max(0, totals[rank_a] - change - level)
        - max(0, totals[rank_b] + change - level)
    )


@compiled
def top_after(columns: Ints, load: Ints, top: int, k: int, pack: int, after: int) -> tuple[int, int]:
    """The costliest pack of column k and its cost when `pack` costs `after`."""
    if after >= load[top]:
        return pack, after
    if top != pack:
        return top, load[top]
    other = costliest_but(columns, load, k, pack, -1)
    if other < 0 or after > load[other]:
        return pack, after
    return other, load[other]


@compiled
def seat_members(place: Ints, packs: int) -> tuple[Ints, Ints, Ints]:
    """Units pack by pack: offsets (int64[packs + 1]), members, and each unit's seat among them."""
    first = np.zeros(packs + 1, dtype=np.int64)
    for unit in range(len(place)):
        first[place[unit] + 1] += 1
    for pack in range(packs):
        first[pack + 1] += first[pack]
    taken = first[:-1].copy()
    members = np.empty(len(place), dtype=np.int64)
    seat = np.empty(len(place), dtype=np.int64)
    for unit in range(len(place)):
        seat[unit] = taken[place[unit]]
        members[seat[unit]] = unit
        taken[place[unit]] += 1
    return first, members, seat


@compiled
def swap_units(
    pack_of: Ints,
    columns: Ints,
    rank_of_pack: Ints,
    slots: Ints,
    costs: Ints,
    home: Ints,
    dp_size: int,
    count: int,
    cap: int,
    iterations: int,
    threshold: int,
    column_weight: int,
    rank_weight: int,
    level: int,
    seed: int,
) -> tuple[Ints, Ints, Ints]:
    """Improved packs of all units (int64[n]), the columns (int64[K, dp]) and the ranks of packs (int64[dp*K]).

    `pack_of` (values 0 to dp_size * count - 1) must be within the cap, apart from packs with a single unit
    above it; `columns` (int64[K, dp]) and `rank_of_pack` are where the search starts. `home` holds each unit's
    rank or -1 (all or none). `threshold` is the first accepted loss, in weighted cost; `level`
    is what a rank may have before it counts as excess.
    """
    real = len(pack_of)
    packs = dp_size * count
    total = real + EMPTY_UNITS * packs
    homes = home[0] >= 0
    place = np.empty(total, dtype=np.int64)
    size = np.zeros(total, dtype=np.int64)
    cost = np.zeros(total, dtype=np.int64)
    rank_of = np.full(total, -1, dtype=np.int64)
    place[:real] = pack_of
    size[:real] = slots
    cost[:real] = costs
    rank_of[:real] = home
    for empty in range(total - real):
        place[real + empty] = empty // EMPTY_UNITS
        if homes:
            rank_of[real + empty] = empty // EMPTY_UNITS // count
    load = np.zeros(packs, dtype=np.int64)
    tokens = np.zeros(packs, dtype=np.int64)
    for unit in range(real):
        load[place[unit]] += cost[unit]
        tokens[place[unit]] += size[unit]
    first, members, seat = seat_members(place, packs)
    by_size = np.argsort((rank_of + 1) * (size.max() + 1) + size, kind="mergesort")
    position = np.empty(total, dtype=np.int64)
    for p in range(total):
        position[by_size[p]] = p

    columns = columns.copy()
    rank_at = rank_of_pack.copy()
    column_of = np.empty(packs, dtype=np.int64)
    totals = np.zeros(dp_size, dtype=np.int64)
    for k in range(count):
        for pack in columns[k]:
            column_of[pack] = k
            totals[rank_at[pack]] += load[pack]
    top = column_tops(columns, load)
    best_energy = column_weight * load[top].sum() + rank_weight * excess_above(totals, level)
    best = place[:real].copy()
    best_columns = columns.copy()
    best_ranks = rank_at.copy()
    state = seed_state(seed)
    period = max(4096, 8 * packs)
    accepted = threshold
    for iteration in range(1, iterations + 1):
        if iteration % 64 == 0:
            accepted = threshold * (iterations - iteration) // iterations
        if iteration % period == 0 or iteration == iterations:
            # The packs' costs have changed: cut columns anew where that is better, keep the best state.
            energy = column_weight * load[top].sum() + rank_weight * excess_above(totals, level)
            new_columns, new_column_of = sort_columns(load, dp_size, count, homes)
            new_ranks, new_totals = assign_ranks(new_columns, load, homes)
            new_top = column_tops(new_columns, load)
            new_energy = column_weight * load[new_top].sum() + rank_weight * excess_above(new_totals, level)
            if new_energy <= energy:
                columns, column_of, rank_at = new_columns, new_column_of, new_ranks
                totals, top, energy = new_totals, new_top, new_energy
            if energy < best_energy:
                best_energy = energy
                best = place[:real].copy()
                best_columns = columns.copy()
                best_ranks = rank_at.copy()
        state = next_random(state)
        k = draw(state, count)
        kind = state % 16
        pack = top[k]
        if kind == 0 and not homes:
            # Two ranks exchange their packs of one column: only the totals change.
            state = next_random(state)
            pack = columns[k, draw(state, dp_size)]
            state = next_random(state)
            pack_b = columns[k, draw(state, dp_size)]
            rank_a = rank_at[pack]
            rank_b = rank_at[pack_b]
            change = load[pack] - load[pack_b]
            gain = rank_weight * excess_gain(totals, level, rank_a, rank_b, change)
            if gain >= -accepted:
                totals[rank_a] -= change
                totals[rank_b] += change
                rank_at[pack] = rank_b
                rank_at[pack_b] = rank_a
            continue
        if kind < 5:
            state = next_random(state)
            pack = columns[k, draw(state, dp_size)]
        state = next_random(state)
        unit = members[first[pack] + draw(state, first[pack + 1] - first[pack])]
        choice = state % 32
        state = next_random(state)
        if choice < 4:
            pack_b = draw(state, packs)
            state = next_random(state)
            other = members[first[pack_b] + draw(state, first[pack_b + 1] - first[pack_b])]
        else:
            reach = 4 << (choice % 4 * 2)  # 4, 16, 64 or 256 neighbours to either side
            p = position[unit] + draw(state, 2 * reach + 1) - reach
            if p < 0 or p >= total:
                continue
            other = by_size[p]
            pack_b = place[other]
        moved = size[unit] - size[other]
        change = cost[unit] - cost[other]
        if pack_b == pack or change == 0 or rank_of[unit] != rank_of[other]:
            continue
        if moved < 0 and tokens[pack] - moved > cap or moved > 0 and tokens[pack_b] + moved > cap:
            continue
        after_a = load[pack] - change
        after_b = load[pack_b] + change
        column_b = column_of[pack_b]
        gain = column_weight * load[top[k]]
        if column_b == k:
            top_a = costliest_but(columns, load, k, pack, pack_b)
            largest = -1 if top_a < 0 else load[top_a]
            if after_a > largest:
                largest = after_a
                top_a = pack
            if after_b > largest:
                largest = after_b
                top_a = pack_b
            top_b = top_a
            gain -= column_weight * largest
        else:
            top_a, largest = top_after(columns, load, top[k], k, pack, after_a)
            top_b, largest_b = top_after(columns, load, top[column_b], column_b, pack_b, after_b)
            gain += column_weight * (load[top[column_b]] - largest - largest_b)
        rank_a = rank_at[pack]
        rank_b = rank_at[pack_b]
        if gain + rank_weight * excess_gain(totals, level, rank_a, rank_b, change) < -accepted:
            continue
        top[k] = top_a
        top[column_b] = top_b
        totals[rank_a] -= change
        totals[rank_b] += change
        load[pack] = after_a
        load[pack_b] = after_b
        tokens[pack] -= moved
        tokens[pack_b] += moved
        place[unit] = pack_b
        place[other] = pack
        seat_a = seat[unit]
        seat_b = seat[other]
        members[seat_a] = other
        members[seat_b] = unit
        seat[unit] = seat_b
        seat[other] = seat_a
    return best, best_columns, best_ranks
