"""Exchange of samples between two parallel layouts of the same processes, such as policy and reference.

A process belongs to a replica in each layout. All ranks of a replica hold its samples. A rank that needs them in the
other layout takes its own copy if it has one, else one of theirs; receivers are spread evenly over the holders.
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
    select_samples,
    state_facts,
)
from roll_batching.samples.batch import SampleBatch
from roll_batching.samples.exchange_group import ExchangeGroup
from roll_batching.samples.length_table import LengthTable, require_batch


@dataclass(frozen=True, eq=False)
class LayoutExchange:
    """Maps the data-parallel ranks of a layout that holds samples (source) to those that compute them (target)."""

    source: np.ndarray
    """int64 [processes]: data-parallel rank of each process in the layout that holds the samples."""
    target: np.ndarray
    """int64 [processes]: data-parallel rank of each process in the layout that computes them."""

    @classmethod
    def of(cls, source: int, target: int) -> LayoutExchange:
        """From this process's data-parallel ranks in both layouts. Collective."""
        dp_ranks = np.array(exchange(host_group(), "two layouts", lambda: (source, target)), dtype=np.int64)
        return cls(dp_ranks[:, 0], dp_ranks[:, 1])

    def in_target(self, table: LengthTable) -> LengthTable:
        """`table` for plans of the target layout, with the location of each sample there."""
        first = np.array([np.flatnonzero(self.source == rank)[0] for rank in range(int(self.source.max()) + 1)])
        return LengthTable(table.ids, table.lengths, self.target[first[table.location]], table.prefixes)

    @property
    def inverse(self) -> LayoutExchange:
        """The exchange from the target layout to the source."""
        return LayoutExchange(self.target, self.source)

    def transfer_plan(self, table: LengthTable, dp_ranks: np.ndarray) -> Plan:
        """A plan that sends each sample of `table` to a data-parallel rank of the target, int64 [n].

        For samples that are moved but not packed. Each rank's samples are in the order of the table.
        """
        size = int(self.target.max()) + 1
        bins = [[np.flatnonzero(dp_ranks == rank).tolist()] for rank in range(size)]
        one_each = BatchingSpec(max_tokens=int(table.lengths.sum()), algorithm="none")
        constraints = PlanConstraints.of(ParallelDims(dp_size=size), one_each)
        return Plan.from_bins(bins, table.lengths, constraints, ids=table.ids)

    def distribute(self, batch: SampleBatch, plan: Plan, table: LengthTable) -> SampleBatch:
        """`samples.distribute` by a plan of the target layout. Collective.

        Args:
            batch: the samples that this rank holds in the source layout.
            plan: from `in_target(table)`.
            table: of the source layout, from `gather_lengths`.

        Raises:
            RankError: on all ranks, as `samples.distribute`.
        """
        group, me = self._group, dist.get_rank()
        with group.consensus("distribute between layouts") as facts:
            require_batch("distribute", batch)
            routes = self._routes(facts, plan, table, batch, batch)
        senders = _senders(self.source, group.size)
        outgoing, to_rank = _outgoing(
            routes.placed, self.target, routes.computing, routes.location[routes.placed], senders, me
        )
        order = np.argsort(senders[me, routes.location[routes.assigned]], kind="stable")
        incoming = routes.assigned[order]
        samples = select_samples(batch, plan, outgoing)
        fields = exchange_fields(samples, plan, group, to_rank, incoming, senders[me, routes.location[incoming]])
        received = SampleBatch(plan.ids[incoming], plan.lengths[incoming], fields, batch.schema)
        return received.select(np.argsort(order, kind="stable"))

    def collect(self, results: SampleBatch, plan: Plan, table: LengthTable, *, like: SampleBatch) -> SampleBatch:
        """`samples.collect` for results of samples that `distribute` has sent. Collective."""
        group, me = self._group, dist.get_rank()
        with group.consensus("collect between layouts") as facts:
            require_batch("collect", results)
            require_batch("collect", like, "like")
            routes = self._routes(facts, plan, table, results, like)
            computed = results_in_plan_order(results, plan, routes)
        senders = _senders(self.target, group.size)
        counted = routes.counted
        outgoing, to_rank = _outgoing(
            counted, self.source, routes.location[counted], routes.rank_of[counted], senders, me
        )
        held = np.flatnonzero(routes.location == self.source[me])
        held = held[np.argsort(like.rows_of(plan.ids[held]).numpy(), kind="stable")]
        incoming = counted[routes.location[counted] == self.source[me]]
        from_rank = senders[me, routes.rank_of[incoming]]
        order = np.argsort(from_rank, kind="stable")
        samples = select_samples(computed, plan, outgoing)
        fields = exchange_fields(samples, plan, group, to_rank, incoming[order], from_rank[order])
        return assemble(fields, results, plan, held, incoming[order])

    def _routes(self, facts: Facts, plan: Plan, table: LengthTable, moved: SampleBatch, held: SampleBatch) -> Routes:
        require_plan(plan)
        state_facts(facts, moved, plan)
        rank_of, placed, computing = placement_of(plan, int(self.target.max()) + 1)
        if not np.array_equal(plan.ids, table.ids):
            raise DataError("The plan and the table have different samples: plan from in_target(table).")
        me = dist.get_rank()
        check_location(plan, table.location, int(self.source[me]), held)
        check_lengths(plan, held)
        return Routes(table.location, rank_of, placed, computing, int(self.target[me]))

    @cached_property
    def _group(self) -> ExchangeGroup:
        return ExchangeGroup.of(dist.group.WORLD, consensus_group=host_group())


def _senders(dp_rank_of: np.ndarray, size: int) -> np.ndarray:
    """int64 [size, dp_size]: the process that sends each process the samples of each data-parallel rank.

    `dp_rank_of` has the data-parallel rank of every process in the sending layout. A process with a copy is its own
    sender.
    """
    senders = np.empty((size, int(dp_rank_of.max()) + 1), dtype=np.int64)
    for dp_rank in range(senders.shape[1]):
        holders = np.flatnonzero(dp_rank_of == dp_rank)
        senders[:, dp_rank] = holders[np.arange(size) % holders.size]
        senders[holders, dp_rank] = holders
    return senders


def _outgoing(
    placed: np.ndarray,
    receiving: np.ndarray,
    received_by: np.ndarray,
    held_by: np.ndarray,
    senders: np.ndarray,
    rank: int,
) -> tuple[np.ndarray, np.ndarray]:
    """(samples that process `rank` sends, their receivers), by receiver, then in plan order.

    Args:
        placed: samples that take part, int64 [placed], in plan order; may repeat.
        receiving: data-parallel rank of each process in the receiving layout.
        received_by: data-parallel rank of each entry of `placed` in the receiving layout.
        held_by: data-parallel rank of each entry of `placed` in the sending layout.
        senders: from `_senders`.
        rank: this process.
    """
    by_dp_rank = [np.flatnonzero(received_by == dp_rank) for dp_rank in range(int(receiving.max()) + 1)]
    sent = [
        placed[by_dp_rank[dp_rank]][senders[process, held_by[by_dp_rank[dp_rank]]] == rank]
        for process, dp_rank in enumerate(receiving)
    ]
    return np.concatenate(sent), np.repeat(np.arange(len(sent)), [samples.size for samples in sent])
