"""Packs: examples of the ROLL and NeMo-RL documentation, and properties for random plans."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll_batching.errors import DataError, PlanError
from roll_batching.packing import PackLayout, pack_step, packed_params, unpack_results
from roll_batching.packing.pack_layout import TAIL_SEGMENT
from roll_batching.planning import Plan, PlanConstraints, plan_step
from roll_batching.samples import SampleBatch

CPU = torch.device("cpu")
PAD = -1


def _one_pack(lengths: list[int], **constraints: object) -> tuple[SampleBatch, Plan]:
    options = {"dp_size": 1, "max_tokens": 512, "algorithm": "none", **constraints}
    batch = SampleBatch.from_lists({"input_ids": [[i] * n for i, n in enumerate(lengths)]}, {"input_ids": "token"})
    return batch, plan_step(lengths, PlanConstraints(**options))


def _rows(lengths: list[int], cp_rank: int, **constraints: object) -> list[int]:
    batch, plan = _one_pack(lengths, **constraints)
    (pack,) = pack_step(batch, plan, dp_rank=0, cp_rank=cp_rank, device=CPU)
    tokens = torch.where(pack.padding_mask, PAD, pack.input_ids)
    return tokens[0].tolist()


def test_rolls_context_parallel_example() -> None:
    """ROLL, section 2.2.3: lengths 2, 4, 6, 1 under CP 2; p is padding."""
    p = PAD
    lengths = [2, 4, 6, 1]
    assert _rows(lengths, 0, cp_size=2) == [0, p, 1, 1, 2, 2, p, p, 3, p]
    assert _rows(lengths, 1, cp_size=2) == [0, p, 1, 1, 2, 2, 2, 2, p, p]
    _, plan = _one_pack(lengths, cp_size=2)
    assert PackLayout.of(plan.micro_batches[0][0], 2).cu_seqlens.tolist() == [0, 4, 8, 16, 20]


def test_nemo_rls_context_parallel_example() -> None:
    """NeMo-RL, "Understanding CP Load balancing": lengths 5, 8, 1, 3 under CP 2, slots of 2 * CP * TP = 4."""
    p = PAD
    lengths = [5, 8, 1, 3]
    options = {"cp_size": 2, "sequence_multiple": "2*cp*tp"}
    assert _rows(lengths, 0, **options) == [0, 0, p, p, 1, 1, 1, 1, 2, p, 3, p]
    assert _rows(lengths, 1, **options) == [0, 0, 0, p, 1, 1, 1, 1, p, p, 3, 3]


def test_rolls_chunk_assignment() -> None:
    """ROLL, section 2.2.2: six tokens under CP 2 are padded to eight; ranks get chunks 0 and 3, 1 and 2."""
    _, plan = _one_pack([6], cp_size=2)
    layout = PackLayout.of(plan.micro_batches[0][0], 2)
    assert layout.local_tokens(0).tolist() == [0, 1, 6, 7]
    assert layout.local_tokens(1).tolist() == [2, 3, 4, 5]


def test_views_show_the_next_token() -> None:
    batch = SampleBatch.from_lists(
        {"input_ids": [[10, 11, 12], [20], [30, 31]], "mask": [[0, 0, 1], [1], [1, 1]], "old": [[1.0, 2.0], [], [3.0]]},
        {"input_ids": "token", "mask": "token", "old": "next_token"},
    )
    plan = plan_step([3, 1, 2], PlanConstraints(dp_size=1, max_tokens=8, algorithm="none", pack_multiple=8))
    (pack,) = pack_step(batch, plan, dp_rank=0, device=CPU, masks=("mask",))
    assert pack.input_ids[0].tolist() == [10, 11, 12, 20, 30, 31, 0, 0]
    assert pack.labels.tolist() == [11, 12, 0, 0, 31, 0, 0, 0]
    assert pack.masks["mask"].tolist() == [False, True, False, False, True, False, False, False]
    assert pack.fields["old"].tolist() == [1.0, 2.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0]
    assert pack.head_tokens.tolist() == [1, 4]
    assert pack.layout.segments.tolist() == [3, 1, 2, 2]  # the tail is a segment of its own


def test_tail_filler_is_short_segments() -> None:
    _, plan = _one_pack([10], pack_multiple=1000, max_tokens=2000)
    layout = PackLayout.of(plan.micro_batches[0][0])
    assert layout.tokens == 1000
    assert layout.segments[0] == 10 and max(layout.segments[1:]) <= TAIL_SEGMENT


def test_a_plan_without_context_parallelism_is_refused_under_it() -> None:
    _, plan = _one_pack([5, 3])
    with pytest.raises(PlanError, match=r"PlanConstraints\(cp_size=2"):
        PackLayout.of(plan.micro_batches[0][0], 2)


@pytest.mark.bad_input
def test_a_length_mismatch_names_the_sample_that_differs_and_both_lengths() -> None:
    """Ids, indices in the batch and positions in the pack differ here; two of the three lengths are right."""
    ids, lengths = [70, 50, 60, 80], [3, 5, 7, 2]
    plan = plan_step(lengths, PlanConstraints(dp_size=1, max_tokens=32, algorithm="none"), ids=ids)
    for wrong, number in enumerate(ids):
        have = [n + 4 * (i == wrong) for i, n in enumerate(lengths)]
        batch = SampleBatch.from_lists({"input_ids": [[1] * n for n in have]}, {"input_ids": "token"}, ids)
        with pytest.raises(DataError, match=f"sample {number} has {have[wrong]} tokens .* and {lengths[wrong]} in"):
            pack_step(batch.select([2, 0, 3, 1]), plan, dp_rank=0, device=CPU)
    held = SampleBatch.from_lists({"input_ids": [[1] * n for n in lengths]}, {"input_ids": "token"}, ids)
    with pytest.raises(DataError, match=r"samples \[50, 80\], which its local batch of 2 does not hold"):
        pack_step(held.select([2, 0]), plan, dp_rank=0, device=CPU)


plans = st.tuples(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["packed", "dynamic", "padded"]),
    st.booleans(),
)


def plan_of(lengths: list[int], cp: int, mode: str, sp: bool) -> Plan:
    options: dict[str, object] = {"max_tokens": 128}
    if mode == "padded":
        options = {"rows": 3}
    constraints = PlanConstraints(dp_size=2, cp_size=cp, tp_size=2, sequence_parallel=sp, mode=mode, **options)
    return plan_step(lengths, constraints)


@given(plans)
def test_rows_of_all_ranks_tile_the_pack_and_restore_puts_them_back(case) -> None:
    plan = plan_of(*case)
    cp = case[1]
    for mb in (mb for rank in plan.micro_batches for mb in rank):
        layout = PackLayout.of(mb, cp)
        rows = [layout.local_tokens(r) for r in range(cp)]
        assert {len(r) for r in rows} == {layout.tokens // cp}
        assert np.array_equal(np.concatenate(rows)[layout.restore], np.arange(layout.tokens))
        for rank, held in enumerate(rows):
            real = layout.segment_ids[held][layout.real[held]]
            assert np.array_equal(layout.real_token_counts(rank), np.bincount(real, minlength=layout.samples))
        assert int(layout.real.sum()) == int(mb.lengths.sum())
        assert int(layout.predicts.sum()) == int((mb.lengths - 1).sum())


@given(plans)
def test_results_return_to_their_samples(case) -> None:
    lengths = case[0]
    plan = plan_of(*case)
    batch = SampleBatch.from_lists(
        {"input_ids": [[1] * n for n in lengths], "value": [np.arange(n) + 100.0 * i for i, n in enumerate(lengths)]},
        {"input_ids": "token", "value": "next_token"},
    )
    for dp_rank in range(2):
        mine = plan.shard(batch, dp_rank)
        if not len(mine):
            continue
        packs = pack_step(mine, plan, dp_rank=dp_rank, cp_rank=0, device=CPU)
        flat = unpack_results(
            mine, plan, [pack.layout for pack in packs], [pack.fields["value"] for pack in packs], dp_rank=dp_rank
        )
        expected = mine["value"].clone()
        expected[mine.offsets[1:] - 1] = 0
        assert torch.equal(flat.double(), expected.double())


def test_cu_seqlens_is_one_object_and_max_seqlen_a_plain_int() -> None:
    _, plan = _one_pack([5, 9, 2])
    params = packed_params(PackLayout.of(plan.micro_batches[0][0]), 0, CPU)
    assert params.cu_seqlens_q is params.cu_seqlens_kv is params.cu_seqlens_q_padded is params.cu_seqlens_kv_padded
    assert params.cu_seqlens_q.dtype == torch.int32
    assert type(params.max_seqlen_q) is int and params.max_seqlen_q >= 9
