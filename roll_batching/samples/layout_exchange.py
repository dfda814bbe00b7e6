"""Samples of one role's layout computed in another's, on the same ranks: out by a plan of the other, results back.

A process belongs to a replica of each layout. What a replica of the one holds lies on all of its ranks, so each rank of
a replica of the other finds it on itself, or takes it from one of them; the askers are spread over those that hold it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch.distributed as dist

from roll_batching.distributed import Facts, exchange, host_group
from roll_batching.errors import DataError
from roll_batching.planning import BatchingSpec, ParallelDims, Plan, PlanConstraints
from roll_batching.samples.all_to_all import (
    Routes,
    assemble,
    check_lengths,
    check_location,
    exchange_fields,
    placement_of,
    require_plan,
    results_in_plan_order,
    state_facts,
)
from roll_batching.samples.batch import SampleBatch
from roll_batching.samples.exchange_group import Peers
from roll_batching.samples.length_table import LengthTable, require_batch


@dataclass(frozen=True, eq=False)
class LayoutExchange:
    """Two layouts of all processes: where samples lie, and where they are computed."""

    home: np.ndarray
    """int64 [processes]: each one's data-parallel rank where samples lie."""
    away: np.ndarray
    """int64 [processes]: and where they are computed."""

    @classmethod
    def of(cls, home: int, away: int) -> LayoutExchange:
        """From this process's data-parallel ranks. Collective."""
        places = np.array(exchange(host_group(), "two layouts", lambda: (home, away)), dtype=np.int64)
        return cls(places[:, 0], places[:, 1])

    def seen(self, table: LengthTable) -> LengthTable:
        """`table` for plans of the other layout: each sample lies on one of its ranks that hold it."""
        first = np.array([np.flatnonzero(self.home == part)[0] for part in range(int(self.home.max()) + 1)])
        return LengthTable(table.ids, table.lengths, self.away[first[table.location]])

    @property
    def back(self) -> LayoutExchange:
        """The way from the other layout into this one."""
        return LayoutExchange(self.away, self.home)

    def plan_of(self, table: LengthTable, parts: np.ndarray) -> Plan:
        """The plan by which each sample of `table` goes to a data-parallel rank of the other layout, int64 [n].

        For samples that are moved and not packed there. A rank's come in the order of the table.
        """
        size = int(self.away.max()) + 1
        bins = [[np.flatnonzero(parts == part).tolist()] for part in range(size)]
        one_each = BatchingSpec(max_tokens=int(table.lengths.sum()), algorithm="none")
        constraints = PlanConstraints.of(ParallelDims(dp_size=size), one_each)
        return Plan.from_bins(bins, table.lengths, constraints, ids=table.ids)

    def distribute(self, batch: SampleBatch, plan: Plan, table: LengthTable) -> SampleBatch:
        """As `data.distribute`, where `plan` is of the other layout, from `seen(table)`. Collective.

        `table`, as `gather_lengths` gives it, says where samples lie. Raises `RankError` on all ranks alike.
        """
        peers, me = self._peers, dist.get_rank()
        with peers.consensus("distribute between layouts") as facts:
            require_batch("distribute", batch)
            routes = self._routes(facts, plan, table, batch, batch)
        senders = _senders(self.home, peers.size)
        going, to_rank = _going(routes.placed, self.away, routes.rank_of, routes.location, senders, me)
        mine = routes.mine
        order = np.argsort(senders[me, routes.location[mine]], kind="stable")
        arriving = mine[order]
        samples = _rows(batch, plan, going)
        fields = exchange_fields(samples, plan, peers, to_rank, arriving, senders[me, routes.location[arriving]])
        arrived = SampleBatch(plan.ids[arriving], plan.lengths[arriving], fields, batch.schema)
        return arrived.select(np.argsort(order, kind="stable"))

    def collect(self, results: SampleBatch, plan: Plan, table: LengthTable, *, like: SampleBatch) -> SampleBatch:
        """As `data.collect`, for what `distribute` brought to its ranks. Collective."""
        peers, me = self._peers, dist.get_rank()
        with peers.consensus("collect between layouts") as facts:
            require_batch("collect", results)
            require_batch("collect", like, "like")
            routes = self._routes(facts, plan, table, results, like)
            computed = results_in_plan_order(results, plan, routes)
        senders = _senders(self.away, peers.size)
        going, to_rank = _going(routes.placed, self.home, routes.location, routes.rank_of, senders, me)
        home = np.flatnonzero(routes.location == self.home[me])
        home = home[np.argsort(like.rows_of(plan.ids[home]).numpy(), kind="stable")]
        arriving = routes.placed[routes.location[routes.placed] == self.home[me]]
        from_rank = senders[me, routes.rank_of[arriving]]
        order = np.argsort(from_rank, kind="stable")
        samples = _rows(computed, plan, going)
        fields = exchange_fields(samples, plan, peers, to_rank, arriving[order], from_rank[order])
        return assemble(fields, results, plan, home, arriving[order])

    def _routes(self, facts: Facts, plan: Plan, table: LengthTable, moved: SampleBatch, held: SampleBatch) -> Routes:
        require_plan(plan)
        state_facts(facts, moved, plan)
        rank_of, placed = placement_of(plan, int(self.away.max()) + 1)
        if not np.array_equal(plan.ids, table.ids):
            raise DataError(
                "The plan has other samples than the table that says where they lie: plan from seen(table)."
            )
        me = dist.get_rank()
        check_location(plan, table.location, int(self.home[me]), held)
        check_lengths(plan, held)
        return Routes(table.location, rank_of, placed, int(self.away[me]))

    @cached_property
    def _peers(self) -> Peers:
        return Peers.of(dist.group.WORLD, everyone=host_group())


def _senders(holding: np.ndarray, size: int) -> np.ndarray:
    """int64 [size, parts]: who hands each process what a part holds; itself, where it holds it."""
    found = np.empty((size, int(holding.max()) + 1), dtype=np.int64)
    for part in range(found.shape[1]):
        holders = np.flatnonzero(holding == part)
        found[:, part] = holders[np.arange(size) % holders.size]
        found[holders, part] = holders
    return found


def _going(
    placed: np.ndarray, wanting: np.ndarray, wanted_by: np.ndarray, held_by: np.ndarray, senders: np.ndarray, me: int
) -> tuple[np.ndarray, np.ndarray]:
    """(samples that this process sends, to whom), by receiver, then in plan order.

    `wanted_by` and `held_by` are the parts of each sample, `wanting` the part of each process that wants.
    """
    parts = [placed[wanted_by[placed] == part] for part in range(int(wanting.max()) + 1)]
    chosen = [parts[part][senders[rank, held_by[parts[part]]] == me] for rank, part in enumerate(wanting)]
    return np.concatenate(chosen), np.repeat(np.arange(len(chosen)), [one.size for one in chosen])


def _rows(batch: SampleBatch, plan: Plan, samples: np.ndarray) -> SampleBatch:
    """The plan's `samples` out of `batch`, as often as they are named."""
    return batch.select(batch.rows_of(plan.ids[samples]), ids=np.arange(samples.size))
