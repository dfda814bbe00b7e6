"""ROLL's packing over our planner keeps ROLL's contract."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch


def test_a_method_is_given_back(host):
    ours = host("roll")
    from roll.utils.sequence_packing import LoadBalancePacker

    assert (
        LoadBalancePacker.make_micro_batch_iter_for_sequence_packing is ours.make_micro_batch_iter_for_sequence_packing
    )
    ours.unpatch()
    assert LoadBalancePacker(None).make_micro_batch_iter_for_sequence_packing(None, 1, 1, 1) == "ROLL"


def test_roll_plans_keep_its_contract(host):
    ours = host("roll")
    generator = np.random.default_rng(3)
    for cp, vp in ((1, 1), (2, 1), (1, 4)):
        parts = [generator.integers(1, 300, 64).astype(np.int64) for _ in range(3)]
        bins = ours.plan_bins(parts, 1024, cp_size=cp, vp_size=vp, least=2, sequence_multiple=16)
        assert len({len(one) for one in bins}) == 1 and len(bins[0]) % vp == 0
        for part, of_rank in zip(parts, bins, strict=True):
            assert sorted(sum(of_rank, [])) == list(range(64)) and all(of_rank)
            padded = -(-part // 16) * 16
            assert all(padded[indices].sum() <= 1024 for indices in of_rank)
    with pytest.raises(AssertionError, match="2000"):
        ours.plan_bins([np.array([2000])], 1024)
    from roll.pipeline.base_worker import ActorWorker

    assert issubclass(ours.BaseActorWorker, ActorWorker) and ours.BaseActorWorker.__module__ == ours.__name__


@pytest.mark.parametrize(("pp", "vp"), [(1, None), (2, None), (4, 2)])
def test_roll_dynamic_batches_keep_its_contract(host, pp, vp):
    ours = host("roll")
    from roll.utils.dynamic_batching import dynamic_batching_shard

    assert dynamic_batching_shard is ours.dynamic_batching_shard
    lengths = torch.from_numpy(np.random.default_rng(6).integers(0, 500, 64))  # a sample without tokens as well
    lengths[3] = 0
    mask = (torch.arange(500) < lengths[:, None]).long()
    batch = SimpleNamespace(batch={"attention_mask": mask}, meta_info={"global_step": 3})
    shard, metrics = dynamic_batching_shard(batch, 4, 2048, 64, pp, vp, "train")
    facts = shard.meta_info
    cuts, widths = facts["global_micro_batch_indices"], facts["global_micro_batch_lengths"]
    assert facts["num_micro_batchs"] == len(cuts) == len(widths) and len(cuts) % (pp if vp else 1) == 0
    assert facts["micro_batch_indices"] == cuts and facts["micro_batch_lengths"] == widths and facts["global_step"] == 3
    assert [first for first, _ in cuts] == [0, *(end for _, end in cuts[:-1])] and cuts[-1][1] == 16
    of_ranks = shard.batch["attention_mask"].sum(1).reshape(4, 16)
    for (first, end), width in zip(cuts, widths, strict=True):
        assert of_ranks[:, first:end].max() <= width and width % 64 == 0 and (end - first) * width <= 2048
    tokens = 4 * sum((end - first) * width for (first, end), width in zip(cuts, widths, strict=True))
    assert metrics["dynamic_batching/train/actual_tokens"] == tokens
    assert metrics["dynamic_batching/train/removed_padding_tokens"] == 64 * 500 - tokens
    with pytest.raises(AssertionError, match="longer than a micro-batch of 100"):
        dynamic_batching_shard(batch, 4, 100, 64)
