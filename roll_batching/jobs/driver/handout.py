"""A step handed out: each replica's samples once, the plan once, and one call per rank that names them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from roll_batching.errors import DataError
from roll_batching.jobs.driver.batches import columns_of
from roll_batching.jobs.driver.columns import cut, nbytes, share_of
from roll_batching.planning import Plan
from roll_batching.planning.arrays import Ints
from roll_batching.samples import SampleBatch
from roll_batching.samples.fields import SchemaLike, normalise_schema

EMBEDDED = "input_ids"
"""The field that a pipeline's first stage reads."""


@dataclass(frozen=True, kw_only=True)
class Station:
    """What one rank works on, and what it needs for that."""

    dp_rank: int
    """Its replica."""
    is_first_stage: bool
    """It reads `input_ids`: the first stage of a pipeline."""
    is_last_stage: bool
    """It reads all fields: the last stage of a pipeline."""
    is_replica_leader: bool
    """It speaks for its replica."""

    def reads(self, names: frozenset[str]) -> bool:
        """Whether it needs any of the fields `names`; stages between first and last need lengths and plan alone."""
        return self.is_last_stage or (self.is_first_stage and EMBEDDED in names)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some fields of all samples, one object per replica."""

    names: frozenset[str]
    objects: tuple[Any, ...]
    """By replica: the reference of its columns in the object store, samples in the plan's order."""


@dataclass(frozen=True, kw_only=True)
class Handout:
    """A step's samples and plan in Ray's object store, for as many passes as you like. Freed with its last copy."""

    plan: Plan
    plan_object: Any
    parts: tuple[Part, ...]
    ids: Ints
    """int64 `[n]`: of the caller's samples, in the caller's order."""
    lengths: Ints
    """int64 `[n]`: their tokens."""
    origin: str
    """Its name, by which ranks know that they were handed the same."""
    nbytes: int
    """Bytes that were put into the object store for it: samples and plan."""

    def with_part(self, part: Part, size: int = 0) -> Handout:
        """The same samples with more fields, of which `size` bytes were put into the object store from here.

        Raises `DataError` for a field that the samples have.
        """
        if taken := {name for other in self.parts for name in other.names & part.names}:
            raise DataError(f"the samples that were handed out have {', '.join(sorted(taken))} already")
        return replace(self, parts=(*self.parts, part), origin=uuid.uuid4().hex, nbytes=self.nbytes + size)


def hand_out(batch: SampleBatch, plan: Plan, stations: Sequence[Station]) -> Handout:
    """Puts samples and plan into the object store: as many objects as replicas, and one for the plan.

    Args:
        batch: all samples; those that the plan does not name stay behind.
        plan: for as many replicas as `stations` have.
        stations: of all ranks. Where some read `input_ids` alone, those are objects of their own.

    Raises:
        DataError: for samples that the plan does not fit.
    """
    import ray

    replicas = 1 + max(station.dp_rank for station in stations)
    if plan.constraints.dp_size != replicas:
        raise DataError(f"the plan is for {plan.constraints.dp_size} data-parallel ranks, and there are {replicas}")
    if EMBEDDED not in batch or batch.schema[EMBEDDED].kind != "token":
        raise DataError(f"a batch to be handed out needs a field {EMBEDDED} of kind token")
    groups = [frozenset(batch.schema)]
    if any(station.is_first_stage and not station.is_last_stage for station in stations):
        groups = [frozenset({EMBEDDED}), frozenset(batch.schema) - {EMBEDDED}]
    parts, sizes = zip(*[_put(batch.only(names), plan) for names in groups], strict=True)
    return Handout(
        plan=plan,
        plan_object=ray.put(plan),
        parts=parts,
        ids=batch.ids.numpy(),
        lengths=batch.lengths.numpy(),
        origin=uuid.uuid4().hex,
        nbytes=plan.nbytes + sum(sizes),
    )


def with_fields(held: Handout, fields: Mapping[str, Any], schema: SchemaLike) -> Handout:
    """`held` with fields that are known only now: flat, samples in the order of the batch that was handed out."""
    more = SampleBatch(
        torch.from_numpy(held.ids), torch.from_numpy(held.lengths), dict(fields), normalise_schema(schema)
    )
    return held.with_part(*_put(more, held.plan))


def call_ranks(
    actors: Sequence[Any],
    stations: Sequence[Station],
    held: Handout,
    method: str,
    arguments: tuple[Any, ...] = (),
    *,
    name: str | None = None,
) -> tuple[list[Any], tuple[Any, ...]]:
    """Has every rank call `method` on its samples: one message each.

    Returns references: by rank, what it says; by replica, columns of what it made, under `name` where that is given.
    These lie in the object store, where the rank is that reports for its replica, until somebody asks for them.
    """
    said, made = [], {}
    for actor, station in zip(actors, stations, strict=True):
        own = [part.objects[station.dp_rank] for part in held.parts if station.reads(part.names)]
        work = actor.work.options(num_returns=2)
        word, columns = work.remote(method, arguments, name, held.origin, held.plan_object, *own)
        said.append(word)
        if station.is_replica_leader:
            made[station.dp_rank] = columns
    return said, tuple(made[dp_rank] for dp_rank in sorted(made))


def _put(batch: SampleBatch, plan: Plan) -> tuple[Part, int]:
    """The fields of `batch`, an object for each replica; and their bytes."""
    import ray

    columns, offsets = columns_of(batch), batch.offsets.numpy()
    objects, size = [], 0
    for dp_rank in range(plan.constraints.dp_size):
        share = cut(columns, offsets, _rows(batch, plan, dp_rank))
        size += nbytes(share.values())
        objects.append(ray.put(share))
    return Part(names=frozenset(columns), objects=tuple(objects)), size


def _rows(batch: SampleBatch, plan: Plan, dp_rank: int) -> Ints:
    """The rows of a replica's samples, in the plan's order."""
    ids, planned = share_of(plan, dp_rank)
    rows: Ints = batch.rows_of(ids).numpy()
    lengths = batch.lengths.numpy()[rows]
    if (bad := np.flatnonzero(lengths != planned)).size:
        raise DataError(
            f"sample {ids[bad[0]]} has {lengths[bad[0]]} tokens, in the plan {planned[bad[0]]}: plan from this batch"
        )
    return rows
