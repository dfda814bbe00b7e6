"""Samples as columns: taken by replica, merged again, and only the fields that a rank reads."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from roll_batching.jobs.driver.columns import merge_shards, nbytes, replica_samples, take_samples  # noqa: E402
from roll_batching.jobs.driver.shard_distribution import (  # noqa: E402
    RankLayout,  # noqa: E402
    from_columns,
    to_columns,
)
from roll_batching.planning import PlanConstraints, plan_step  # noqa: E402
from roll_batching.samples import FieldSpec, SampleBatch  # noqa: E402


def batch() -> SampleBatch:
    g = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 30, (40,), generator=g)
    count = int(lengths.sum())
    return SampleBatch(
        ids=torch.randperm(40, generator=g) + 7,
        lengths=lengths,
        fields={
            "input_ids": torch.randint(0, 90, (count,), generator=g),
            "hidden": torch.randn(count, 3, generator=g).bfloat16(),
            "old": torch.randn(count, generator=g),
            "reward": torch.randn(40, generator=g),
            "version": 3,
        },
        schema={
            "input_ids": "token",
            "hidden": "token",
            "old": FieldSpec("next_token", -1.0),
            "reward": "sample",
            "version": "static",
        },
    )


def equal(one: SampleBatch, other: SampleBatch) -> None:
    assert torch.equal(one.ids, other.ids) and torch.equal(one.lengths, other.lengths)
    assert one.schema == other.schema
    for name in one.schema:
        a, b = one[name], other[name]
        assert (a.dtype is b.dtype and torch.equal(a, b)) if isinstance(a, torch.Tensor) else a == b, name


def test_columns_are_the_batch_without_a_copy():
    whole = batch()
    again = from_columns(whole.ids.numpy(), whole.lengths.numpy(), to_columns(whole))
    equal(whole, again)
    assert again["input_ids"].data_ptr() == whole["input_ids"].data_ptr()


def test_a_replica_gets_what_shard_gives_and_parts_join_to_the_batch():
    whole = batch()
    plan = plan_step(whole.lengths.numpy(), PlanConstraints(dp_size=3, max_tokens=64), ids=whole.ids.numpy())
    offsets, parts, size = whole.offsets.numpy(), [], 0
    for dp_rank in range(3):
        ids, lengths = replica_samples(plan, dp_rank)
        share = take_samples(to_columns(whole), offsets, whole.rows_of(ids).numpy())
        equal(from_columns(ids, lengths, share), plan.shard(whole, dp_rank))
        size += nbytes(share.values())
        parts.append((share, whole.rows_of(ids).numpy()))
    assert size == sum(x.nbytes for x in whole.fields.values() if isinstance(x, torch.Tensor)), "each sample once"
    equal(from_columns(whole.ids.numpy(), whole.lengths.numpy(), merge_shards(parts, whole.lengths.numpy())), whole)


def test_a_replica_without_samples_gets_empty_columns_and_missing_samples_read_pad():
    whole = batch()
    columns, offsets = to_columns(whole), whole.offsets.numpy()
    none, few = np.zeros(0, dtype=np.int64), np.array([5, 2])
    assert from_columns(none, none, take_samples(columns, offsets, none)).num_tokens == 0
    parts = [(take_samples(columns, offsets, none), none), (take_samples(columns, offsets, few), few)]
    joined = from_columns(whole.ids.numpy(), whole.lengths.numpy(), merge_shards(parts, whole.lengths.numpy()))
    for row, (mine, theirs) in enumerate(zip(joined.to_lists("old"), whole.to_lists("old"), strict=True)):
        assert torch.equal(mine, theirs if row in few else torch.full_like(theirs, -1.0))


def test_stages_of_a_pipeline_read_what_they_need():
    def layout(is_first_stage: bool, is_last_stage: bool) -> RankLayout:
        return RankLayout(
            dp_rank=0, is_first_stage=is_first_stage, is_last_stage=is_last_stage, is_replica_leader=is_last_stage
        )

    tokens, rest = frozenset({"input_ids"}), frozenset({"mask"})
    assert [layout(True, False).reads(names) for names in (tokens, rest)] == [True, False]
    assert [layout(False, False).reads(names) for names in (tokens, rest)] == [False, False]
    assert [layout(False, True).reads(names) for names in (tokens, rest)] == [True, True]


def test_a_plan_travels_as_its_arrays():
    plan = plan_step([3, 4, 5, 6], PlanConstraints(dp_size=2, max_tokens=8))
    plain = len(pickle.dumps(plan))
    list(plan.micro_batches[0]), plan.report, plan.fingerprint
    assert len(pickle.dumps(plan)) == plain
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan and again.report == plan.report


def test_columns_and_plans_are_read_without_torch():
    code = "import sys, roll_batching.jobs.driver.columns; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
