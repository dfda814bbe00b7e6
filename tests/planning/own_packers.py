"""Packers named by dotted path: one that works, and others with invalid results."""

from __future__ import annotations

import numpy as np

from roll_batching.planning.packers import Items


def tightest(items: Items) -> list[list[int]]:
    """Best-fit-decreasing: each item into the fullest bin with room."""
    bins: list[list[int]] = []
    room: list[int] = []
    for item in np.argsort(-items.slots, kind="stable").tolist():
        size = int(items.slots[item])
        fitting = [place for place, free in enumerate(room) if free >= size]
        if not fitting:
            bins.append([])
            room.append(items.capacity)
            fitting = [len(bins) - 1]
        place = min(fitting, key=room.__getitem__)
        bins[place].append(item)
        room[place] -= size
    return bins


def forgets_the_last(items: Items) -> list[list[int]]:
    return tightest(items)[:-1]


def takes_one_twice(items: Items) -> list[list[int]]:
    return [*tightest(items), [0]]


def fills_over_the_cap(items: Items) -> list[list[int]]:
    return [list(range(len(items)))]


def leaves_a_bin_empty(items: Items) -> list[list[int]]:
    return [[], *tightest(items)]


def invents_an_item(items: Items) -> list[list[int]]:
    return [*tightest(items), [len(items)]]


def returns_no_bins(items: Items) -> None:
    return None


def returns_halves(items: Items) -> list[list[float]]:
    return [[0.5 + item for item in members] for members in tightest(items)]


def looks_for_what_is_not_there(items: Items) -> list[list[int]]:
    return {}["bins"]


def leaves(items: Items) -> list[list[int]]:
    raise SystemExit(0)


NOT_A_FUNCTION = 3
