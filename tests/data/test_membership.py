from __future__ import annotations

import numpy as np
import pytest

from roll_batching.data import mini_batches, rank_slice
from roll_batching.errors import DataError


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
    with pytest.raises(DataError, match="Rank 3 is not in a group of 3"):
        rank_slice(1, 3, 3)
