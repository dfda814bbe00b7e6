"""Random legal plans with a context-parallel size per pack."""

from __future__ import annotations

import random
from typing import Any


def random_block_plan(
    lengths: Any, ranks: int, cap: int, seed: int, *, in_columns: bool = False, largest: int = 0, **options: Any
) -> Any:
    """A plan of nested blocks, large ones first; with `in_columns` all ranks have a micro-batch at every index.

    `cap` is per rank; `largest` is the largest size, by default `ranks`. `options` go to PlanConstraints, and `ids`,
    `location`, `prefixes` to `Plan.from_bins`.
    """
    from roll_batching.planning import Plan, PlanConstraints
    from roll_batching.planning.pipeline.schedule import legal_count

    given = {name: options.pop(name) for name in ("ids", "location", "prefixes") if name in options}
    largest = largest or ranks
    constraints = PlanConstraints(dp_size=ranks, max_tokens=cap, max_cp_size=largest, **options)
    generator = random.Random(seed)
    sizes = [1 << i for i in range(largest.bit_length())]
    of_size: dict[int, list[int]] = {size: [] for size in sizes}
    for sample, length in enumerate(lengths):
        legal = [size for size in sizes if _slot(constraints, length, size) <= cap * size]
        of_size[generator.choice(legal)].append(sample)
    bins: list[list[list[int]]] = [[] for _ in range(ranks)]
    for size in reversed(sizes):
        packs: list[list[int]] = []
        for sample in of_size[size]:
            used = sum(_slot(constraints, lengths[other], size) for other in packs[-1]) if packs else 0
            joins = packs and generator.random() < 0.7
            if joins and _tokens(constraints, used + _slot(constraints, lengths[sample], size), size) <= cap * size:
                packs[-1].append(sample)
            else:
                packs.append([sample])
        while packs:
            firsts = list(range(0, ranks, size))
            generator.shuffle(firsts)
            for first in firsts[: generator.randint(1, len(firsts))]:
                if packs:
                    pack = packs.pop()
                    for rank in range(first, first + size):
                        bins[rank].append(pack)
            if in_columns:
                _level(bins)
    if in_columns:
        count = legal_count(max(map(len, bins)), constraints)
        for row in bins:
            row += [[] for _ in range(count - len(row))]
    for row in bins:
        if not row:
            row.append([])
    return Plan.from_bins(bins, lengths, constraints, **given)


def _level(bins: list[list[list[int]]]) -> None:
    most = max(map(len, bins))
    for row in bins:
        row += [[] for _ in range(most - len(row))]


def _slot(constraints: Any, length: int, size: int) -> int:
    unit = constraints.sequence_alignment_of(size)
    return -(-length // unit) * unit


def _tokens(constraints: Any, slots: int, size: int) -> int:
    unit = constraints.pack_alignment_of(size)
    return -(-slots // unit) * unit
