"""Distributes the samples of a worker group through Ray's object store, with one object per replica.

A `SampleBatch` becomes flat numpy columns and back without a copy; Ray shares them between the processes of a machine.
"""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from roll_batching.errors import DataError
from roll_batching.jobs.driver.columns import Column, Columns, nbytes, replica_samples, take_samples
from roll_batching.planning import Plan
from roll_batching.planning.arrays import Ints
from roll_batching.samples import FieldSpec, SampleBatch
from roll_batching.samples.fields import SchemaLike, normalise_schema
from roll_batching.samples.token_fields import require_field


def to_columns(batch: SampleBatch) -> dict[str, Column]:
    """Returns the fields of `batch` as numpy columns on the host. Raises `DataError` for fields of kind rows."""
    if rows_fields := [name for name, spec in batch.schema.items() if spec.kind == "rows"]:
        raise DataError(
            f"fields {', '.join(rows_fields)} are of kind rows, which a worker group on Ray does not send: train from "
            "a YAML job, or call the strategy's train_step on every rank"
        )
    return {name: _column(batch[name], spec) for name, spec in batch.schema.items()}


def from_columns(ids: Ints, lengths: Ints, columns: Columns, origin: str | None = None) -> SampleBatch:
    """A batch whose tensors share the memory of `columns`, which is read-only in Ray's object store."""
    schema = {name: FieldSpec(column.kind, column.pad) for name, column in columns.items()}
    fields = {name: _tensor(column) for name, column in columns.items()}
    return SampleBatch(torch.tensor(ids), torch.tensor(lengths), fields, schema, origin)


def _column(values: Any, spec: FieldSpec) -> Column:
    if spec.kind == "static":
        return Column(values=values, kind=spec.kind, pad=spec.pad, dtype="")
    dtype = str(values.dtype).removeprefix("torch.")
    tensor = values.detach().cpu().contiguous()
    bits = tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor  # numpy has no bfloat16
    assert spec.kind != "rows"  # `to_columns` refuses them
    return Column(values=bits.numpy(), kind=spec.kind, pad=spec.pad, dtype=dtype)


def _tensor(column: Column) -> Any:
    if column.kind == "static":
        return column.values
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(np.ascontiguousarray(column.values))
    dtype = getattr(torch, column.dtype)
    return tensor if tensor.dtype is dtype else tensor.view(dtype)  # bfloat16, whose bits came as int16


# ---- shard distribution


EMBEDDED = "input_ids"
"""The field that a pipeline's first stage reads."""


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """A rank's place in the parallel layout, which decides the fields that it reads."""

    dp_rank: int
    """Number of the replica to which the rank belongs."""
    is_first_stage: bool
    """First pipeline stage: reads `input_ids`."""
    is_last_stage: bool
    """Last pipeline stage: reads all fields."""
    is_replica_leader: bool
    """Returns the results of its replica."""

    def reads(self, names: frozenset[str]) -> bool:
        """Whether the rank needs any of the fields `names`; middle pipeline stages need only lengths and plan."""
        return self.is_last_stage or (self.is_first_stage and EMBEDDED in names)


@dataclass(frozen=True, kw_only=True)
class FieldShards:
    """Some fields of all samples, one object per replica."""

    names: frozenset[str]
    objects: tuple[Any, ...]
    """By replica: reference of its columns in the object store, with samples in the plan's order."""


@dataclass(frozen=True, kw_only=True)
class DistributedBatch:
    """A step's samples and plan in Ray's object store, for any number of passes. Freed with its last copy."""

    plan: Plan
    plan_object: Any
    shards: tuple[FieldShards, ...]
    ids: Ints
    """int64 `[n]`: ids of the caller's samples, in the caller's order."""
    lengths: Ints
    """int64 `[n]`: tokens of these samples."""
    origin: str
    """Unique name, by which the ranks of a replica check that they got the same batch."""
    nbytes: int
    """Bytes of samples and plan that the driver put into the object store."""

    def with_shards(self, shards: FieldShards, size: int = 0) -> DistributedBatch:
        """Returns the same samples with more fields, of which the driver put `size` bytes into the object store.

        Raises DataError for a field that the samples have already.
        """
        if duplicates := {name for other in self.shards for name in other.names & shards.names}:
            raise DataError(f"the distributed samples have {', '.join(sorted(duplicates))} already: drop these")
        return replace(self, shards=(*self.shards, shards), origin=uuid.uuid4().hex, nbytes=self.nbytes + size)


def distribute_batch(batch: SampleBatch, plan: Plan, layouts: Sequence[RankLayout]) -> DistributedBatch:
    """Puts samples and plan into the object store: one object per replica, and one for the plan.

    Args:
        batch: all samples; those outside of the plan are not distributed.
        plan: for as many replicas as `layouts` have.
        layouts: of all ranks. Where some read `input_ids` alone, these are separate objects.

    Raises:
        DataError: when batch and plan do not match, or `input_ids` are missing.
    """
    import ray

    replicas = 1 + max(layout.dp_rank for layout in layouts)
    if plan.constraints.dp_size != replicas:
        raise DataError(f"the plan is for dp_size={plan.constraints.dp_size}: plan for {replicas}, as the group has")
    require_field(batch, EMBEDDED, "the distribution", "token")
    groups = [frozenset(batch.schema)]
    if any(layout.is_first_stage and not layout.is_last_stage for layout in layouts):
        groups = [frozenset({EMBEDDED}), frozenset(batch.schema) - {EMBEDDED}]
    shards, sizes = zip(*[_put(batch.only(names), plan) for names in groups], strict=True)
    return DistributedBatch(
        plan=plan,
        plan_object=ray.put(plan),
        shards=shards,
        ids=batch.ids.numpy(),
        lengths=batch.lengths.numpy(),
        origin=uuid.uuid4().hex,
        nbytes=plan.nbytes + sum(sizes),
    )


def with_fields(batch: DistributedBatch, fields: Mapping[str, Any], schema: SchemaLike) -> DistributedBatch:
    """`batch` with more fields, which are flat and in the order of the distributed batch."""
    ids, lengths = torch.from_numpy(batch.ids), torch.from_numpy(batch.lengths)
    added = SampleBatch(ids, lengths, dict(fields), normalise_schema(schema))
    return batch.with_shards(*_put(added, batch.plan))


def call_ranks(
    actors: Sequence[Any],
    layouts: Sequence[RankLayout],
    batch: DistributedBatch,
    method: str,
    arguments: tuple[Any, ...] = (),
    *,
    name: str | None = None,
) -> tuple[list[Any], tuple[Any, ...]]:
    """Calls `method` on every rank with its samples, one message each.

    Returns references: results by rank; and by replica the columns that it computed, renamed to `name` if given. The
    columns stay in the object store of their replica leader's machine until they are fetched.
    """
    results, columns = [], {}
    for actor, layout in zip(actors, layouts, strict=True):
        references = [shards.objects[layout.dp_rank] for shards in batch.shards if layout.reads(shards.names)]
        remote = actor.call_with_samples.options(num_returns=2)
        result, computed = remote.remote(method, arguments, name, batch.origin, batch.plan_object, *references)
        results.append(result)
        if layout.is_replica_leader:
            columns[layout.dp_rank] = computed
    return results, tuple(columns[dp_rank] for dp_rank in sorted(columns))


def _put(batch: SampleBatch, plan: Plan) -> tuple[FieldShards, int]:
    """Puts the fields of `batch` into the object store, one object per replica; returns them and their bytes."""
    import ray

    columns, offsets = to_columns(batch), batch.offsets.numpy()
    objects, size = [], 0
    for dp_rank in range(plan.constraints.dp_size):
        shard = take_samples(columns, offsets, _indices(batch, plan, dp_rank))
        size += nbytes(shard.values())
        objects.append(ray.put(shard))
    return FieldShards(names=frozenset(columns), objects=tuple(objects)), size


def _indices(batch: SampleBatch, plan: Plan, dp_rank: int) -> Ints:
    """Indices in `batch` of a replica's samples, in the plan's order. Raises DataError for other lengths."""
    ids, planned = replica_samples(plan, dp_rank)
    indices: Ints = batch.rows_of(ids).numpy()
    lengths = batch.lengths.numpy()[indices]
    if (bad := np.flatnonzero(lengths != planned)).size:
        raise DataError(
            f"sample {ids[bad[0]]} has {lengths[bad[0]]} tokens, in the plan {planned[bad[0]]}: plan from this batch"
        )
    return indices
