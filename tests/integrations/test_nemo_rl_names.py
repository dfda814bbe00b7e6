"""NeMo-RL's names: packers, sharding, iterators."""

from __future__ import annotations

import numpy as np
import pytest

from roll_batching.errors import PlanError
from roll_batching.integrations import nemo_rl_names as nemo_rl

pytestmark = pytest.mark.planning

SECTION = {
    "input_key": "input_ids",
    "input_lengths_key": "input_lengths",
}


@pytest.fixture
def batch():
    torch = pytest.importorskip("torch")
    data = pytest.importorskip("roll_batching.samples")
    lengths = [3, 9, 1, 5, 7, 2, 8, 4, 6, 5, 3, 1]
    rows = [torch.arange(n) + 100 * i for i, n in enumerate(lengths)]
    return data.SampleBatch.from_lists({"input_ids": rows}, {"input_ids": "token"})


@pytest.mark.parametrize("algorithm", list(nemo_rl.PackingAlgorithm))
def test_packers_keep_the_capacity_and_the_count_rules(algorithm):
    lengths = np.random.default_rng(0).integers(1, 100, 60).tolist()
    packer = nemo_rl.get_packer(algorithm.name, 100, collect_metrics=True, min_bin_count=40, bin_count_multiple=8)
    bins = packer.pack(lengths)
    assert sorted(i for members in bins for i in members) == list(range(60))
    assert all(members and sum(lengths[i] for i in members) <= 100 for members in bins)
    assert len(bins) % 8 == 0 and len(bins) >= 40
    assert packer.get_aggregated_metrics()["num_bins"] == len(bins)


def test_unknown_names_and_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="unknown"):
        nemo_rl.get_packer("best_guess", 10)
    with pytest.raises(ValueError, match="Cannot create 4 bins with only 2 sequences"):
        nemo_rl.get_packer("concatenative", 10, bin_count_multiple=4).pack([3, 3])


def test_packing_shards_every_chunk_round_robin_and_undoes_the_order(batch):
    args = {
        **SECTION,
        "algorithm": "modified_first_fit_decreasing",
        "max_tokens_per_microbatch": 16,
        "sequence_length_pad_multiple": 4,
    }
    shards, rows = nemo_rl.shard_by_batch_size(batch, 2, batch_size=6, sequence_packing_args=args)
    assert sorted(rows.tolist()) == list(range(12))
    assert np.concatenate([shard.batch.ids.numpy() for shard in shards]).tolist() == rows.tolist()
    for chunk in range(2):
        counts = []
        for shard in shards:
            pieces = list(nemo_rl.make_microbatch_iterator_for_packable_sequences(shard, chunk))
            counts.append(len(pieces))
            for piece in pieces:
                assert (-(-piece.lengths // 4) * 4).sum() <= 16
                assert set(piece.ids.tolist()) <= set(range(6 * chunk, 6 * chunk + 6))
        assert counts[0] == counts[1]


def test_microbatch_order_is_that_of_the_packer_or_largest_first(batch):
    """Ranks keep their bins; only the order in time changes (NeMo-RL's `BatchedDataDict.shard_by_batch_size`)."""
    args = {"algorithm": "concatenative", "max_tokens_per_microbatch": 16, "sequence_length_pad_multiple": 4}

    def tokens(**more):
        shards, _ = nemo_rl.shard_by_batch_size(batch, 2, sequence_packing_args={**args, **more})
        plan = shards[0].plans[0]
        return plan.tokens.reshape(2, -1).tolist()

    assert tokens() == tokens(microbatch_order="packer")
    largest = tokens(microbatch_order="largest_first")
    assert largest != tokens()
    assert largest == [sorted(rank, reverse=True) for rank in tokens()]
    with pytest.raises(PlanError, match="microbatch_order='smallest'"):
        tokens(microbatch_order="smallest")


def test_dynamic_shapes_truncate_to_the_micro_batch(batch):
    args = {**SECTION, "max_tokens_per_microbatch": 20, "sequence_length_round": 2}
    shards, _ = nemo_rl.shard_by_batch_size(batch, 2, dynamic_batching_args=args)
    shapes = [
        [tuple(mb["input_ids"].shape) for mb in nemo_rl.make_microbatch_iterator_with_dynamic_shapes(shard)]
        for shard in shards
    ]
    assert shapes[0] == shapes[1]
    assert all(rows * length <= 20 and length % 2 == 0 for rows, length in shapes[0])


def test_sizes_must_divide_unless_uneven_shards_are_allowed(batch):
    with pytest.raises(PlanError, match="cannot be cut evenly"):
        nemo_rl.shard_by_batch_size(batch, 5)
    shards, rows = nemo_rl.shard_by_batch_size(batch, 5, allow_uneven_shards=True)
    assert [len(shard.batch) for shard in shards] == [3, 3, 2, 2, 2]
    assert rows.tolist() == list(range(12))
