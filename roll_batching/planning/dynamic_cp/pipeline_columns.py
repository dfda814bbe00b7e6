"""Packs in columns in a pipeline: all ranks have the same number of packs, in an order with a short makespan.

Columns serve where every rank needs the same number of packs (virtual stages, experts, sharded parameters), and compete
with other placements elsewhere. Short columns at the ends fill and drain the pipeline quickly.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from roll_batching.planning.constraints import PlanConstraints
from roll_batching.planning.dynamic_cp.choices import SizeChoices
from roll_batching.planning.dynamic_cp.column_search import search_columns
from roll_batching.planning.dynamic_cp.column_state import UnitTables, tables_of
from roll_batching.planning.dynamic_cp.columns import (
    LONG_STEPS_PER_UNIT,
    SHORT_STEPS_PER_UNIT,
    Columns,
    packs_of,
    schedule_of,
    starts,
    state_of,
)
from roll_batching.planning.dynamic_cp.placed import PlacedPacks
from roll_batching.planning.pipeline.num_micro_batches import group_size_of, legal_count
from roll_batching.planning.pipeline.ordering import order_for_pipeline, pipeline_makespan

STARTS = 6
"""Placements that a short search improves."""
SHORT_STEPS, LONG_STEPS = 20_000, 150_000
"""Most steps of the search from each of them, and from the best; fewer where units are few."""
START_ORDERS = 500
"""Orders of columns that are tried for each start."""


def place_pipeline_columns(choices: SizeChoices, constraints: PlanConstraints) -> PlacedPacks:
    """The fastest of several placements in columns."""
    tables, order = tables_of(choices, constraints.dp_size)
    candidates = [_legal(tables, start, constraints) for start in starts(tables)]
    more = [_legal(tables, start, constraints, extra) for start in candidates[:4] for extra in (2, 4, 8)]
    candidates = sorted((_ordered(tables, start, constraints) for start in candidates + more), key=lambda c: c.time)
    chosen: dict[int, Columns] = {}
    for start in candidates:
        chosen.setdefault(start.count, start)
    best: Columns | None = None
    for number, start in enumerate(list(chosen.values())[:STARTS]):
        found = search(tables, start, constraints, min(SHORT_STEPS, SHORT_STEPS_PER_UNIT * len(order)), seed=number)
        if best is None or found.time < best.time:
            best = found
    assert best is not None
    best = search(tables, best, constraints, min(LONG_STEPS, LONG_STEPS_PER_UNIT * len(order)), seed=STARTS)
    return packs_of(best, order, choices, constraints)


def search(tables: UnitTables, start: Columns, constraints: PlanConstraints, steps: int, seed: int) -> Columns:
    """Columns after a search that shortens the makespan."""
    state = state_of(tables, start.pack_of, start.level, start.count)
    time, pack_of, level = search_columns(tables, state, schedule_of(start.count, constraints), steps, seed)
    return Columns(time, start.count, pack_of, level)


def _legal(tables: UnitTables, start: Columns, constraints: PlanConstraints, extra: int = 0) -> Columns:
    """Columns with empty ones added, to a legal number."""
    count = legal_count(start.count + extra, constraints)
    level = np.concatenate([start.level, np.zeros((count - start.count) * tables.ranks, dtype=np.int64)])
    return Columns(start.time, count, start.pack_of, level)


def _ordered(tables: UnitTables, start: Columns, constraints: PlanConstraints) -> Columns:
    """Columns in an order with a short makespan, and three times that."""
    maxima = state_of(tables, start.pack_of, start.level, start.count).maxima
    group_size = group_size_of(start.count, constraints)
    sizes: dict[str, Any] = {"stages": constraints.pp_size, "chunks": constraints.vpp_size, "group_size": group_size}
    order = order_for_pipeline(maxima, **sizes, tries=START_ORDERS)
    position = np.empty(start.count, dtype=np.int64)
    position[order] = np.arange(start.count)
    pack_of = position[start.pack_of // tables.ranks] * tables.ranks + start.pack_of % tables.ranks
    level = start.level.reshape(start.count, -1)[order].reshape(-1)
    return Columns(pipeline_makespan(maxima[order], **sizes), start.count, pack_of, level)
