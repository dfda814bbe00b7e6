"""Bin packing, compared with simple implementations and on 10,000 random cases."""

from __future__ import annotations

import numpy as np
import pytest

from roll_batching.errors import PlanError
from roll_batching.planning import pack_bins
from tests.planning.cases import plain_first_fit_decreasing

pytestmark = pytest.mark.planning

ALGORITHMS = [
    "best",
    "concatenative",
    "first_fit_decreasing",
    "first_fit_shuffle",
    "modified_first_fit_decreasing",
]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_item_once_and_no_bin_too_full(algorithm):
    rng = np.random.default_rng(0)
    for _ in range(300):
        cap = int(rng.integers(5, 120))
        sizes = rng.integers(1, cap + 1, int(rng.integers(1, 60)))
        bins = pack_bins(sizes, cap, algorithm, seed=1)
        assert sorted(i for members in bins for i in members) == list(range(len(sizes)))
        assert all(members and sizes[members].sum() <= cap for members in bins)


def test_the_tree_places_as_plain_first_fit_does():
    rng = np.random.default_rng(1)
    for _ in range(300):
        cap = int(rng.integers(5, 120))
        sizes = rng.integers(1, cap + 1, int(rng.integers(1, 60)))
        assert pack_bins(sizes, cap, "first_fit_decreasing") == plain_first_fit_decreasing(sizes.tolist(), cap)


def test_best_never_needs_more_bins_than_first_fit_decreasing():
    rng = np.random.default_rng(2)
    for _ in range(10_000):
        cap = int(rng.integers(10, 200))
        sizes = rng.integers(1, cap + 1, int(rng.integers(1, 30)))
        assert len(pack_bins(sizes, cap, "best")) <= len(pack_bins(sizes, cap, "first_fit_decreasing"))


def test_next_fit_keeps_the_order():
    assert pack_bins([5, 5, 1, 9, 1], 10, "concatenative") == [[0, 1], [2, 3], [4]]


def test_shuffle_is_seeded():
    sizes = np.random.default_rng(3).integers(1, 50, 40)
    first = pack_bins(sizes, 60, "first_fit_shuffle", seed=5)
    assert first == pack_bins(sizes, 60, "first_fit_shuffle", seed=5)
    assert first != pack_bins(sizes, 60, "first_fit_shuffle", seed=6)


def test_items_that_do_not_fit_and_unknown_names_are_refused():
    with pytest.raises(PlanError, match="item 1 of length 11 cannot be packed into bins of 10"):
        pack_bins([3, 11], 10)
    with pytest.raises(PlanError, match="choose one of best, concatenative"):
        pack_bins([3], 10, "bestest")
