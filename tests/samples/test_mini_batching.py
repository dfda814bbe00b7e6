from __future__ import annotations

import numpy as np
import pytest

from roll_batching.errors import DataError
from roll_batching.samples import mini_batches, rank_slice
from roll_batching.samples.mini_batching import mini_batches_by_rank


@pytest.mark.parametrize("count, size, sizes", [(8, 4, [4, 4]), (9, 4, [4, 4, 1]), (3, 4, [3]), (1, 1, [1])])
def test_every_sample_is_in_one_mini_batch(count, size, sizes):
    drawn = mini_batches(count, size, seed=7)
    assert [len(batch) for batch in drawn] == sizes
    assert sorted(np.concatenate(list(drawn)).tolist()) == list(range(count))
    assert drawn.remainder == (sizes[-1] if sizes[-1] != size else 0)
    assert (drawn.notice is None) == (drawn.remainder == 0)


def test_a_smaller_last_mini_batch_is_told():
    assert mini_batches(9, 4, seed=0).notice.startswith(
        "9 samples do not divide into mini-batches of 4: the last of 3 holds 1"
    )


def test_membership_is_a_pure_function_of_seed_and_epoch():
    def drawn(**arguments):
        return np.concatenate(list(mini_batches(64, 8, **arguments))).tolist()

    assert drawn(seed=1, epoch=2) == drawn(seed=1, epoch=2)
    assert len({tuple(drawn(seed=s, epoch=e)) for s in range(4) for e in range(4)}) == 16
    assert drawn(seed=1) != sorted(drawn(seed=1))


def test_groups_share_a_mini_batch():
    pairs = np.arange(20) // 2
    drawn = mini_batches(20, 8, seed=3, group_ids=pairs)
    assert [len(batch) for batch in drawn] == [8, 8, 4]
    for batch in drawn:
        assert (batch[1::2] == batch[::2] + 1).all() and (batch[::2] % 2 == 0).all()
    assert sorted(np.concatenate(list(drawn)).tolist()) == list(range(20))
    assert "the last of 3 holds 4" in drawn.notice
    assert mini_batches(20, 8, seed=3, group_ids=pairs)[0].tolist() == drawn[0].tolist()
    assert mini_batches(20, 8, seed=4, group_ids=pairs)[0].tolist() != drawn[0].tolist()


def test_a_mini_batch_of_rollouts_has_all_their_samples():
    random = np.random.default_rng(0)
    rollouts = random.permutation(np.repeat(np.arange(10) * 3 - 4, random.integers(1, 10, 10)))
    drawn = mini_batches(len(rollouts), 4, seed=3, rollout_ids=rollouts)
    members = [np.unique(rollouts[batch]) for batch in drawn]
    assert [len(names) for names in members] == [4, 4, 2] == list(drawn.rollouts)
    assert sorted(np.concatenate(members)) == sorted(set(rollouts.tolist()))
    assert sorted(np.concatenate(list(drawn)).tolist()) == list(range(len(rollouts)))
    assert drawn.remainder == 2 and drawn.notice.startswith("10 rollouts do not divide into mini-batches of 4")
    alone = mini_batches(64, 8, seed=1, epoch=2, rollout_ids=np.arange(64) * 5)
    assert [batch.tolist() for batch in alone] == [batch.tolist() for batch in mini_batches(64, 8, seed=1, epoch=2)]
    # The same rollouts share a step however many samples each of them has.
    assert [set(names // 3) for names in np.split(np.concatenate([n + 4 for n in members]), [4, 8])] == [
        set(batch.tolist()) for batch in mini_batches(10, 4, seed=3)
    ]


def test_uneven_groups_never_overfill():
    random = np.random.default_rng(0)
    for seed in range(20):
        groups = np.sort(random.integers(0, 30, 100))[random.permutation(100)]
        drawn = mini_batches(100, 12, seed=seed, group_ids=groups)
        assert all(0 < len(batch) <= 12 for batch in drawn)
        homes = [set(groups[batch]) for batch in drawn]
        assert sum(map(len, homes)) == len(set(groups))
        assert "stay together" in drawn.notice
        joined = np.concatenate(list(drawn))
        assert sorted(joined.tolist()) == list(range(100))
        for group in set(groups):
            members = joined[groups[joined] == group]
            assert (np.diff(members) > 0).all()


def test_ranks_share_items_evenly():
    parts = [list(range(10))[rank_slice(10, rank, 4)] for rank in range(4)]
    assert sum(parts, []) == list(range(10)) and {len(p) for p in parts} == {2, 3}
    assert [list(range(2))[rank_slice(2, rank, 3)] for rank in range(3)] == [[], [0], [1]]


@pytest.mark.bad_input
def test_bad_numbers_are_refused():
    for arguments in ({"count": 0, "size": 1}, {"count": 1, "size": 0}):
        with pytest.raises(DataError, match="at least one sample"):
            mini_batches(**arguments, seed=0)
    with pytest.raises(DataError, match="not negative"):
        mini_batches(1, 1, seed=-1)
    with pytest.raises(DataError, match="Group 7 has 3 samples, more than a mini-batch of 2: raise its size"):
        mini_batches(4, 2, seed=0, group_ids=[7, 1, 7, 7])
    with pytest.raises(DataError, match=r"each of the 4 samples; its shape is \(3,\)"):
        mini_batches(4, 2, seed=0, group_ids=[1, 2, 3])
    with pytest.raises(DataError, match="both say what stays together"):
        mini_batches(2, 2, seed=0, group_ids=[0, 1], rollout_ids=[0, 1])
    with pytest.raises(DataError, match="Rank 3 is not in a group of 3"):
        rank_slice(1, 3, 3)


def test_every_pair_shares_a_mini_batch_equally_often():
    """Uniform membership: a pair of 12 samples meets in mini-batches of 4 with probability 3/11, whatever the pair."""
    draws, count, size = 3000, 12, 4
    together = np.zeros((count, count))
    for seed in range(draws):
        for rows in mini_batches(count, size, seed=seed):
            together[np.ix_(rows, rows)] += 1
    pairs = together[~np.eye(count, dtype=bool)] / draws
    expected = (size - 1) / (count - 1)
    deviation = np.sqrt(expected * (1 - expected) / draws)
    assert np.abs(pairs - expected).max() < 5 * deviation
    assert (np.diag(together) == draws).all()


def test_ranks_draw_their_shares_of_a_mini_batch_among_their_own_samples():
    home = np.array([0, 0, 1, 2, 1, 0, 2, 2, 1, 0, 1])
    drawn = mini_batches_by_rank(home, 3, 6, seed=4)
    assert sorted(np.concatenate(list(drawn)).tolist()) == list(range(11))
    assert [np.bincount(home[batch], minlength=3).tolist() for batch in drawn] == [[2, 2, 2], [2, 2, 1]]
    assert all((a == b).all() for a, b in zip(drawn, mini_batches_by_rank(home, 3, 6, seed=4), strict=True))
    assert len({tuple(np.concatenate(list(mini_batches_by_rank(home, 3, 6, seed=s)))) for s in range(4)}) == 4
    with pytest.raises(DataError, match="must be a multiple of the 3 ranks"):
        mini_batches_by_rank(home, 3, 8, seed=4)


def test_each_rank_s_share_is_of_whole_rollouts():
    """Mini-batches of three rollouts on three ranks: one of each rank, with all its samples."""
    samples = np.random.default_rng(2).integers(1, 6, 9)
    rollout_ids = np.repeat(np.arange(9), samples)
    homes = np.arange(9) % 3
    drawn = mini_batches_by_rank(homes[rollout_ids], 3, 3, seed=4, rollout_ids=rollout_ids)
    assert sorted(np.concatenate(list(drawn)).tolist()) == list(range(len(rollout_ids)))
    for batch in drawn:
        rollouts = np.unique(rollout_ids[batch])
        assert sorted(homes[rollouts]) == [0, 1, 2] and len(batch) == samples[rollouts].sum()
    with pytest.raises(DataError, match=r"Samples \[0, 1\] are one rollout, and stay on several ranks"):
        mini_batches_by_rank([0, 1, 2], 3, 3, seed=4, rollout_ids=[0, 0, 1])
