"""verl's functions over our planner keep verl's contract."""

from __future__ import annotations

import numpy as np
import pytest
import torch


def jagged(lengths):
    rows = [torch.full((length,), number) for number, length in enumerate(lengths)]
    return {"input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}


def test_verl_plans_keep_its_contract(host):
    ours = host("verl")
    ours.unpatch()
    generator = np.random.default_rng(0)
    for _ in range(30):
        ranks, multiple, group = (int(generator.integers(1, top)) for top in (5, 5, 3))
        parts = [generator.integers(1, 500, 40 * group).astype(np.int64) for _ in range(ranks)]
        bins = ours.plan_bins(parts, 2000, multiple=multiple, least=3, group_size=group)
        counts = {len(of_rank) for of_rank in bins}
        assert len(counts) == 1 and counts.pop() % multiple == 0
        for part, of_rank in zip(parts, bins, strict=True):
            assert sorted(sum(of_rank, [])) == list(range(len(part))) and all(of_rank)
            assert all(indices == sorted(indices) and part[indices].sum() <= 2000 for indices in of_rank)
            for indices in of_rank:
                assert {index // group for index in indices} == {i // group for i in indices[::group]}


def test_verl_takes_jagged_and_padded_batches(host):
    ours = host("verl")
    lengths = [5, 90, 40, 60, 7]
    mask = torch.arange(90) < torch.tensor(lengths)[:, None]
    padded = {"input_ids": torch.zeros(5, 90, dtype=torch.long), "attention_mask": mask.long()}
    _, bins = ours.rearrange_micro_batches(padded, 100)
    assert sorted(sum(bins, [])) == list(range(5)) and len(bins) == 3
    with pytest.raises(AssertionError, match="max_token_len must be greater"):
        ours.rearrange_micro_batches(padded, 80)
    assert ours._samples(jagged(lengths)).lengths.tolist() == lengths


@pytest.mark.bad_input
def test_verl_groups_that_do_not_divide_and_partitions_of_nan(host):
    ours = host("verl")
    mask = torch.ones(5, 9, dtype=torch.long)
    with pytest.raises(AssertionError, match=r"Batch sizes \[5\] must be divisible by force_group_size 2"):
        ours.rearrange_micro_batches({"input_ids": mask, "attention_mask": mask}, 100, force_group_size=2)
    with pytest.raises(AssertionError, match="weights must be finite"):
        ours.get_seqlen_balanced_partitions([1.0, float("nan")], 2, True)
    with pytest.raises(AssertionError, match="number of items"):
        ours.get_seqlen_balanced_partitions([], 2, True)
    assert ours.get_seqlen_balanced_partitions([3, 1], 1, True) == [[0, 1]]
