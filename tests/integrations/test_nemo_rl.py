"""NeMo-RL's packers and cuts over our planner keep NeMo-RL's contract."""

from __future__ import annotations

import numpy as np
import pytest
import torch


def lockstep_of(lengths, bins, ranks):
    cost = [sum(lengths[i] * (24576 + lengths[i]) for i in one) for one in bins]
    return sum(max(cost[first : first + ranks]) for first in range(0, len(cost), ranks))


def test_nemo_rl_bins_dealt_in_turn_are_the_plan(host):
    ours = host("nemo_rl")
    from nemo_rl.distributed.batched_data_dict import get_packer

    assert get_packer("modified_first_fit_decreasing", 100) == "NeMo-RL"
    packer = get_packer("roll_batching_rank_totals", 4096, min_bin_count=8, bin_count_multiple=8)
    lengths = np.random.default_rng(1).integers(1, 4000, 256).tolist()
    bins = packer.pack(lengths)
    assert len(bins) % 8 == 0 and all(bins) and sorted(sum(bins, [])) == list(range(256))
    assert max(sum(lengths[item] for item in one) for one in bins) <= 4096
    totals = [sum(lengths[item] for one in bins[rank::8] for item in one) for rank in range(8)]
    assert max(totals) < 1.01 * sum(totals) / 8
    by_name = {
        name: get_packer(name, 4096, min_bin_count=8, bin_count_multiple=8).pack(lengths) for name in ours.OBJECTIVES
    }
    lockstep = {name: lockstep_of(lengths, bins, 8) for name, bins in by_name.items()}
    assert lockstep["roll_batching"] <= lockstep["roll_batching_rank_totals"]
    with pytest.raises(ValueError, match="fewer samples than"):
        packer.pack([1, 2, 3])
    with pytest.raises(ValueError, match="exceeds max_tokens=4096"):
        ours.plan_bins([5000], 4096, 1)


@pytest.mark.parametrize("shards", [1, 4])
def test_nemo_rl_dynamic_batches_keep_its_contract(host, shards):
    host("nemo_rl")
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    lengths = torch.from_numpy(np.random.default_rng(5).integers(1, 500, 64))
    batch = BatchedDataDict(ids=torch.arange(64)[:, None].expand(64, 500), lengths=lengths)
    arguments = {
        "input_key": "ids",
        "input_lengths_key": "lengths",
        "sequence_length_round": 64,
        "max_tokens_per_microbatch": 2048,
    }
    sharded, order = batch.shard_by_batch_size(shards, 32, dynamic_batching_args=arguments)
    assert sorted(order) == list(range(64)) and len(sharded) == shards
    assert torch.cat([shard["ids"][:, 0] for shard in sharded]).tolist() == order
    indices, columns = sharded[0].micro_batch_indices, sharded[0].micro_batch_lengths
    assert len(indices) == len(columns) == 2
    for shard in sharded:
        assert shard.micro_batch_indices == indices and shard.micro_batch_lengths == columns
        for chunk, (cuts, widths) in enumerate(zip(indices, columns, strict=True)):
            of_chunk = shard["lengths"].reshape(2, -1)[chunk]
            assert [first for first, _ in cuts] == [0, *(end for _, end in cuts[:-1])] and cuts[-1][1] == len(of_chunk)
            for (first, end), width in zip(cuts, widths, strict=True):
                assert of_chunk[first:end].max() <= width <= 500 and (width % 64 == 0 or width == 500)
                assert (end - first) * width <= 2048
    assert batch.shard_by_batch_size(shards) == "NeMo-RL"
    with pytest.raises(AssertionError, match="longer than a micro-batch of 100"):
        batch.shard_by_batch_size(shards, dynamic_batching_args=arguments | {"max_tokens_per_microbatch": 100})
